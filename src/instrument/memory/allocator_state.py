"""`AllocatorState`: what the allocator held when a snapshot was taken, and which allocations failed before."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table

_ACTIVE = "active"  # how the states of blocks in use begin
_FAILED = re.compile("^oom$")
_TAKEN, _RETURNED = re.compile("^segment_(?:alloc|map)$"), re.compile("^segment_(?:free|unmap)$")


class FailedAllocation(NamedTuple):
    """An allocation that failed.

    Attributes:
        bytes: what was asked for.
        device_free_bytes: what the driver had left; -1 if unknown.
        event: its row in ``events``.
    """

    bytes: int
    device_free_bytes: int
    event: int


class AllocatorState(NamedTuple):
    """What the allocator of a GPU held when the snapshot was taken.

    Attributes:
        reserved_bytes: what it had from the driver.
        used_bytes: what of this was in use.
        largest_hole_bytes: the largest part that was not in use, without a break.
        failures: the recorded allocations that failed, in order.
        returned: how often it gave memory back to the driver: each time it had none left, or the program called
            `torch.cuda.empty_cache`.
    """

    reserved_bytes: int
    used_bytes: int
    largest_hole_bytes: int
    failures: tuple[FailedAllocation, ...]
    returned: int

    @property
    def unused_bytes(self) -> int:
        """What was reserved, and not in use."""
        return self.reserved_bytes - self.used_bytes


def state_of(events: Table, segments: Table, blocks: Table, device: int) -> AllocatorState:
    """Return what the allocator of ``device`` held, from the tables of a `MemorySnapshot`."""
    own = blocks.where(segments.device[blocks.segment] == device)
    used = np.array([name.startswith(_ACTIVE) for name in own.strings])[own.state]
    of_device = events.device == device
    failed = np.flatnonzero(of_device & events.matching("action", _FAILED))
    return AllocatorState(
        int(segments.bytes[segments.device == device].sum()),
        int(own.bytes[used].sum()),
        _largest_hole(own.segment, own.address, own.bytes, used),
        tuple(
            FailedAllocation(size, free, event)
            for size, free, event in zip(
                events.bytes[failed].tolist(),
                events.device_free_bytes[failed].tolist(),
                failed.tolist(),
                strict=True,
            )
        ),
        int((of_device & events.matching("action", _RETURNED)).sum()),
    )


def reserved_changes(events: Table) -> Array:
    """Return by how many bytes each event changes what the allocator has from the driver."""
    taken, returned = events.matching("action", _TAKEN), events.matching("action", _RETURNED)
    changes: Array = np.where(taken, events.bytes, np.where(returned, -events.bytes, 0))
    return changes


def reserved_after(event: int, events: Table, segments: Table, device: int) -> int:
    """Return what the allocator of ``device`` had from the driver after an event, by the events since then."""
    later = (events.device == device) & (np.arange(len(events)) > event)
    return int(segments.bytes[segments.device == device].sum() - reserved_changes(events.where(later)).sum())


def _largest_hole(segment: Array, address: Array, size: Array, used: Array) -> int:
    """Return the size of the largest run of unused blocks that touch, within one segment."""
    order = np.lexsort((address, segment))
    segment, address, size, used = (column[order] for column in (segment, address, size, used))
    largest = run = 0
    end = (-1, -1)
    for each in zip(segment.tolist(), address.tolist(), size.tolist(), used.tolist(), strict=True):
        at, start, length, in_use = each
        run = 0 if in_use else length + (run if (at, start) == end else 0)
        largest = max(largest, run)
        end = at, start + length
    return largest
