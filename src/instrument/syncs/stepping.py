"""Where a step ends: where the program says so, else where its first optimizer has stepped."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from .. import compat
from ..modules.parts import OPTIMIZER, Switch, contexts
from ..patch import Patch
from ..regions import live


class OptimizerSteps:
    """Calls ``stepped()`` after each step of the first optimizer that steps, until `remove`.

    A step that a `torch.amp.GradScaler` skips counts. One that an optimizer makes in the backward pass, as where
    each parameter has its own, ends with that pass. Of an optimizer that wraps another the inner one counts.

    A step that torch.compile made is not seen, as a hook would be a part of it; ``compiled`` tells of one.

    The call comes after torch closed the range that it draws around the step: a recording that stops inside of it
    and another that starts there crash torch.
    """

    def __init__(self, stepped: Callable[[], None]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._stepped = stepped
        self._first: weakref.ref[Any] | None = None
        self._count = 0
        self._autograd = compat.autograd_functions()
        self._handle = register_optimizer_step_post_hook(self._after)
        self._ranges = 0  # of optimizers' steps, that are open
        self._due = False
        self._patches = [
            Patch(torch.amp.GradScaler, "step", self._scaled),
            *contexts(torch.autograd.profiler.record_function, self._range, Switch()),
        ]

    @property
    def compiled(self) -> bool:
        """Whether some optimizer's step was compiled in this process."""
        return bool(_compiled)

    def remove(self) -> None:
        """End."""
        self._handle.remove()
        while self._patches:
            self._patches.pop().undo()
        self._stepped = _nothing

    def _range(self, context: Any) -> live.Token | None:
        if not context.name.startswith(OPTIMIZER[0]):
            return None
        self._ranges += 1
        return self._out_of_range, None

    def _out_of_range(self, _: None) -> None:
        self._ranges -= 1
        if self._due and not self._ranges:
            self._due = False
            self._stepped()

    def _tell(self) -> None:
        if self._ranges:
            self._due = True
        else:
            self._stepped()

    def _after(self, optimizer: Any, *_: Any) -> None:
        if live.tracing():
            _note_compiled()
            return
        if not self._is_first(optimizer):
            return
        self._count += 1
        if self._autograd is not None:
            current_pass, at_the_end = self._autograd[1:]
            if current_pass() != -1:
                at_the_end(self._tell)
                return
        self._tell()

    def _is_first(self, optimizer: Any) -> bool:
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        return self._first() is optimizer

    def _scaled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._count
            result = original(scaler, optimizer, *args, **kwargs)
            if self._count == before and self._is_first(optimizer):
                self._count += 1
                self._tell()
            return result

        return step


def _nothing() -> None:
    pass


_compiled: list[bool] = []


def _note_compiled() -> None:
    """Note that torch.compile traces an optimizer's step; like `live.hide` it leaves no trace in the graph."""
    _compiled[:] = [True]


_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
