"""`OrderedCalls`: makes calls in order, each of which may have to wait for something, without blocking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


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
