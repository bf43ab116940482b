"""What the allocator had from the driver, and what of it was in use or free: after any event, and at the end.

`Timeline` has the memory in use after each event, and `Peak` the most at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from ..tables.table import Array, Table

_TAKEN, _RETURNED = re.compile("^segment_(?:alloc|map)$"), re.compile("^segment_(?:free|unmap)$")


def reserved_changes(events: Table) -> Array:
    """Return by how many bytes each event changes what the allocator has from the driver."""
    taken, returned = events.matching("action", _TAKEN), events.matching("action", _RETURNED)
    changes: Array = np.where(taken, events.bytes, np.where(returned, -events.bytes, 0))
    return changes


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


def largest_hole(segment: Array, address: Array, size: Array, used: Array) -> int:
    """Return the size of the largest run of unused blocks that touch, within one segment."""
    order = np.lexsort((address, segment))
    segment, address, size, used = (column[order] for column in (segment, address, size, used))
    touches = (segment[1:] == segment[:-1]) & (address[1:] == (address + size)[:-1]) & ~used[:-1]
    run = np.cumsum(np.append(False, ~touches))[: len(used)][~used]
    return int(np.bincount(run, size[~used]).max(initial=0))


_ALLOCATED, _FREED = re.compile("^alloc$"), re.compile("^free_completed$")


def frees_repeat_stacks(events: Table) -> bool:
    """Return whether each free has the stack of its allocation, as torch writes with ``context="alloc"``."""
    rows, allocated = _of_addresses(events)
    freed = np.flatnonzero(allocated[:-1] & ~allocated[1:])
    first, second = rows[freed], rows[freed + 1]
    pairs = (events.address[first] == events.address[second]) & (events.device[first] == events.device[second])
    allocation, free = events.stack[first[pairs]], events.stack[second[pairs]]
    several = len(np.unique(free)) > 1  # a loop may allocate and free on one line
    return bool(several and (allocation == free).all())


def pair_allocations(events: Table, segments: Table, blocks: Table, repeated: bool) -> Table:
    """Return the allocations that the tables of a `MemorySnapshot` show, as its ``allocations``.

    An address that is allocated again without a free between was freed by an event that is not recorded: the first
    allocation ends there. With ``repeated``, a free has the stack of its allocation.
    """
    rows, allocated = _of_addresses(events)
    key = np.stack((events.device[rows], events.address[rows]))
    same = np.append((key[:, 1:] == key[:, :-1]).all(axis=0), False)  # as the next one
    following = np.append(rows[1:], 0)
    begun = np.flatnonzero(allocated)
    end = np.where(same[begun], following[begun], len(events))
    older = np.flatnonzero(~allocated & ~np.append(False, same[:-1]))  # the first event of its address is a free
    recorded = _columns(events, rows[begun], rows[begun], end)
    freed = _columns(events, rows[older], np.full(len(older), -1), rows[older])
    if not repeated:
        freed["stack"] = np.zeros_like(freed["stack"])  # those of the events say where it was freed
    parts = (freed, _never_seen(segments, blocks, key, len(events)), recorded)
    return Table({name: np.concatenate([part[name] for part in parts]) for name in recorded}, events.strings)


def _of_addresses(events: Table) -> tuple[Array, Array]:
    """Return the rows of the allocations and frees by device, address and time, and which are allocations."""
    allocated = events.matching("action", _ALLOCATED)
    rows = np.flatnonzero(allocated | events.matching("action", _FREED))
    rows = rows[np.lexsort((rows, events.address[rows], events.device[rows]))]
    return rows, allocated[rows]


def _columns(events: Table, rows: Array, begin: Array, end: Array) -> dict[str, Array]:
    columns = {name: events[name][rows] for name in ("device", "address", "bytes", "stack")}
    return columns | {"requested_bytes": columns["bytes"], "begin": begin, "end": end}


def _never_seen(segments: Table, blocks: Table, seen: Array, count: int) -> dict[str, Array]:
    """Return the blocks in use that ``seen`` lacks, by device and address; there are ``count`` events."""
    device = segments.device[blocks.segment]
    seen_places = set(zip(*seen.tolist(), strict=True))
    places = zip(device.tolist(), blocks.address.tolist(), strict=True)
    rows = np.flatnonzero(
        blocks.matching("state", ACTIVE) & np.array([place not in seen_places for place in places], bool)
    )
    columns = {name: blocks[name][rows] for name in ("address", "bytes", "requested_bytes", "stack")}
    ages = {"begin": np.full(len(rows), -1), "end": np.full(len(rows), count)}
    return {"device": device[rows], **columns, **ages}


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


@dataclass(frozen=True)
class Timeline:
    """The memory of a GPU over the recorded events, one point after each event.

    Attributes:
        device: the GPU.
        event: the row in ``events`` of each point; -1 for the first point, which is before all events.
        number: the number of the event among those of the GPU, from 1; 0 for the first point.
        time_ns: when that was, in ns since the epoch; -1 if it is not known.
        bytes: the memory in use: a row for each of `CATEGORIES`, in order, and a column for each point.
        reserved_bytes: what the allocator had from the driver.
    """

    device: int
    event: Array
    number: Array
    time_ns: Array
    bytes: Array
    reserved_bytes: Array

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.event)

    @property
    def used_bytes(self) -> Array:
        """The memory in use of all categories."""
        used: Array = self.bytes.sum(axis=0)
        return used

    def thinned(self, most: int) -> Timeline:
        """Return at most ``most`` points, from 4: the highest and the lowest one of each stretch, and the ends."""
        if len(self) <= most:
            return self
        used, stretches = self.used_bytes, (most - 2) // 2
        ends = np.array([0, len(self) - 1])
        return self._at(np.unique(np.concatenate((ends, _highest(used, stretches), _highest(-used, stretches)))))

    def highest(self, stretches: int) -> Timeline:
        """Return the highest point of each of so many stretches of equal length; all points if they are fewer."""
        return self._at(_highest(self.used_bytes, stretches))

    def _at(self, rows: Array) -> Timeline:
        columns = {
            each.name: getattr(self, each.name)[..., rows] for each in fields(self) if each.name != "device"
        }
        return replace(self, **columns)


def _highest(values: Array, stretches: int) -> Array:
    """Return the place of the highest value in each of so many stretches of equal length."""
    bounds = np.unique(np.linspace(0, len(values), stretches, endpoint=False, dtype=np.int64))
    ends = np.append(bounds[1:], len(values))
    return np.array([begin + values[begin:end].argmax() for begin, end in zip(bounds, ends, strict=True)])


def in_use(allocations: Table, group: Array, groups: int, events: Array) -> Array:
    """Return the bytes of allocations of one GPU before and after each of its events, in a row for each group.

    Args:
        allocations: the allocations.
        group: the group of each, from 0.
        groups: the number of groups.
        events: the rows of the events.
    """
    size, begin, end = (allocations[name] for name in ("bytes", "begin", "end"))
    change = np.zeros((groups, len(events) + 2), np.int64)  # the last column is after all events
    np.add.at(change, (group, np.where(begin < 0, 0, np.searchsorted(events, begin) + 1)), size)
    np.subtract.at(change, (group, np.searchsorted(events, end) + 1), size)
    np.cumsum(change, axis=1, out=change)
    used: Array = change[:, :-1]
    return used
