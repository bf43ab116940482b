"""`FailedAllocation`: an allocation that ran out of memory, and why."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..traces.table import Table
from ..units import size
from .breakdown import Place
from .free_pieces import free_pieces

_FAILED = re.compile("^oom$")
_ROUNDED = 20 << 20  # bytes: by so much a segment can be larger than what is asked for

REASONS = {
    "full": "too little memory is free, even if it were one piece",
    "fragmented": "enough is free, but not in one piece",
    "other pool": "a free piece is large enough, but belongs to another stream or another pool of the allocator",
    "limited": "the driver had enough left, so that a limit of the process applies",
    "unknown": "what the driver had left is not recorded",
}
"""Why an allocation failed."""


class FailedAllocation(NamedTuple):
    """An allocation that failed, and what the allocator had then.

    Attributes:
        bytes: what was asked for.
        event: its row in ``events``.
        place: the line that asked; None if it is not known.
        reason: one of `REASONS`.
        used_bytes: what was in use.
        reserved_bytes: what the allocator had from the driver; it had given back the segments that were free.
        largest_hole_bytes: the largest free piece of this, of the stream that asked.
        device_free_bytes: what the driver had left; -1 if unknown.
    """

    bytes: int
    event: int
    place: Place | None
    reason: str
    used_bytes: int
    reserved_bytes: int
    largest_hole_bytes: int
    device_free_bytes: int

    @property
    def text(self) -> str:
        """What failed and why, as a sentence without its full stop."""
        return f"Out of memory: an allocation of {size(self.bytes)} failed; {REASONS[self.reason]}"

    @property
    def limit_bytes(self) -> int | None:
        """The memory that the GPU had for this process: what was reserved and, without a limit, what was left."""
        if self.reason == "limited":
            return self.reserved_bytes
        return None if self.device_free_bytes < 0 else self.reserved_bytes + self.device_free_bytes


def failed_events(events: Table, device: int) -> list[int]:
    """Return the rows of the allocations of ``device`` that failed, in order."""
    rows: list[int] = np.flatnonzero((events.device == device) & events.matching("action", _FAILED)).tolist()
    return rows


def failure_of(
    event: int, place: Place | None, allocations: Table, events: Table, segments: Table
) -> FailedAllocation:
    """Return the failed allocation of an event, from the tables of a `MemorySnapshot`."""
    device, asked = int(events.device[event]), int(events.bytes[event])
    stream, left = int(events.stream[event]), int(events.device_free_bytes[event])
    of_all = free_pieces(allocations, events, segments, device, event)
    own = of_all if stream < 0 else free_pieces(allocations, events, segments, device, event, stream)
    if left >= asked + _ROUNDED:
        reason = "limited"
    elif left >= 0 and of_all.free_bytes + left < asked:
        reason = "full"
    elif of_all.largest_bytes >= asked:
        reason = "other pool"
    elif of_all.free_bytes + max(left, 0) >= asked:
        reason = "fragmented"
    else:
        reason = "unknown"
    used = of_all.reserved_bytes - of_all.free_bytes
    return FailedAllocation(asked, event, place, reason, used, of_all.reserved_bytes, own.largest_bytes, left)
