"""Every Trainer of the process gets a callback where the environment asks for it, with no line changed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ...config import RUN, settings
from ...guard import guard
from ...patch import Patch
from .callback import FEATURE, InstrumentCallback
from .packages import loaded

_patches: dict[type, Patch] = {}  # of each kind of Trainer, one


class AutomaticCallback(InstrumentCallback):
    """Drives the loop that the environment asks for, and does nothing beside one that somebody wrote."""

    def __init__(self) -> None:
        from ..environment import loop_from_environment

        loop = loop_from_environment()
        if loop is None:
            raise ValueError(f"{RUN} asks for no loop")
        self._follow(loop)


@guard.prepared(FEATURE, otherwise=list)
def callbacks() -> list[Any]:
    """Return what each new Trainer asks the entry point for: nothing, as long as the environment does not ask."""
    if settings.enabled and os.environ.get(RUN):
        from ..environment import loop_from_environment

        if loop_from_environment() is not None:
            return [AutomaticCallback()]
    return []


@guard.contained(FEATURE)
def install() -> None:
    """Give a callback to each Trainer made from now on, of the packages imported by now, unless it has one."""
    if callbacks():
        for package in loaded():
            trainer = package.Trainer
            if trainer not in _patches:
                patch = Patch(trainer, "__init__", _with_callback)
                patch.apply()
                _patches[trainer] = patch  # not before: after an interrupt it is tried again


def _with_callback(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        with guard.contained(FEATURE):
            if not any(isinstance(callback, InstrumentCallback) for callback in trainer.callbacks):
                trainer.callbacks[:0] = callbacks()

    return init
