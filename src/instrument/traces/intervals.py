"""Unions, differences and lengths of sets of intervals of time, exact to the nanosecond."""

from __future__ import annotations

import numpy as np

from .table import Array

Intervals = tuple[Array, Array]
"""Starts and ends in ns; disjoint, ascending and none of them empty."""


def merge_overlaps(start_ns: Array, end_ns: Array) -> Intervals:
    """Return the time that at least one interval covers; any order, overlapping or empty."""
    order = np.argsort(start_ns, kind="stable")
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    if not len(start):
        return start, reach
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    begins, ends = start[first], reach[np.concatenate((first[1:], [True]))]
    some = ends > begins
    return begins[some], ends[some]


def union(one: Intervals, other: Intervals) -> Intervals:
    """Return the time that one or the other covers."""
    return merge_overlaps(np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])))


def total_ns(intervals: Intervals) -> int:
    """Return how long they are together, in ns."""
    return int(np.sum(intervals[1] - intervals[0]))


def covered_ns(intervals: Intervals, start_ns: Array, end_ns: Array) -> Array:
    """Return how much of each of the given intervals the first ones cover, in ns."""
    return _before(intervals, end_ns) - _before(intervals, start_ns)


def _before(intervals: Intervals, times_ns: Array) -> Array:
    """How much lies before each time."""
    starts, ends = intervals
    total = np.concatenate(([0], np.cumsum(ends - starts)))
    row = np.searchsorted(starts, times_ns, "right")
    over = np.zeros(len(times_ns), np.int64)
    some = row > 0
    over[some] = np.maximum(ends[row[some] - 1] - times_ns[some], 0)
    return total[row] - over


def overlap_ns(one: Intervals, other: Intervals) -> int:
    """Return how long the time is that one and the other cover, in ns."""
    return int(np.sum(covered_ns(one, *other)))


def clip(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Return what lies between two times."""
    starts, ends = np.maximum(intervals[0], start_ns), np.minimum(intervals[1], end_ns)
    some = ends > starts
    return starts[some], ends[some]
