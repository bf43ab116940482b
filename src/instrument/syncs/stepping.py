"""Where a step ends: where the program says so, else where its first optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..regions import live


class OptimizerSteps:
    """Calls ``stepped()`` after each step of the first optimizer that steps, until `remove`."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._stepped = stepped
        self._first: weakref.ref[Any] | None = None
        self._handle = register_optimizer_step_post_hook(self._after)

    def remove(self) -> None:
        """End."""
        self._handle.remove()

    def _after(self, optimizer: Any, *_: Any) -> None:
        if live.tracing():
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._stepped()
