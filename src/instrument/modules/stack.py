"""The calls that are open on each thread."""

from __future__ import annotations

import threading
import weakref
from threading import get_ident
from types import FrameType

from ..regions import live
from .call import Call


class Stack(list[Call]):
    """The calls that are open on one thread, outermost first."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)  # stacks are told apart by identity

    def __eq__(self, other: object) -> bool:
        return self is other

    def shed(self, frame: FrameType | None) -> None:
        """Close the calls that are over: hooks do not hear of a KeyboardInterrupt.

        Args:
            frame: the one that runs on this stack's thread.
        """
        running = set()
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
        while self and self[-1].frame not in running:
            self.close()

    def close(self) -> None:
        """Close the innermost call."""
        call = self.pop()
        call.frame = None  # it refers to the arguments
        live.leave(call.token)


class _Here(threading.local):
    def __init__(self) -> None:
        self.stack = Stack()
        stacks.add(self.stack)


stacks: weakref.WeakSet[Stack] = weakref.WeakSet()
here = _Here()
