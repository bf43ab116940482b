"""The loop that ``instrument run`` asks for in the environment: one a process, driven by whoever tells steps."""

from __future__ import annotations

import functools
import json
import os

from .. import log
from ..config import RUN
from .loop import Loop


@functools.cache
def loop_from_environment() -> Loop | None:
    """Return the loop that the environment asks for, which steps aside for one of the program's own.

    Adapters that the environment brings in drive this one. None where it asks for none.
    """
    text = os.environ.get(RUN)
    if not text:
        return None
    try:
        given = json.loads(text)
        step_on, run_options = given.pop("step_on", None), given.pop("run_options", [])
        loop = Loop(**given)
    except (
        TypeError,
        ValueError,
        AttributeError,
    ) as error:  # an environment variable must not stop a training job
        log.warning(f"{RUN} is ignored", reason=str(error))
        return None
    if not loop.made:
        return None
    loop.automatic, loop.step_on, loop.run_options = True, step_on, run_options
    Loop.requested = loop
    return loop
