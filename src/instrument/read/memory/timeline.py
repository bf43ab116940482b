"""What was allocated when, and the memory in use: `Timeline`, after each event, and `Peak`, the most at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

import numpy as np

from ..tables.table import Array, Table
from .categories import CATEGORIES
from .reserved import ACTIVE, reserved_changes

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
    known = set(zip(*seen.tolist(), strict=True))
    places = zip(device.tolist(), blocks.address.tolist(), strict=True)
    rows = np.flatnonzero(
        blocks.matching("state", ACTIVE) & np.array([place not in known for place in places], bool)
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


def peak_of(allocations: Table, events: Table, device: int) -> Peak:
    """Return the first time at which ``device`` used the most memory, from the tables of a `MemorySnapshot`."""
    rows = np.flatnonzero(allocations.device == device)
    own, of_device = allocations.where(rows), np.flatnonzero(events.device == device)
    used = in_use(own, np.zeros(len(rows), np.int64), 1, of_device)[0]
    event = int(np.append(-1, of_device)[used.argmax()])
    alive = np.flatnonzero((own.begin <= event) & (event < own.end))
    alive = alive[np.argsort(-own.bytes[alive], kind="stable")]
    before = int(own.bytes[alive][own.begin[alive] < 0].sum())
    return Peak(device, int(used.max()), event, before, rows[alive])


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


def timeline_of(allocations: Table, uses: Table, events: Table, segments: Table, device: int) -> Timeline:
    """Return the timeline of ``device``, from the tables of a `MemorySnapshot`."""
    own = np.flatnonzero(events.device == device)
    rows = allocations.device == device
    used = in_use(allocations.where(rows), uses.category[rows], len(CATEGORIES), own)
    reserved = np.append(0, np.cumsum(reserved_changes(events.where(own))))
    reserved += int(segments.bytes[segments.device == device].sum()) - reserved[-1]
    return Timeline(
        device,
        np.append(-1, own),
        np.arange(len(own) + 1),
        np.append(-1, events.time_ns[own]),
        used,
        reserved,
    )


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
