"""`MegatronAdapter`: what `attach` returns, which takes itself out again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

from ... import compat
from ...config import settings
from ...guard import guard
from ...patch import Change, apply, undo
from . import core, nvtx, training
from .driver import Driver
from .references import FEATURE

PATCHES: dict[str, Callable[[Driver, ModuleType], Iterator[Change]]] = {
    "megatron.core.utils": nvtx.patches,
    "megatron.core.pipeline_parallel.schedules": core.schedules,
    "megatron.core.optimizer": core.optimizers,
    "megatron.core.distributed": core.distributed,
    "megatron.training.training": training.patches,
}


class MegatronAdapter(Driver):
    """What is replaced of Megatron, until `remove`."""

    _current: ClassVar[MegatronAdapter | None] = None  # one at a time: a function is replaced once

    def apply(self) -> MegatronAdapter:
        """Replace what there is of Megatron now, and the rest as it is imported."""
        if not settings.enabled:
            return self
        if MegatronAdapter._current is not None:
            MegatronAdapter._current.remove()
        MegatronAdapter._current = self
        if not self.loop.automatic:  # there, who waits for optimizers is there already
            self.wait_for_optimizers()
        for name, patches in PATCHES.items():
            compat.when_imported(name, functools.partial(self._patch, patches))
        return self

    @property
    def windows(self) -> list[dict[str, Any]]:
        """What came of each window so far, as in ``manifest.jsonl``."""
        return self.loop.windows

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """End, and put back everything of Megatron's; once more does nothing."""
        if not self.switch.on:
            return
        self.switch.on = False
        if MegatronAdapter._current is self:
            MegatronAdapter._current = None
        self.end()
        self.forget_optimizers()
        with guard.contained("detaching from Megatron"):
            undo(self.changes)

    def __enter__(self) -> MegatronAdapter:
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.remove()

    @guard.contained(FEATURE)
    def _patch(self, patches: Callable[[Driver, ModuleType], Iterator[Change]], module: ModuleType) -> None:
        if not self.switch.on:
            return
        with guard.contained(f"attaching to {module.__name__}"):
            apply(patches(self, module), self.changes)
