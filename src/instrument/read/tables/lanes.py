"""Puts the times of many lanes, such as threads or streams, on one axis, so that one sort or search serves all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .table import Array, Strings

_MAX_SPAN = 2**62
_FEW_PER_VALUE = 4  # numbers that are looked up without a sort


class LaneAxis:
    """An axis on which the times of each lane follow the times of the lane before it.

    A file may have as many lanes as events, and one search per lane would take quadratic time.

    Args:
        max_lane: the largest number of a lane; the smallest is -1.
        times_ns: the times that must stay distinct; other times are only ordered relative to these.
    """

    def __init__(self, max_lane: int, *times_ns: Array) -> None:
        some = [times for times in times_ns if len(times)]
        self._low = min((int(times.min()) for times in some), default=0)
        self._high = max((int(times.max()) for times in some), default=0)
        self._ranks: Array | None = None
        if max(-self._low, self._high, (max_lane + 3) * (self._high - self._low + 3)) >= _MAX_SPAN:
            self._ranks = distinct_values(np.concatenate(some))
            self._low, self._high = 0, len(self._ranks) - 1
        self._width = self._high - self._low + 3

    def positions(self, lane: Array, times_ns: Array) -> Array:
        """Return the position of each time of each lane on the axis."""
        if self._ranks is not None:
            times_ns = np.searchsorted(self._ranks, times_ns, "right") - 1
        within = np.clip(times_ns, self._low - 1, self._high + 1) - (self._low - 1)
        places: Array = (lane.astype(np.int64) + 1) * self._width + within
        return places


def group_rows(lane: Array) -> Iterator[tuple[int, Array]]:
    """Yield each lane and the indexes of its rows, in ascending order."""
    order = np.argsort(lane, kind="stable")
    lanes, first = np.unique(lane[order], return_index=True)
    if len(lanes):
        yield from zip(lanes.tolist(), np.split(order, first[1:]), strict=True)


def pairs(first: Array, after: Array) -> tuple[Array, Array]:
    """Return pairs of every row and each number from ``first`` up to ``after`` of the row."""
    count = after - first
    row = np.repeat(np.arange(len(count)), count)
    return row, np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)


def distinct_values(values: Array) -> Array:
    """Return the distinct integers, in ascending order.

    Since version 2.3, `numpy.unique` hashes them, which takes a hundred times as long where most are distinct.
    """
    ordered = np.sort(values)
    found: Array = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
    return found


def distinct_places(values: Array) -> tuple[Array, Array]:
    """Return the distinct integers, in ascending order, and the place of each value among them.

    `numpy.unique` sorts, which takes ten times as long where they are close together, as numbers of strings are.
    """
    if not len(values):  # common in files of many processes, where the rest would take half of the time
        return np.empty(0, values.dtype), np.empty(0, np.int64)
    lowest, highest = int(values.min()), int(values.max())
    if highest - lowest >= _FEW_PER_VALUE * len(values):
        return np.unique(values, return_inverse=True)
    offsets, used = values - lowest, np.zeros(highest - lowest + 1, bool)
    used[offsets] = True
    return np.flatnonzero(used) + lowest, (np.cumsum(used) - 1)[offsets]


def is_among(values: Array, others: Array) -> Array:
    """Return a mask of the integers that are among others; `numpy.isin` is slow as `numpy.unique` is."""
    ordered = np.sort(others)
    if not len(ordered):
        return np.zeros(len(values), bool)
    found: Array = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


def distinct(*columns: Array) -> tuple[Array, Array]:
    """Return a row with each combination of values, in ascending order, and the place of each row's combination.

    `numpy.unique` with an axis compares whole rows, which takes ten times as long.
    """
    place = distinct_places(columns[0])[1]
    for column in columns[1:]:
        values, of_value = distinct_places(column)
        place = distinct_places(place * len(values) + of_value)[1]
    return np.unique(place, return_index=True)[1], place


def map_unique(values: Array, change: Callable[[int], int]) -> Array:
    """Map integers; ``change`` is called once for each distinct value, in ascending order."""
    used, places = distinct_places(values)
    return np.fromiter(map(change, used.tolist()), np.int64, len(used))[places]


def map_strings(strings: Strings, codes: Array, change: Callable[[str], str]) -> Array:
    """Apply ``change`` to the strings of these numbers, and return the numbers of the results."""
    texts = list(strings)
    return map_unique(codes, lambda code: strings[change(texts[code])])


def map_unique_pairs(first: Array, second: Array, change: Callable[[int, int], int]) -> Array:
    """Map pairs of integers; ``change`` is called once for each distinct pair, in ascending order."""
    rows, place = distinct(first, second)
    return np.fromiter(map(change, first[rows].tolist(), second[rows].tolist()), np.int64, len(rows))[place]


def latest(lanes: Array, times_ns: Array, lane: Array, at_ns: Array) -> Array:
    """Return the last event on the same lane no later than each time; -1 for none.

    Args:
        lanes: the lane of each event.
        times_ns: its time.
        lane: the lane of each question.
        at_ns: its time.
    """
    if not len(lanes):
        return np.full(len(lane), -1)
    axis = LaneAxis(int(max(lanes.max(), lane.max(initial=-1))), times_ns, at_ns)
    places = axis.positions(lanes, times_ns)
    order = np.argsort(places, kind="stable")
    last = order[np.searchsorted(places[order], axis.positions(lane, at_ns), "right") - 1]
    before = (lanes[last] == lane) & (times_ns[last] <= at_ns)
    return np.where(before, last, -1)
