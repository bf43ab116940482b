"""Queues of calls that come from signal handlers or other threads and are made in order, without waiting."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
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


class OrderedCalls:
    """Makes a call at once, or once the calls before it are made and it is ready.

    Never waits for another thread: of two that come at the same time, one makes the calls of both.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        # Held during a call; nobody waits for it. Reentrant, as an interrupt may prevent the release.
        self._lock = threading.RLock()
        self._is_calling = False

    def add(self, call: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        """Make ``call`` now, or in a later `make` on any thread."""
        self._calls.append((is_ready, call))
        self.make()

    def make(self) -> None:
        """Make the calls that are ready, up to the first one that is not."""
        while self._next_is_ready() and self._lock.acquire(blocking=False):
            try:
                if self._is_calling:  # a signal handler interrupted a call, and the loop around that one goes on
                    return
                self._make_next()
            finally:
                self._lock.release()

    def _make_next(self) -> None:
        try:
            self._is_calling = True
            if self._next_is_ready():
                _, call = self._calls.popleft()
                call()
        finally:
            self._is_calling = False

    def _next_is_ready(self) -> bool:
        try:
            is_ready, _ = self._calls[0]
        except IndexError:  # another thread made it
            return False
        return is_ready()
