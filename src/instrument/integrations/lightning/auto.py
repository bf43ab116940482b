"""Adds a callback to every Trainer of the process if the environment requests a loop."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ...config import RUN, settings
from ...guard import guard
from ...patch import Patch
from .callback import InstrumentCallback
from .packages import FEATURE, loaded

_patches: dict[type, Patch] = {}  # by the class of Trainer


class AutomaticCallback(InstrumentCallback):
    """Drives the loop that the environment requests, except in a Trainer with another `InstrumentCallback`."""

    def __init__(self) -> None:
        from ..environment import loop_from_environment

        loop = loop_from_environment()
        if loop is None:
            raise ValueError(f"{RUN} does not request a loop")
        self._follow(loop)


@guard.prepared(FEATURE, otherwise=list)
def callbacks() -> list[Any]:
    """Return the callbacks of the entry point, for each new Trainer: one if the environment requests a loop."""
    if settings.enabled and os.environ.get(RUN):
        from ..environment import loop_from_environment

        if loop_from_environment() is not None:
            return [AutomaticCallback()]
    return []


@guard.contained(FEATURE)
def install() -> None:
    """Add a callback to each Trainer made from now on, of the packages imported so far, unless it has one."""
    if callbacks():
        for package in loaded():
            trainer = package.Trainer
            if trainer not in _patches:
                patch = Patch(trainer, "__init__", _with_callback)
                patch.apply()
                _patches[trainer] = patch  # last: an interrupted call of install() is repeated


def _with_callback(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        with guard.contained(FEATURE):
            if not any(isinstance(callback, InstrumentCallback) for callback in trainer.callbacks):
                trainer.callbacks[:0] = callbacks()

    return init
