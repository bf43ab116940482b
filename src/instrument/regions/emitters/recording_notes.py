"""`RecordingNotes`: what a trace of torch.profiler does not say of regions: their tasks, and which it lacks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from threading import get_ident
from typing import Any

from ...compat import profilers

_MAX = 100_000  # notes of each kind, so that a long recording takes a few MB at most
_NUMBERS = count(1)
_NO_TASK: tuple[Callable[[], Any], int, int] = (lambda: None, 0, 0)

# The task, its number, and that of the task that created it: a task starts with a copy of its creator's context.
_task: ContextVar[tuple[Callable[[], Any], int, int]] = ContextVar("instrument_task", default=_NO_TASK)


class RecordingNotes:
    """Follows the regions of one recording, which the current thread starts.

    Attributes:
        switches: where another asyncio task than before opened a region: the region's name, how many of this name
            were opened before, the number of the task (0 for none), and that of the task that created it.
        thread: the operating system's number of the thread of `switches`; other threads have none.
        unrecorded: how many regions were opened on threads that torch does not record, by name.
    """

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.switches: list[tuple[str, int, int, int]] = []
        self.unrecorded: dict[str, int] = {}
        self._thread = get_ident()
        self._opened: dict[str, int] = {}
        self._last = 0
        # kept, as asking the module at each region costs 0.1 us more
        self._running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None) or _running_loop

    def follow(self, name: str) -> None:
        """Note that a region opens."""
        if get_ident() != self._thread:
            if not profilers.running() and (name in self.unrecorded or len(self.unrecorded) < _MAX):
                self.unrecorded[name] = self.unrecorded.get(name, 0) + 1
            return
        before = self._opened.get(name, 0)
        self._opened[name] = before + 1
        if self._running_loop() is None and not self._last:
            return
        number, above = _running_task()
        if number != self._last and len(self.switches) < _MAX:
            self._last = number
            self.switches.append((name, before, number, above))


def _running_loop() -> Any:
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # missing while it is being imported
    return running and running()


def _running_task() -> tuple[int, int]:
    """Return the number of the asyncio task that runs, 0 for none, and that of the task that created it."""
    loop = _running_loop()
    task = loop and sys.modules["asyncio"].current_task(loop)
    if not task:
        return 0, 0
    known, number, above = _task.get()
    if known() is not task:
        number, above = next(_NUMBERS), number
        _task.set((weakref.ref(task), number, above))
    return number, above
