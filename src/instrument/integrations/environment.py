"""The loop that ``instrument run`` requests by an environment variable: one for each process."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import instrument

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
        loop = _loop(**json.loads(text))
    except (TypeError, ValueError) as error:  # an environment variable must not stop a training job
        log.warning(f"{RUN} is ignored", reason=str(error))
        return None
    if not loop.initialized:
        return None
    Loop.requested = loop
    return loop


def _loop(**given: Any) -> AutomaticLoop:
    """Return the loop of the arguments ``given``, in which ``keep`` and ``memory`` have those of a function."""
    made: dict[str, Callable[..., Any]] = {"keep": instrument.keep, "memory": instrument.memory_history}
    return AutomaticLoop(**{name: made[name](**value) if name in made else value for name, value in given.items()})
