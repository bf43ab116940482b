"""Totals of events by group, where an event may belong to many groups: a kernel to each region around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..traces.table import Array


@dataclass(frozen=True)
class Totals:
    """One number a group, in ns but for `count`; of a group without events, all are 0.

    Attributes:
        count: its events.
        sum: their durations, added up.
        busy: the time that at least one of them covers.
        extent: from the first start to the last end.
    """

    count: Array
    sum: Array
    busy: Array
    extent: Array


class Events:
    """Events that can be added up by group.

    Args:
        start_ns: in ascending order.
        end_ns: as many.
    """

    def __init__(self, start_ns: Array, end_ns: Array) -> None:
        self._start, self._duration = start_ns, end_ns - start_ns
        order = np.argsort(end_ns, kind="stable")
        self._ends, self._rank = end_ns[order], np.empty_like(order)
        self._rank[order] = np.arange(len(order))

    def totals(self, rows: Array, groups: Array, count: int) -> Totals:
        """Add up by group.

        Args:
            rows: the events that belong to a group, with repetition where they belong to many.
            groups: the group of each of those, below ``count``; a pair that comes twice counts once.
            count: of groups.
        """
        result = Totals(*(np.zeros(count, np.int64) for _ in range(4)))
        if not len(rows):
            return result
        # One number a pair sorts by group, then by start. The latest end so far within a group is a running
        # maximum of ranks, each group's above those of the one before; times themselves could overflow.
        size = len(self._start)
        pairs = np.sort(groups.astype(np.int64) * size + rows)
        group, row = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], size)
        reach = self._ends[np.maximum.accumulate(group * size + self._rank[row]) - group * size]
        start = self._start[row]
        first = np.flatnonzero(np.diff(group, prepend=-1))
        last = np.append(first[1:], len(group)) - 1
        before = np.concatenate((start[:1], reach[:-1]))
        before[first] = start[first]
        found = group[first]
        result.count[found] = last - first + 1
        result.sum[found] = np.add.reduceat(self._duration[row], first)
        result.busy[found] = np.add.reduceat(np.maximum(reach - np.maximum(start, before), 0), first)
        result.extent[found] = reach[last] - start[first]
        return result


def upward(rows: Array, parents: Array) -> Iterator[tuple[Array, Array]]:
    """Yield, level by level, which of ``rows`` still have an ancestor there (themselves at first), and it."""
    which = np.flatnonzero(rows >= 0)
    above = rows[which]
    while len(which):
        yield which, above
        above = parents[above]
        which, above = which[above >= 0], above[above >= 0]


def inclusive(rows: Array, parents: Array) -> tuple[Array, Array]:
    """Return each event with what holds it, and with what holds that, as pairs of numbers."""
    levels = list(upward(rows, parents))
    if not levels:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([which for which, _ in levels]), np.concatenate([above for _, above in levels])


def distinct(codes: Array) -> tuple[Array, Array]:
    """Return the distinct ones of numbers from 0, and for each number its place among them."""
    used = np.zeros(int(codes.max(initial=-1)) + 1, bool)
    used[codes] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[codes]


def sums(values: Array, groups: Array, count: int) -> Array:
    """Add up integers by group, exactly."""
    result = np.zeros(count, np.int64)
    np.add.at(result, groups, values)
    return result
