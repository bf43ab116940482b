"""The calls that are open on each thread."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

from ..regions import dispatch
from .layer import Layer


class Stack(list[Any]):
    """The calls (`Call`) that are open on one thread, outermost first.

    Attributes:
        then: called once when the outermost one is closed by its hook; dropped where an interrupt prevents that.
    """

    __slots__ = ("__weakref__", "then", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.then: Callable[[], None] | None = None

    def shed(self) -> Any:
        """Close the calls that are over, on their own thread, and return the innermost one that is not.

        Hooks do not hear of a KeyboardInterrupt.
        """
        running = _frames(sys._getframe()) if self else set()
        while self and self[-1].frame not in running:
            self.close()
            if not self:
                self.then = None
        return self[-1] if self else None

    def close(self) -> None:
        """Close the innermost call."""
        call = self.pop()
        call.frame = None  # it refers to the arguments
        dispatch.leave(call.token)


class _Here(threading.local):
    def __init__(self) -> None:
        self.stack = Stack()
        _stacks.append(weakref.ref(self.stack, _stacks.remove))


_stacks: list[weakref.ref[Stack]] = []
here = _Here()


def when_closed(call: Callable[[], None]) -> None:
    """Call ``call()`` once no call is open on this thread: now, or when the outermost one is closed."""
    if here.stack.shed() is None:
        here.stack.then = None  # an interrupt came just before its call
        call()
    else:
        here.stack.then = call


def busy() -> set[Layer]:
    """Return the owners of the calls that run, on whichever thread."""
    here.stack.shed()
    frames = sys._current_frames()
    found = set()
    for ref in _stacks.copy():  # other threads begin and end
        stack = ref()
        if stack:
            running = _frames(frames.get(stack.thread))
            found |= {call.layer.owner for call in list(stack) if call.frame in running}
    return found


def _frames(frame: FrameType | None) -> set[FrameType]:
    """Return ``frame`` and those below it."""
    found = set()
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return found
