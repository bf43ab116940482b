"""`Timeline`: the memory in use after each event, by category."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..traces.table import Array, Table
from .categories import CATEGORIES
from .segment_events import reserved_changes


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
        return replace(
            self,
            event=self.event[rows],
            number=self.number[rows],
            time_ns=self.time_ns[rows],
            bytes=self.bytes[:, rows],
            reserved_bytes=self.reserved_bytes[rows],
        )


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
