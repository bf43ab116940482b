"""The loop that ``instrument run`` asks for in the environment: one a process, driven by whoever tells steps."""

from __future__ import annotations

import functools
import json
import os

from .. import log
from ..config import RUN
from .loop import AutomaticLoop, Loop


@functools.cache
def automatic() -> AutomaticLoop | None:
    """Return the loop that the environment asks for, which steps aside for one of the program's own.

    Adapters that the environment brings in drive this one. None where it asks for none.
    """
    text = os.environ.get(RUN)
    if not text:
        return None
    try:
        given = json.loads(text)
        loop = AutomaticLoop(**given)
    except (TypeError, ValueError) as error:  # an environment variable must not stop a training job
        log.warning(f"{RUN} is ignored", reason=str(error))
        return None
    if not loop.made:
        return None
    Loop.requested = loop
    return loop
