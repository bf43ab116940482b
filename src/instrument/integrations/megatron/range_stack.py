"""`RangeStack`: the ranges that Megatron opens by one call and closes by another, always closed in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from ...regions import dispatch
from ...regions.region import Region

FrameId = tuple[int, CodeType]
"""Identifies a running call of a function."""


class RangeStack(threading.local):
    """The open ranges of this thread, outermost first, each with its name, owning call if any, and token."""

    def __init__(self) -> None:
        self._open: list[tuple[str, FrameId | None, dispatch.Token]] = []

    def __len__(self) -> int:
        return len(self._open)

    def push(self, region: Region, frame: FrameType, *, owned: bool) -> None:
        """Open ``region`` for a call in ``frame``.

        An ``owned`` region ends with that call at the latest. It is closed when the next region opens, since
        Python has no event for the end of a call.
        """
        self.close_finished(frame)
        owner = (id(frame), frame.f_code) if owned else None
        for depth, (name, other, _) in enumerate(self._open):
            if owned and (name, other) == (
                region.name,
                owner,
            ):  # a later call, at the same address
                self.close(depth)
                break
        self._open.append((region.name, owner, dispatch.enter(region)))

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
        """Open ``region`` around the body; ranges pushed inside end inside."""
        self.close_finished(frame)
        depth, token = len(self._open), dispatch.enter(region)
        try:
            yield
        finally:
            self.close(depth)
            dispatch.leave(token)
