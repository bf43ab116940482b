"""Finds the parents of nested ranges, also of those in asyncio tasks, and the innermost range open at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ...base.trace_marks import TASKS
from .lanes import LaneAxis
from .table import Array, Table, linked
from .trace import Thread


class NestedRanges:
    """The ranges of one or many threads; ranges of different threads are unrelated.

    The parent of a range is the most recently started range that contains it. Ranges of interleaved asyncio tasks
    overlap without containing each other, and are siblings.

    Args:
        start_ns: the starts in ascending order; of equal starts, the longest range first.
        end_ns: the ends.
        threads: the number of each range's thread, at least -1; None for a single thread.
        parents: the index of each range's parent, where it is known; finding it takes most of the time.

    Attributes:
        parents: the index of each range's parent, or -1.
    """

    def __init__(
        self, start_ns: Array, end_ns: Array, threads: Array | None = None, parents: Array | None = None
    ) -> None:
        threads = np.zeros(len(start_ns), np.int64) if threads is None else threads
        self._max_thread = int(threads.max(initial=-1))
        self._lanes = LaneAxis(self._max_thread, start_ns, end_ns)
        self._rows = np.argsort(threads, kind="stable").astype(np.int32)
        self._threads = threads[self._rows]
        self._start = self._lanes.positions(self._threads, start_ns[self._rows])
        self._end = self._lanes.positions(self._threads, end_ns[self._rows])
        place = np.empty(len(start_ns), np.int32)
        place[self._rows] = np.arange(len(place))
        if parents is None:
            self._above = _parents(self._start, self._end, self._threads)
            self.parents = self._original_rows(self._above)[place]
        else:
            self._above, self.parents = linked(place, parents[self._rows]), parents

    def innermost_at(self, times_ns: Array, threads: Array | None = None) -> Array:
        """Return the index of the last started range that is open at each time, or -1; ends are exclusive."""
        threads = np.zeros(len(times_ns), np.int64) if threads is None else threads
        places = self._lanes.positions(np.minimum(threads, self._max_thread + 1), times_ns)
        rows = np.searchsorted(self._start, places, "right") - 1
        closed = np.flatnonzero(rows >= 0)
        elsewhere = self._threads[rows[closed]] != threads[closed]
        rows[closed[elsewhere]] = -1
        closed = closed[~elsewhere]
        while len(closed):
            closed = closed[self._end[rows[closed]] <= places[closed]]
            rows[closed] = self._above[rows[closed]]
            closed = closed[rows[closed] >= 0]
        return self._original_rows(rows)

    def _original_rows(self, rows: Array) -> Array:
        """Return the original indexes of rows in the order of threads."""
        return np.where(rows >= 0, self._rows[rows], np.int64(-1)) if len(self._rows) else rows


def _parents(start: Array, end: Array, threads: Array) -> Array:
    """Find parents by depth, which sorting gives; only threads with partly overlapping ranges need a loop."""
    count = len(start)
    rows = np.arange(count)
    # The depth of a row is the number of ranges before it, minus those that have ended; empty ranges that start at
    # the same time and come later have ended but were never open.
    depth: Array = rows - np.searchsorted(np.sort(end), start, "right")
    if (start == end).any():
        empty = np.concatenate(([0], np.cumsum(start == end)))
        depth += empty[np.searchsorted(start, start, "right")] - empty[rows]
    del rows
    if depth.max(initial=0) < np.iinfo(np.int16).max:
        depth = depth.astype(np.int16)  # sorted by radix, in a fraction of the time and of the memory
    order = np.argsort(depth, kind="stable")
    keys = depth[order].astype(np.int64) * count + order
    above = np.searchsorted(keys, keys - count) - 1
    del keys
    parents = np.empty(count, np.int64)
    parents[order] = order[np.maximum(above, 0)]
    parents[depth <= 0] = -1
    odd = np.flatnonzero((parents >= 0) & ((end[parents] < end) | (depth[parents] != depth - 1)))
    if len(odd):
        some = np.flatnonzero(np.isin(threads, threads[odd]))
        above_some = _parents_one_by_one(start[some].tolist(), end[some].tolist())
        parents[some] = np.where(above_some >= 0, some[above_some], -1)
    return parents


def _parents_one_by_one(start: list[int], end: list[int]) -> Array:
    parents = np.full(len(start), -1)
    open_: list[int] = []  # possible parents of later ranges, innermost last
    for row, begin in enumerate(start):
        while open_ and (end[open_[-1]] <= begin or end[open_[-1]] < end[row]):
            open_.pop()
        if open_:
            parents[row] = open_[-1]
        open_.append(row)
    return parents


def ancestor_levels(rows: Array, parents: Array) -> Iterator[tuple[Array, Array]]:
    """Yield, level by level, the indexes of ``rows`` that have an ancestor at that level, and the ancestors.

    The first level is the rows themselves.
    """
    which = np.flatnonzero(rows >= 0)
    above = rows[which]
    while len(which):
        yield which, above
        above = parents[above]
        which, above = which[above >= 0], above[above >= 0]


def rows_around(row: int, parents: Array) -> list[int]:
    """Return a row and the rows around it, innermost first; none for row -1."""
    around = []
    while row >= 0:
        around.append(row)
        row = int(parents[row])
    return around


def outermost_rows(rows: Array, parents: Array) -> Array:
    """Return the outermost row around each of these rows, or the row itself; -1 stays."""
    result: Array = rows.copy()
    for which, above in ancestor_levels(rows, parents):
        result[which] = above
    return result


def rows_with_inner(chosen: Array, parents: Array) -> Array:
    """Return a mask of the rows that have one of the chosen ones inside them."""
    mask = np.zeros(len(parents), bool)
    for _, above in ancestor_levels(parents[chosen], parents):
        mask[above] = True
    return mask


def inside_rows(chosen: Array, parents: Array) -> Array:
    """Return a mask of the rows that are among the chosen ones, or inside one of them."""
    mask = np.zeros(len(parents), bool)
    mask[chosen] = True
    result: Array = mask.copy()
    for which, above in ancestor_levels(np.arange(len(parents)), parents):
        result[which] |= mask[above]
    return result


class _Tasks(msgspec.Struct):
    """As `RecordingNotes` has them."""

    thread: int
    switches: list[tuple[str, int, int, int]]


def parents_in_tasks(
    regions: Table, metadata: Mapping[str, Any], threads: Sequence[Thread], texts: Sequence[str]
) -> Array:
    """Return the parent of each region: that in its own task or, of its outermost regions, in the task's creator.

    Args:
        regions: the regions, in order of start, with their parents by time, which those outside of tasks keep.
        metadata: that of the trace, which says where tasks changed.
        threads: the threads of the trace.
        texts: its strings.
    """
    try:
        tasks = msgspec.convert(metadata[TASKS], _Tasks)
    except (KeyError, msgspec.ValidationError):
        return regions.parent
    above = {task: creator for _, _, task, creator in tasks.switches}
    task = _tasks_of(regions, tasks, threads, texts)
    keys = np.unique(np.stack((regions.thread, task)), axis=1, return_inverse=True)
    lanes = {(int(thread), int(number)): lane for lane, (thread, number) in enumerate(keys[0].T)}
    nest = NestedRanges(regions.start_ns, regions.end_ns, keys[1].reshape(-1))
    parents = np.where(task > 0, nest.parents, regions.parent)
    rows = np.flatnonzero((task > 0) & (parents < 0))
    number = task[rows]
    while len(rows):
        number = np.array([above.get(each, 0) for each in number.tolist()], np.int64)
        lane = [lanes.get(key, -1) for key in zip(regions.thread[rows].tolist(), number.tolist(), strict=True)]
        around = np.where(np.array(lane) >= 0, nest.innermost_at(regions.start_ns[rows], np.array(lane)), -1)
        while (
            short := (around >= 0) & ((regions.end_ns[around] < regions.end_ns[rows]) | (around >= rows))
        ).any():
            around[short] = nest.parents[around[short]]
        parents[rows] = around
        more = (around < 0) & (number > 0)
        rows, number = rows[more], number[more]
    return parents


def _tasks_of(regions: Table, tasks: _Tasks, threads: Sequence[Thread], texts: Sequence[str]) -> Array:
    """Return the number of the task that opened each region; 0 for none."""
    of_region = np.zeros(len(regions), np.int64)
    numbers = [number for number, thread in enumerate(threads) if str(thread.thread) == str(tasks.thread)]
    rows = np.flatnonzero(np.isin(regions.thread, numbers))
    by_name: dict[str, list[int]] = {}
    for place, code in enumerate(regions.name[rows].tolist()):
        by_name.setdefault(texts[code], []).append(place)
    starts = {
        by_name[name][before]: task
        for name, before, task, _ in tasks.switches
        if before < len(by_name.get(name, ()))
    }
    places = np.array(sorted(starts), np.int64)
    last = np.searchsorted(places, np.arange(len(rows)), "right") - 1
    task = np.array([starts[place] for place in places.tolist()] or [0], np.int64)
    of_region[rows] = np.where(last >= 0, task[last], 0)
    return of_region
