"""The section that shows the length of each step as a dot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..units import count

_MAX_DOTS = 5000
Group = tuple[str, Sequence[int], int]
"""The name of a recording, the lengths of its steps in ns, and their median."""


def samples_section(title: str, groups: Sequence[Group], *, detectable: float | None = None) -> dict[str, Any]:
    """Return the section of steps on one axis.

    Args:
        title: its title.
        groups: one or two recordings.
        detectable: the smallest relative change of the first median that these steps show in 80 % of cases.
    """
    most = max(len(lengths) for _, lengths, _ in groups)
    each = -(-most // _MAX_DOTS)
    return {
        "id": "steps",
        "type": "samples",
        "title": title,
        "note": f"One in {count(each)} of the steps is shown." if each > 1 else "",
        "detectable": detectable,
        "groups": [
            {
                "name": name,
                "steps": len(lengths),
                "median_ns": median_ns,
                "every": each,
                "lengths_ns": lengths[::each],
            }
            for name, lengths, median_ns in groups
        ],
    }
