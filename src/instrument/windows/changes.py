"""One change of a profile at a time: a signal handler that stops it in the middle of one is obeyed at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any


class Changes:
    """Makes the changes of one profile: it starts or ends, or a window opens or closes.

    CPython calls signal handlers in the middle of whatever the main thread does. A change that one asks for within
    another is made once that one has ended, be it by an error: a recording that is stopped while torch stops it
    crashes the process.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[Callable[[], None]]] = {}  # by thread: what is asked for within a change

    def make(self, change: Callable[[], None]) -> None:
        """Make ``change`` now or, within another one on this thread, after it."""
        waiting = self._waiting.setdefault(get_ident(), [])
        if self._making():
            waiting.append(change)
        elif waiting:  # an interrupt kept the last change from making these
            waiting.append(change)
            self._make(waiting.pop(0), waiting)
        else:
            self._make(change, waiting)

    def outside(self, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call(*args)`` within a change; what it asks for is made at once."""
        thread = get_ident()
        waiting = self._waiting.pop(thread, [])
        try:
            call(*args)
        finally:
            self._waiting[thread] = waiting

    def _making(self) -> bool:
        """Tell whether this thread makes a change, by its frames: an interrupt might leave a flag set."""
        frame = sys._getframe(1).f_back
        while frame is not None and frame.f_code is not Changes.outside.__code__:
            if frame.f_code is Changes._make.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _make(self, change: Callable[[], None], waiting: list[Callable[[], None]]) -> None:
        try:
            change()
        finally:
            if waiting:
                self._make(waiting.pop(0), waiting)
