"""`RecordingNotes`: what a trace of torch.profiler does not say of regions: their tasks, and which it lacks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from threading import get_ident
from typing import Any

from ...compat import profilers

_MAX = 100_000  # switches, and names of unrecorded regions: a few MB; a name of `_opened` takes 8 bytes
_NUMBERS = count(1)
_NO_TASK: tuple[Callable[[], Any], int, int] = (lambda: None, 0, 0)

# The task, its number, and that of the task that created it: a task starts with a copy of its creator's context.
_task: ContextVar[tuple[Callable[[], Any], int, int]] = ContextVar("instrument_task", default=_NO_TASK)


class RecordingNotes:
    """Follows the regions of one recording, which the current thread starts.

    Attributes:
        follow: to be called with the name of each region that opens.
        thread: the operating system's number of the thread of `switches`; other threads have none.
        unrecorded: how many regions were opened on threads that torch does not record, by name.
    """

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.unrecorded: dict[str, int] = {}
        self._opened: list[str] = []  # the names of the regions of this thread
        self._switches: list[tuple[int, int, int]] = []
        self._last = 0
        self.follow = self._follower()

    def _follower(self) -> Callable[[str], None]:
        """Return `follow`: a closure, as a recorded region would take 0.1 us longer with a method."""
        thread, append, switches = get_ident(), self._opened.append, self._switches
        running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None) or _running_loop

        def follow(name: str) -> None:
            if get_ident() != thread:
                self._miss(name)
                return
            append(name)
            if running_loop() is not None or switches:
                self._note_task()

        return follow

    def _miss(self, name: str) -> None:
        if not profilers.running() and (name in self.unrecorded or len(self.unrecorded) < _MAX):
            self.unrecorded[name] = self.unrecorded.get(name, 0) + 1

    def _note_task(self) -> None:
        number, above = _running_task()
        if number != self._last and len(self._switches) < _MAX:
            self._last = number
            self._switches.append((len(self._opened) - 1, number, above))

    @property
    def switches(self) -> list[tuple[str, int, int, int]]:
        """Where another asyncio task than before opened a region, in order of time.

        Each with the region's name, how many of this name were opened before, the number of the task (0 for
        none), and that of the task that created it.
        """
        found = []
        before: Counter[str] = Counter()
        counted = 0
        for place, number, above in self._switches:
            before.update(self._opened[counted:place])
            counted = place
            name = self._opened[place]
            found.append((name, before[name], number, above))
        return found


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
