"""`out_of_memory`: calls listeners when an allocation on a GPU fails, before torch raises the error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from ..compat import memory_history
from ..guard import guard

FEATURE = "the snapshot of an out-of-memory error"


class FailedAllocation(NamedTuple):
    """An allocation that failed: the GPU, and the bytes asked for, allowed to the process, and free on the GPU."""

    device: int
    requested_bytes: int
    allowed_bytes: int
    free_bytes: int


class OutOfMemory:
    """Passes failed allocations on to listeners.

    torch cannot remove its observer, so there is one in a process, which does nothing without listeners.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[FailedAllocation], None]] = []
        self._attached = 0  # the process in which the observer is attached

    def follow(self, listener: Callable[[FailedAllocation], None]) -> None:
        """Call ``listener`` from now on, on the thread that allocates; CUDA must be initialized."""
        if self._attached != os.getpid() and memory_history.attach_out_of_memory_observer(self._observe):
            self._attached = os.getpid()
        self._listeners.append(listener)

    def unfollow(self, listener: Callable[[FailedAllocation], None]) -> None:
        """Stop that; a second call does nothing."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _observe(self, device: int, requested: int, allowed: int, free: int) -> None:
        for listener in tuple(self._listeners):
            with guard.contained(FEATURE):
                listener(FailedAllocation(device, requested, allowed, free))


out_of_memory = OutOfMemory()
