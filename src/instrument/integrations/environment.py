"""The loop that ``instrument run`` requests by an environment variable: one for each process."""

from __future__ import annotations

import functools
import json
import os

from .. import log
from ..config import RUN
from .loop import Loop


@functools.cache
def loop_from_environment() -> Loop | None:
    """Return the loop that the environment requests; None if it requests none.

    The adapters that ``instrument run`` attaches drive this loop, which yields to a loop of the program's own.
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
