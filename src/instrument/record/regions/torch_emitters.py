"""Regions as ranges of torch.profiler: in any order, innermost first, and notes of what its trace does not say.

There each thread has a stack of ids. Opening a range pushes its id; closing a range pops the top id of the closing
thread, whichever range pushed it. A kernel shows under the id on top of the stack of the thread that launches it.

torch (2.13 and before) has no range that pushes no id. Popping in order would mean closing and reopening each
range that outlives the one around it: for many tasks that is quadratic, and each task counts many times.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from threading import get_ident
from typing import Any, ClassVar

from ...base.compat import profilers
from ...base.compat.profilers import range_functions
from ...base.trace_marks import OVERLAPPING
from .region import Region

_MAX_NOTES = 100_000  # switches, and names of unrecorded regions: a few MB; a name of `_opened` takes 8 bytes
_TASK_NUMBERS = count(1)
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
        if not profilers.running() and (name in self.unrecorded or len(self.unrecorded) < _MAX_NOTES):
            self.unrecorded[name] = self.unrecorded.get(name, 0) + 1

    def _note_task(self) -> None:
        number, above = _running_task()
        if number != self._last and len(self._switches) < _MAX_NOTES:
            self._last = number
            self._switches.append((len(self._opened) - 1, number, above))

    @property
    def switches(self) -> list[tuple[str, int, int, int]]:
        """Where another asyncio task than before opened a region, in order of time.

        Each with the region's name, how many of this name were opened before, the number of the task (0 for
        none), and that of the task that created it.
        """
        switches = []
        before: Counter[str] = Counter()
        counted = 0
        for place, number, above in self._switches:
            before.update(self._opened[counted:place])
            counted = place
            name = self._opened[place]
            switches.append((name, before[name], number, above))
        return switches


def _running_loop() -> Any:
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # missing while it is being imported
    return running and running()


def _running_task() -> tuple[int, int]:
    """Return the number of the asyncio task that runs, 0 for none, and that of the task that created it."""
    loop = _running_loop()
    task = loop and sys.modules["asyncio"].current_task(loop)
    if not task:
        return 0, 0
    noted, number, above = _task.get()
    if noted() is not task:
        number, above = next(_TASK_NUMBERS), number
        _task.set((weakref.ref(task), number, above))
    return number, above


_KEYS = count()


class TorchProfilerEmitter:
    """Opens torch.profiler ranges during one recording.

    torch (2.13 and before) crashes if a range is open when one recording stops, and ends or is freed during the
    next: torch writes into the first recording's memory. Open ranges are therefore ended as soon as a recording
    stops. They show in its trace, up to its end.
    """

    name = "torch"
    _open: ClassVar[dict[int, Any]] = {}  # shared by the process, as torch records one profile at a time
    _last_exit: ClassVar[Callable[[Any], None]]  # of the latest recording: closes what it left open

    def __init__(self) -> None:
        self._enter, self._exit = range_functions()
        TorchProfilerEmitter._last_exit = staticmethod(self._exit)
        self.notes = RecordingNotes()
        self._follow = self.notes.follow

    def push(self, region: Region) -> Any:
        """Open a range."""
        self._follow(region.plain)
        key = next(_KEYS)
        shown = region.arguments
        self._open[key] = self._enter(region.plain, *shown) if shown else self._enter(region.plain)
        return key

    def pop(self, handle: Any) -> None:
        """Close the range, unless its recording stopped in the meantime."""
        record = self._open.pop(handle, None)
        if record is not None:
            self._exit(record)

    start = push
    end = pop

    def close(self, handle: Any) -> None:
        """Close the range when another is opened at once or the recording stops."""
        self.pop(handle)

    def mark(self, region: Region) -> None:
        """Show an instant as a range of zero length: the trace format of torch.profiler has no instants."""
        self._exit(self._enter(region.plain))

    @classmethod
    def end_all(cls) -> None:
        """End every open range: a recording stopped, and no profiler records now."""
        while cls._open:
            cls._last_exit(cls._open.popitem()[1])


# The value that torch returned (None once the range is over), and the stack of the thread that opened it. A filler
# has None as its stack: it covers the id of a range that is over, and ends when its own id is popped.
Opened = list[Any]


class Stack(list[Opened]):
    """The ids on one thread, represented by the ranges that pushed them; the last one is on top.

    Attributes:
        needs_cleanup: whether ``ended`` or ``popped`` has items.
        ended: ranges that are over and not closed yet.
        popped: open ranges whose ids other ranges popped; for each, the id of a range that is over remains.
    """

    __slots__ = ("__weakref__", "ended", "needs_cleanup", "popped")

    def __init__(self) -> None:
        self.needs_cleanup = False
        self.ended: deque[Opened] = deque()
        self.popped: dict[int, Opened] = {}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack = Stack()
        _stacks.append(weakref.ref(self.stack, _stacks.remove))


_stacks: list[weakref.ref[Stack]] = []
_thread_state = _ThreadState()


class NestedTorchProfilerEmitter(TorchProfilerEmitter):
    """Opens one range for each region, and keeps kernels from showing under a range that is over.

    A range that ends before a range inside it leaves its id behind. Once that id is on top, a filler called
    `OVERLAPPING` covers it, at most one for each such range. A range that another thread ends is closed when its
    own thread opens or closes the next one.
    """

    def push(self, region: Region) -> Opened:
        """Open a range."""
        stack = _thread_state.stack
        if stack.needs_cleanup:
            self._close_ended(stack)
        self.notes.follow(region.plain)
        shown = region.arguments
        record = self._enter(region.plain, *shown) if shown else self._enter(region.plain)
        opened = [record, stack]
        stack.append(opened)
        return opened

    def pop(self, handle: Opened) -> None:
        """Close the range, unless its recording stopped in the meantime."""
        stack = _thread_state.stack
        try:
            innermost = stack.pop()
        except IndexError:
            innermost = None
        if innermost is handle:
            self._exit(handle[0])
        else:
            if innermost is not None:
                stack.append(innermost)
            self._note_ended(handle)
        if stack.needs_cleanup:
            self._close_ended(stack)
            self._cover(stack)

    start = push
    end = pop

    def close(self, handle: Opened) -> None:
        """Close the range without a filler: another is opened at once, or the recording stops."""
        self._note_ended(handle)
        if handle[1] is _thread_state.stack:
            self._close_ended(handle[1])

    def _note_ended(self, handle: Opened) -> None:
        handle[1].ended.append(handle)
        handle[1].needs_cleanup = True

    def _close_ended(self, stack: Stack) -> None:
        """Close the ranges on this thread's ``stack`` that are over."""
        stack.needs_cleanup = False
        while stack.ended:
            self._close(stack, stack.ended.popleft())
        if stack.popped:
            stack.needs_cleanup = True

    def _close(self, stack: Stack, handle: Opened) -> None:
        """Close one range, which pops the id on top."""
        record, handle[0] = handle[0], None
        if record is None or not stack:  # its recording stopped
            return
        top = stack.pop()
        stack.popped.pop(id(handle), None)
        if top[0] is not None and top[1] is not None:
            stack.popped[id(top)] = top
        self._exit(record)
        if top[1] is None:  # a filler: closing it pops the id that it covered
            stack.pop()
            self._exit(top[0])

    def _cover(self, stack: Stack) -> None:
        """Open a filler if the id on top belongs to a range that is over."""
        if stack and stack[-1][0] is None:
            stack.append([self._enter(OVERLAPPING), None])

    @classmethod
    def end_all(cls) -> None:
        """End every open range: a recording stopped, and no profiler records now."""
        super().end_all()
        for ref in _stacks.copy():
            stack = ref()
            while stack:  # has at least as many ids as there are ranges in `popped`
                ended = stack.popped.popitem()[1] if stack.popped else stack.pop()
                record, ended[0] = ended[0], None
                if record is not None:
                    cls._last_exit(record)


def torch_emitter(profiler: Any) -> TorchProfilerEmitter:
    """Return the emitter that opens torch's ranges in the recording of ``profiler``."""
    return NestedTorchProfilerEmitter() if profilers.needs_nested_ranges(profiler) else TorchProfilerEmitter()
