"""Defers calls to the end of compiled code, and runs functions without torch.compile.

torch opens a range around compiled code, in C++: if a recording stops inside it and another one starts there,
torch crashes. So the end of a step is reported once the compiled function has ended.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ...base.compat import compiler
from ...base.guard import guard
from ...base.patch import Patch, apply, undo

F = TypeVar("F", bound=Callable[..., Any])
FEATURE = "following compiled functions"


def without_compiler(function: F) -> F:
    """Return ``function`` with torch.compile off during its calls; it must not become a part of a graph."""
    set_eval_frame = compiler.frame_evaluation()
    if set_eval_frame is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return cast(F, call)


class _ThreadState(threading.local):
    """The calls due on the thread at the end of the outermost compiled function."""

    due: tuple[Callable[[], None], ...] = ()


class DeferredCalls:
    """Defers calls to the end of the compiled function that runs on the thread, from `follow` to `remove`."""

    def __init__(self) -> None:
        self._thread = _ThreadState()
        self._patches: list[Patch] = []
        self._removed = False
        self._compiled = False  # whether any graph exists: before that no frames are inspected

    def follow(self) -> None:
        """Start; nothing is patched before the first deferred call."""

    def remove(self) -> None:
        """Stop, and drop the calls that are due."""
        self._removed = True
        undo(self._patches)

    def call_after_compiled_code(self, call: Callable[[], None]) -> None:
        """Call ``call()`` now, or inside a compiled function, once the outermost one has ended."""
        self._compiled = self._compiled or compiler.graphs_compiled()
        end = compiler.compiled_call_end() if self._compiled else None
        if end is None or not compiler.in_compiled_call(sys._getframe(1)):  # 3 us for 20 frames
            call()
            return
        self._thread.due += (call,)
        if not self._patches and not self._removed:
            apply([Patch(*end, self._make_set_eval_frame)], self._patches)

    def _make_set_eval_frame(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        call_due = without_compiler(self._call_due)  # torch 2.6 still compiles the functions that are called here

        def set_eval_frame(callback: Any) -> Any:
            try:
                if self._thread.due and not compiler.in_compiled_call(sys._getframe(1).f_back):
                    call_due()
            except BaseException:
                original(callback)
                raise
            return original(callback)

        return set_eval_frame

    @guard.contained(FEATURE)
    def _call_due(self) -> None:
        due, self._thread.due = self._thread.due, ()
        for call in due:
            if not self._removed:
                call()
