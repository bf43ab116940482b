"""Calls that wait for the end of the compiled function that runs on this thread.

torch draws a range around compiled code, in C++: a recording that stops inside of it and another that starts there
crash torch. Besides, torch compiles what Python calls between two of its graphs, also code of this library.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import compat
from ..guard import guard
from ..patch import Patch, apply, undo

FEATURE = "following compiled functions"


class _ThreadState(threading.local):
    """On this thread: what is called at the end of the outermost compiled function."""

    due: tuple[Callable[[], None], ...] = ()


class CompiledCalls:
    """Defers calls to the end of compiled functions, from `follow` to `remove`."""

    def __init__(self) -> None:
        self._here = _ThreadState()
        self._patches: list[Patch] = []
        self._removed = False
        self._compiled = False  # whether there was any graph so far: until then nothing looks at frames

    def follow(self) -> None:
        """Begin; nothing is replaced before the first call that waits."""

    def remove(self) -> None:
        """End; what still waits is dropped."""
        self._removed = True
        undo(self._patches)

    def after(self, call: Callable[[], None]) -> None:
        """Call ``call()`` now or, inside a compiled function, once the outermost one has ended."""
        self._compiled = self._compiled or compat.graphs_compiled()
        end = compat.compiled_call_end() if self._compiled else None
        if end is None or not compat.in_compiled_call(sys._getframe(1)):  # 3 us for 20 frames
            call()
            return
        self._here.due += (call,)
        if not self._patches and not self._removed:
            apply([Patch(*end, self._around)], self._patches)

    def _around(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def set_eval_frame(callback: Any) -> Any:
            try:
                if self._here.due and not compat.in_compiled_call(sys._getframe(1).f_back):
                    self._ended()
            except BaseException:
                original(callback)
                raise
            return original(callback)

        return set_eval_frame

    @guard.contained(FEATURE)
    def _ended(self) -> None:
        due, self._here.due = self._here.due, ()
        for call in due:
            if not self._removed:
                call()
