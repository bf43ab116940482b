"""Suggests what a name that matches nothing may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_MAX_LISTED = 5


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence that names the nearest of ``known``, or some of them if none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    if not known:
        return "; there was none at all"
    listed = ", ".join(f'"{one}"' for one in known[:_MAX_LISTED])
    return f"; there were {listed}{', ...' * (len(known) > _MAX_LISTED)}"
