"""One change of a profile at a time: a signal handler that stops it in the middle of one is obeyed at its end."""

from __future__ import annotations

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
        self._waiting: dict[int, list[Callable[[], None]]] = {}  # by thread, while it makes a change

    def make(self, change: Callable[[], None]) -> None:
        """Make ``change`` now or, within another one on this thread, after it."""
        thread = get_ident()
        waiting = self._waiting.get(thread)
        if waiting is not None:
            waiting.append(change)
            return
        self._waiting[thread] = waiting = []
        try:
            change()
        finally:
            self._waiting.pop(thread, None)
            if waiting:
                self._make_all(waiting)

    def _make_all(self, changes: list[Callable[[], None]]) -> None:
        try:
            self.make(changes[0])
        finally:
            if changes[1:]:
                self._make_all(changes[1:])

    def outside(self, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call(*args)`` within a change; what it asks for is made at once."""
        thread = get_ident()
        waiting = self._waiting.pop(thread, None)
        try:
            call(*args)
        finally:
            if waiting is not None:
                self._waiting[thread] = waiting
