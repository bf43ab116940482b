"""torch.profiler ranges where the order in which they end matters: on a GPU's lane, and as NVTX or ITT ranges.

There each thread has a stack of ids. Opening a range pushes its id; closing a range pops the top id of the closing
thread, whichever range pushed it. A kernel shows under the id on top of the stack of the thread that launches it.

torch (2.13 and before) has no range that pushes no id. Popping in order would mean closing and reopening each
range that outlives the one around it: for many tasks that is quadratic, and each task counts many times.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from ...compat import profilers
from ...trace_marks import OVERLAPPING
from ..region import Region
from .torch_profiler import TorchProfilerEmitter

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
        _, leave = profilers.range_functions()
        for ref in _stacks.copy():
            stack = ref()
            while stack:  # has at least as many ids as there are ranges in `popped`
                ended = stack.popped.popitem()[1] if stack.popped else stack.pop()
                record, ended[0] = ended[0], None
                if record is not None:
                    leave(record)


def torch_emitter(profiler: Any) -> TorchProfilerEmitter:
    """Return the emitter that opens torch's ranges in the recording of ``profiler``."""
    return NestedTorchProfilerEmitter() if profilers.needs_nested_ranges(profiler) else TorchProfilerEmitter()
