"""`ForgottenStep`: notices a loop that trains without calling ``step()``."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .. import log
from ..guard import guard
from ..regions import dispatch

FEATURE = "noticing a forgotten step()"
_MANY_UPDATES = 100


class ForgottenStep:
    """Logs one line if the first optimizer makes 100 updates from `follow` to `remove`, which comes with a step.

    Only the first one counts: one update of a loop may be that of many optimizers.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._first: weakref.ref[Any] | None = None
        self._updates = 0

    @guard.contained(FEATURE)
    def follow(self) -> None:
        """Begin to count updates, if the program has imported torch."""
        if self._handle is None and "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._first, self._updates = None, 0
            self._handle = register_optimizer_step_post_hook(self._after_update)

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Stop counting."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        try:
            if self._updates < _MANY_UPDATES and not dispatch.tracing():
                if self._first is None or self._first() is None:
                    self._first = weakref.ref(optimizer)
                self._updates += self._first() is optimizer
                if self._updates == _MANY_UPDATES:
                    log.warning(
                        f"step() was not called in {_MANY_UPDATES} updates of the optimizer, so no window opens"
                        " or ends: call prof.step() after each update"
                    )
        except Exception as error:
            guard.failed(FEATURE, error)
