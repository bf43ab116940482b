"""The most memory that was in use at a time, and what it was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..traces.table import Array, Table


@dataclass(frozen=True)
class Peak:
    """The time of a device at which the most memory was in use.

    Attributes:
        device: the GPU.
        bytes: the memory in use.
        event: the row of the event after which it was in use; -1 if that was before the first event.
        before_bytes: how much of it is older than the recorded events.
        rows: the rows of the `MemorySnapshot.allocations` in use, the largest first.
    """

    device: int
    bytes: int
    event: int
    before_bytes: int
    rows: Array


def peak_of(allocations: Table, device: int, events: int) -> Peak:
    """Return the first time at which ``device`` used the most memory.

    Args:
        allocations: those of a `MemorySnapshot`.
        device: the GPU.
        events: the number of events of the snapshot.
    """
    own = np.flatnonzero(allocations.device == device)
    begin, end, size = (allocations[name][own] for name in ("begin", "end", "bytes"))
    change = np.zeros(events + 2, np.int64)  # from before the first event to after the last one
    np.add.at(change, begin + 1, size)
    np.add.at(change, end + 1, -size)
    used = np.cumsum(change[:-1])
    event = int(np.argmax(used)) - 1
    alive = np.flatnonzero((begin <= event) & (event < end))
    alive = alive[np.argsort(-size[alive], kind="stable")]
    before = int(size[alive][begin[alive] < 0].sum())
    return Peak(device, int(used[event + 1]), event, before, own[alive])
