"""The loop that ``instrument run`` requests by an environment variable: one for each process."""

from __future__ import annotations

import functools
import json
import os

from .. import log
from ..config import RUN
from .loop import AutomaticLoop, Loop


@functools.cache
def loop_from_environment() -> AutomaticLoop | None:
    """Return the loop that the environment requests; None if it requests none.

    The adapters that ``instrument run`` attaches drive this loop, which yields to a loop of the program's own.
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
    if not loop.initialized:
        return None
    Loop.requested = loop
    return loop
