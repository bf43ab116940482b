"""Torch.profiler ranges where the order counts in which they end: on a GPU's lane, and as NVTX or ITT ranges.

There each thread has a stack of ids: opening a range pushes one, and closing it pops whatever is on top, on the
thread that closes it. A kernel shows under what is on top on the thread that launches it, which would be a range
that is over.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ...compat import range_functions
from ..region import Region
from .torch_profiler import TorchProfilerEmitter

Opened = list[Any]  # what torch returned, the region (None once it is over) and the stack that the range is on


class Stack(list[Opened]):
    """The ranges that are open on one thread, innermost last.

    Attributes:
        late: whether one of them is over and not closed yet.
    """

    __slots__ = ("__weakref__", "late")

    def __init__(self) -> None:
        self.late = False


class _Here(threading.local):
    def __init__(self) -> None:
        self.stack = Stack()
        _stacks.append(weakref.ref(self.stack, _stacks.remove))


_stacks: list[weakref.ref[Stack]] = []
_here = _Here()


class NestedTorchProfilerEmitter(TorchProfilerEmitter):
    """Closes the ranges of a thread innermost first, and on that thread.

    A range that is around others when it is over has these closed before it, and opened anew after it. One that is
    over on another thread is closed when its own thread opens or closes the next range.
    """

    def push(self, region: Region) -> Opened:
        """Open a range."""
        stack = _here.stack
        if stack.late:
            self._settle(stack)
        shown = region.arguments
        record = self._enter(region.plain, *shown) if shown else self._enter(region.plain)
        opened = [record, region, stack]
        stack.append(opened)
        return opened

    def pop(self, handle: Opened) -> None:
        """Close the range, unless its recording stopped in the meantime."""
        stack = _here.stack
        try:
            innermost = stack.pop()
        except IndexError:
            innermost = None
        if innermost is handle:
            self._exit(handle[0])
        else:
            if innermost is not None:
                stack.append(innermost)
            handle[1], handle[2].late = None, True
        if stack.late:
            self._settle(stack)

    start = push
    end = pop

    def _settle(self, stack: Stack) -> None:
        """Close the ranges on this thread's ``stack`` that are over."""
        stack.late = False
        at = next((at for at, opened in enumerate(stack) if opened[1] is None), len(stack))
        inside = stack[at:]
        del stack[at:]
        for opened in reversed(inside):
            self._exit(opened[0])
        for opened in inside:
            region = opened[1]
            if region is not None:
                opened[0] = self.push(region)[0]
                stack[-1] = opened  # which its owner knows

    @classmethod
    def end_all(cls) -> None:
        """End every open range: a recording stopped, and no profiler records now."""
        super().end_all()
        _, leave = range_functions()
        for ref in _stacks.copy():
            stack = ref()
            while stack:
                leave(stack.pop()[0])
