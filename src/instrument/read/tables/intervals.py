"""Unions, overlaps and lengths of sets of time intervals, exact to the nanosecond."""

from __future__ import annotations

import numpy as np

from .table import Array

Intervals = tuple[Array, Array]
"""Starts and ends in ns: disjoint, not empty, in ascending order."""


def merge_overlaps(start_ns: Array, end_ns: Array) -> Intervals:
    """Merge intervals, which may overlap, be empty and come in any order, into disjoint ones."""
    if (start_ns[1:] < start_ns[:-1]).any():
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], end_ns[order]
    start, reach = start_ns, np.maximum.accumulate(end_ns)
    if not len(start):
        return start, reach
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    begins, ends = start[first], reach[np.concatenate((first[1:], [True]))]
    some = ends > begins
    return begins[some], ends[some]


def union(one: Intervals, other: Intervals) -> Intervals:
    """Return the union of two sets of intervals."""
    if not len(one[0]) or not len(other[0]):
        return one if len(one[0]) else other
    return merge_overlaps(np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])))


def total_ns(intervals: Intervals) -> int:
    """Return the sum of the lengths in ns."""
    return int(np.sum(intervals[1] - intervals[0]))


def covered_ns(intervals: Intervals, start_ns: Array, end_ns: Array) -> Array:
    """Return how much of each interval from ``start_ns`` to ``end_ns`` the set covers, in ns."""
    return integral(intervals, np.ones(len(intervals[0]), np.int64), start_ns, end_ns)


def integral(intervals: Intervals, level: Array, start_ns: Array, end_ns: Array) -> Array:
    """Return the integral, over each interval from ``start_ns`` to ``end_ns``, of a step function.

    Args:
        intervals: where the function has a value.
        level: its value in each of them; it is 0 elsewhere.
        start_ns: the starts.
        end_ns: the ends.
    """
    return _before(intervals, level, end_ns) - _before(intervals, level, start_ns)


def _before(intervals: Intervals, level: Array, times_ns: Array) -> Array:
    """Return the integral up to each time."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(len(times_ns), level.dtype)
    total = np.concatenate(([0], np.cumsum((ends - starts) * level)))
    row = np.searchsorted(starts, times_ns, "right")
    over = np.zeros(len(times_ns), level.dtype)
    some = row > 0
    over[some] = np.maximum(ends[row[some] - 1] - times_ns[some], 0) * level[row[some] - 1]
    return total[row] - over


def overlap_ns(one: Intervals, other: Intervals) -> int:
    """Return the length of the intersection of two sets of intervals, in ns."""
    return int(np.sum(covered_ns(one, *other)))


def clip(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Return the parts of the intervals between two times."""
    first = np.searchsorted(intervals[1], start_ns, "right")
    after = np.searchsorted(intervals[0], end_ns, "left") if end_ns > start_ns else first
    starts, ends = (times[first:after] for times in intervals)
    if not len(starts) or (starts[0] >= start_ns and ends[-1] <= end_ns):
        return starts, ends
    return np.maximum(starts, start_ns), np.minimum(ends, end_ns)
