"""What the allocator had from the driver, and what of it was free: after any event, and at the end."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..tables.table import Array, Table

_TAKEN, _RETURNED = re.compile("^segment_(?:alloc|map)$"), re.compile("^segment_(?:free|unmap)$")


def reserved_changes(events: Table) -> Array:
    """Return by how many bytes each event changes what the allocator has from the driver."""
    taken, returned = events.matching("action", _TAKEN), events.matching("action", _RETURNED)
    changes: Array = np.where(taken, events.bytes, np.where(returned, -events.bytes, 0))
    return changes


def reserved_after(event: int, events: Table, segments: Table, device: int) -> int:
    """Return what the allocator of ``device`` had from the driver after an event, by the events since then."""
    later = (events.device == device) & (np.arange(len(events)) > event)
    return int(segments.bytes[segments.device == device].sum() - reserved_changes(events.where(later)).sum())


_EXPANDABLE = re.compile("map$")
_GRAIN = 512  # bytes: the allocator rounds sizes up to a multiple, and events have the size that was asked for
_SMALL_SEGMENT = 2 << 20  # bytes: a larger one is split only
_UNSPLIT = 1 << 20  # ... where more than so many bytes are left, unless it is expandable


class FreePieces(NamedTuple):
    """What of the memory that the allocator had from the driver was free.

    Attributes:
        reserved_bytes: what it had from the driver.
        free_bytes: what of this was not in use, and not at the end of a block that was.
        largest_bytes: the largest part of it without a break, within one segment; by up to 1 MiB too large.
    """

    reserved_bytes: int
    free_bytes: int
    largest_bytes: int


def free_pieces(
    allocations: Table, events: Table, segments: Table, device: int, event: int, stream: int | None = None
) -> FreePieces:
    """Return what was free after an event.

    The segments of that time follow from those of the snapshot and the events of segments since then.

    Args:
        allocations: those of a `MemorySnapshot`.
        events: its events.
        segments: its segments.
        device: the GPU.
        event: the row of the event.
        stream: only segments of this stream count; None for all.
    """
    own = segments.where(_of(segments, device, stream))
    later = events.where(_of(events, device, stream) & (np.arange(len(events)) > event))
    change = np.sign(reserved_changes(later))
    later, change = later.where(change != 0), change[change != 0]
    alive = allocations.where(
        (allocations.device == device) & (allocations.begin <= event) & (allocations.end > event)
    )
    used = -(-alive.bytes // _GRAIN) * _GRAIN
    places = np.unique(
        np.concatenate([part for each in (own, later) for part in (each.address, each.address + each.bytes)]
                       + [alive.address, alive.address + used])
    )  # fmt: skip
    length = np.diff(places, append=places[-1:])
    reserved = _covered(places, own.address, own.bytes, 1) + _covered(places, later.address, later.bytes, -change)
    free = (reserved > 0) & (_covered(places, alive.address, used, 1) == 0)
    gone = (change < 0) & ~later.matching("action", _EXPANDABLE)
    begins = np.concatenate((own.address, later.address[gone]))  # pieces of two segments do not join
    run = np.cumsum(~free | np.isin(places, begins))[free]
    whole = np.bincount(run, length[free]).astype(np.int64)
    splits = _covered(places, own.address, own.bytes, _splits(own.bytes, own.expandable > 0)) + _covered(
        places, later.address, later.bytes, _splits(later.bytes, later.matching("action", _EXPANDABLE))
    )
    piece = (whole[run] > _UNSPLIT) | (splits[free] > 0)
    return FreePieces(
        int(length[reserved > 0].sum()), int(length[free][piece].sum()), int(whole[run[piece]].max(initial=0))
    )


def _splits(size: Array, expandable: Array) -> Array:
    """Return 1 for segments whose free pieces can have any size, and 0 for others."""
    return (expandable | (size <= _SMALL_SEGMENT)).astype(np.int64)


def _of(table: Table, device: int, stream: int | None) -> Array:
    own: Array = table.device == device
    return own if stream is None else own & (table.stream == stream)


def _covered(places: Array, start: Array, size: Array, by: Array | int) -> Array:
    """Return how many of the parts cover what begins at each place, each counted ``by`` times."""
    change = np.zeros(len(places), np.int64)
    np.add.at(change, np.searchsorted(places, start), by)
    np.subtract.at(change, np.searchsorted(places, start + size), by)
    return np.cumsum(change)


ACTIVE = re.compile("^active")
"""The states of blocks in use."""


class AllocatorState(NamedTuple):
    """What the allocator of a GPU held when the snapshot was taken.

    Attributes:
        reserved_bytes: what it had from the driver.
        used_bytes: what of this was in use.
        largest_hole_bytes: the largest part that was not in use, without a break.
    """

    reserved_bytes: int
    used_bytes: int
    largest_hole_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What was reserved, and not in use."""
        return self.reserved_bytes - self.used_bytes


def state_of(segments: Table, blocks: Table, device: int) -> AllocatorState:
    """Return what the allocator of ``device`` held, from the tables of a `MemorySnapshot`."""
    own = blocks.where(segments.device[blocks.segment] == device)
    used = own.matching("state", ACTIVE)
    return AllocatorState(
        int(segments.bytes[segments.device == device].sum()),
        int(own.bytes[used].sum()),
        _largest_hole(own.segment, own.address, own.bytes, used),
    )


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
