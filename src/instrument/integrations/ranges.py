"""`RangeStack`: the ranges that a framework pushes on one thread, and pops in code of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from ..record.regions import dispatch
from ..record.regions.region import Region

FrameId = tuple[int, CodeType]
"""Identifies a running call of a function."""


class RangeStack(threading.local):
    """The open ranges of this thread, outermost first, each with its name, owning call if any, and token."""

    def __init__(self) -> None:
        self._open: list[tuple[str, FrameId | None, dispatch.Token]] = []

    def __len__(self) -> int:
        return len(self._open)

    def push(self, region: Region | None, owner: FrameType | None = None) -> None:
        """Open ``region``; None is a range that no profiler records.

        A region with an ``owner`` ends with that call at the latest. It is closed when the next region opens,
        since Python has no event for the end of a call.
        """
        if region is None:
            self._open.append(("", None, dispatch.NO_TOKEN))
            return
        call = None if owner is None else (id(owner), owner.f_code)
        for depth, (name, other, _) in enumerate(self._open):
            if call is not None and (name, other) == (region.name, call):  # a later call, at the same address
                self.close(depth)
                break
        self._open.append((region.name, call, dispatch.enter(region)))

    def pop(self, name: str) -> None:
        """Close the innermost range ``name`` and those inside it; do nothing if no such range is open."""
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth][0] == name:
                self.close(depth)
                return

    def close(self, depth: int) -> None:
        """Close all but the outermost ``depth`` ranges."""
        while len(self._open) > depth:
            dispatch.leave(self._open.pop()[2])

    def close_finished(self, frame: FrameType | None) -> None:
        """Close ranges whose owning calls are not among the callers of ``frame``; takes 100 ns a frame."""
        if not self._open:
            return
        running: set[FrameId | None] = {None}
        while frame is not None:
            running.add((id(frame), frame.f_code))  # the address alone is soon reused
            frame = frame.f_back
        for depth, (_, owner, _) in enumerate(self._open):
            if owner not in running:
                self.close(depth)
                return

    @contextmanager
    def around(self, region: Region, frame: FrameType) -> Iterator[None]:
        """Open ``region`` around the body, in a call of ``frame``; ranges pushed inside end inside."""
        self.close_finished(frame)
        depth, token = len(self._open), dispatch.enter(region)
        try:
            yield
        finally:
            self.close(depth)
            dispatch.leave(token)
