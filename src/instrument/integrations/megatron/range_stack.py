"""Ranges that Megatron opens and closes by two calls, closed whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from ...regions import dispatch
from ...regions.region import Region

Call = tuple[int, CodeType]


class RangeStack(threading.local):
    """What is open on this thread, outermost first: name, the function call it belongs to if any, token."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Call | None, dispatch.Token]] = []

    def __len__(self) -> int:
        return len(self._open)

    def push(self, region: Region, frame: FrameType, *, owned: bool) -> None:
        """Open ``region``, called for in ``frame``.

        One that is ``owned`` ends with that call of a function at the latest. It is closed when another opens
        after that, since Python tells nobody that a call is over.
        """
        self.settle(frame)
        owner = (id(frame), frame.f_code) if owned else None
        for depth, (name, other, _) in enumerate(self._open):
            if owned and (name, other) == (region.name, owner):  # a later call of the same, at the same address
                self.close(depth)
                break
        self._open.append((region.name, owner, dispatch.enter(region)))

    def pop(self, name: str) -> None:
        """Close the last range ``name`` and what was left open inside; nothing where there is none."""
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth][0] == name:
                self.close(depth)
                return

    def close(self, depth: int) -> None:
        """Close all but the outermost ``depth`` ranges."""
        while len(self._open) > depth:
            dispatch.leave(self._open.pop()[2])

    def settle(self, frame: FrameType | None) -> None:
        """Close what belongs to function calls that are over, as seen from ``frame``: 100 ns a frame."""
        if not self._open:
            return
        running: set[Call | None] = {None}
        while frame is not None:
            running.add((id(frame), frame.f_code))  # the address alone is soon another call's
            frame = frame.f_back
        for depth, (_, owner, _) in enumerate(self._open):
            if owner not in running:
                self.close(depth)
                return

    @contextmanager
    def around(self, region: Region, frame: FrameType) -> Iterator[None]:
        """Open ``region`` around the body; what is pushed inside ends inside."""
        self.settle(frame)
        depth, token = len(self._open), dispatch.enter(region)
        try:
            yield
        finally:
            self.close(depth)
            dispatch.leave(token)
