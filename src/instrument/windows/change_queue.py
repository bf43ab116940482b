"""`ChangeQueue`: makes one change of a profile at a time; changes by signal handlers wait for the current one."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from threading import get_ident
from typing import Any


class ChangeQueue:
    """Makes the changes of one profile: start or end it, open or close a window.

    CPython calls signal handlers at any point of the main thread. A change requested within another one is made
    when that one has ended, even by an error: a second stop while torch stops a recording crashes the process.
    """

    def __init__(self) -> None:
        self._queued: dict[int, list[Callable[[], None]]] = {}  # by thread: the changes requested within one

    def make(self, change: Callable[[], None]) -> None:
        """Make ``change`` now or, within another change on this thread, after that one."""
        queued = self._queued.setdefault(get_ident(), [])
        if self._is_running():
            queued.append(change)
        elif queued:  # left after an interrupt
            queued.append(change)
            self._make(queued.pop(0), queued)
        else:
            self._make(change, queued)

    def call_outside(self, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call(*args)`` within a change; changes that it requests are made at once."""
        thread = get_ident()
        queued = self._queued.pop(thread, [])
        try:
            call(*args)
        finally:
            self._queued[thread] = queued

    @classmethod
    def is_used_elsewhere(cls) -> bool:
        """Return whether another thread makes a change of a profile."""
        return any(
            thread != get_ident() and frame.f_code is cls._make.__code__
            for thread, top in sys._current_frames().items()
            for frame, _ in traceback.walk_stack(top)
        )

    def _is_running(self) -> bool:
        """Return whether this thread makes a change, by its frames, as an interrupt could leave a flag set."""
        frame = sys._getframe(1).f_back
        while frame is not None and frame.f_code is not ChangeQueue.call_outside.__code__:
            if frame.f_code is ChangeQueue._make.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _make(self, change: Callable[[], None], queued: list[Callable[[], None]]) -> None:
        try:
            change()
        finally:
            if queued:
                self._make(queued.pop(0), queued)
