"""Which range lies in which, and which one was open at a time: for many at once."""

from __future__ import annotations

import numpy as np

from .table import Array


class Nest:
    """The ranges of one thread.

    The parent of a range is the last started of those that hold it whole. Ranges of interleaved asyncio
    tasks overlap without one holding the other: they are siblings.

    Args:
        start_ns: in ascending order; where equal, the longest first.
        end_ns: as many.

    Attributes:
        parents: the number of each range's parent, or -1.
    """

    def __init__(self, start_ns: Array, end_ns: Array) -> None:
        self._start, self._end = start_ns, end_ns
        self.parents = _parents(start_ns, end_ns)

    def at(self, times_ns: Array) -> Array:
        """Return for each time the last started range open then, or -1; its end is no longer inside."""
        rows = np.searchsorted(self._start, times_ns, "right") - 1
        closed = np.flatnonzero(rows >= 0)
        while len(closed):
            closed = closed[self._end[rows[closed]] <= times_ns[closed]]
            rows[closed] = self.parents[rows[closed]]
            closed = closed[rows[closed] >= 0]
        return rows


def _parents(start: Array, end: Array) -> Array:
    """By depth, which sorting tells; only ranges that overlap without nesting need one look each."""
    count = len(start)
    rows = np.arange(count)
    # Open at the start of a row: those before it, less those that have ended. Of the ended, empty ranges that
    # start at the same time and come after it were never open.
    depth = rows - np.searchsorted(np.sort(end), start, "right")
    if (start == end).any():
        empty = np.concatenate(([0], np.cumsum(start == end)))
        depth += empty[np.searchsorted(start, start, "right")] - empty[rows]
    keys = depth * count + rows
    order = np.argsort(keys)
    above = np.empty(count, np.int64)
    above[order] = np.searchsorted(keys[order], keys[order] - count) - 1  # what is in order is found faster
    parents = np.where(depth > 0, order[np.maximum(above, 0)], -1)
    has = parents >= 0
    if np.all(end[parents[has]] >= end[has]) and np.all(depth[parents[has]] == depth[has] - 1):
        return parents
    return _parents_one_by_one(start.tolist(), end.tolist())


def _parents_one_by_one(start: list[int], end: list[int]) -> Array:
    parents = np.full(len(start), -1)
    open_: list[int] = []  # those that may hold one that comes later; each ends before the one below it
    for row, begin in enumerate(start):
        while open_ and (end[open_[-1]] <= begin or end[open_[-1]] < end[row]):
            open_.pop()
        if open_:
            parents[row] = open_[-1]
        open_.append(row)
    return parents
