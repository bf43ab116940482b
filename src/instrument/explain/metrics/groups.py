"""Totals of events by group; an event may belong to many groups, as a kernel does to each region around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...read.tables.nest import ancestor_levels
from ...read.tables.table import Array

Value = TypeVar("Value", bound=Hashable)

_PAIRS = 1 << 21  # of event and group that are processed at once: about 150 MB


@dataclass(frozen=True)
class Totals:
    """One number per group, 0 for a group without events; in ns except for `count`.

    Attributes:
        count: the number of events.
        sum: the sum of their durations.
        busy: the time that at least one event covers.
        extent: from the first start to the last end.
    """

    count: Array
    sum: Array
    busy: Array
    extent: Array


class GroupedEvents:
    """Events whose durations can be added up by group.

    Args:
        start_ns: in ascending order.
        end_ns: as many.
    """

    def __init__(self, start_ns: Array, end_ns: Array) -> None:
        self._start, self._duration = start_ns, end_ns - start_ns
        order = np.argsort(end_ns, kind="stable")
        self._ends, self._rank = end_ns[order], np.empty_like(order)
        self._rank[order] = np.arange(len(order))

    def totals(self, pairs: Iterable[tuple[Array, Array]], count: int) -> Totals:
        """Return the totals of each group.

        Args:
            pairs: numbers of events and of their groups, in parts; each part has only later events than the parts
                before it. A pair that occurs twice counts once.
            count: the number of groups.
        """
        result = Totals(*(np.zeros(count, np.int64) for _ in range(4)))
        begin, reached = np.zeros(count, np.int64), np.full(count, np.iinfo(np.int64).min)
        for rows, groups in pairs:
            if len(rows):
                self._add(result, begin, reached, rows, groups)
        result.extent[:] = np.where(result.count > 0, reached - begin, 0)
        return result

    def _add(self, result: Totals, begin: Array, reached: Array, rows: Array, groups: Array) -> None:
        # One number per pair sorts by group, then by start. The latest end so far within a group is a running
        # maximum of ranks, offset by group; the times themselves could overflow.
        size = len(self._start)
        pairs = np.sort(groups.astype(np.int64) * size + rows)
        group, row = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], size)
        reach = self._ends[np.maximum.accumulate(group * size + self._rank[row]) - group * size]
        start = self._start[row]
        first = np.flatnonzero(np.diff(group, prepend=-1))
        last = np.append(first[1:], len(group)) - 1
        before = np.concatenate((start[:1], reach[:-1]))
        before[first] = start[first]
        before = np.maximum(before, reached[group])
        found = group[first]
        begin[found] = np.where(result.count[found] > 0, begin[found], start[first])
        reached[found] = np.maximum(reached[found], reach[last])
        result.count[found] += last - first + 1
        result.sum[found] += np.add.reduceat(self._duration[row], first)
        result.busy[found] += np.add.reduceat(np.maximum(reach - np.maximum(start, before), 0), first)


def ancestor_pairs(rows: Array, parents: Array) -> Iterator[tuple[Array, Array]]:
    """Yield pairs of each event and each of its ancestors, some at a time."""
    depth = sum(1 for _ in ancestor_levels(np.unique(rows, return_index=True)[0], parents))
    step = max(_PAIRS // max(depth, 1), 1)
    for begin in range(0, len(rows), step):
        levels = list(ancestor_levels(rows[begin : begin + step], parents))
        if levels:
            yield np.concatenate([which for which, _ in levels]) + begin, np.concatenate([on for _, on in levels])


def unique_codes(codes: Array) -> tuple[Array, Array]:
    """Return the distinct values of non-negative integers, and the index of each value among them."""
    used = np.zeros(int(codes.max(initial=-1)) + 1, bool)
    used[codes] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[codes]


def distinct_values(keys: Array, value_of: Callable[..., Value | None]) -> tuple[list[Value], Array]:
    """Return the distinct values of rows of codes, and the index of the value of each row; -1 for None.

    Args:
        keys: the rows.
        value_of: returns the value of the codes of a row.
    """
    rows, which = np.unique(keys, axis=0, return_inverse=True)
    numbers: dict[Value, int] = {}
    found = np.full(len(rows), -1)
    for place, codes in enumerate(rows.tolist()):
        if (value := value_of(*codes)) is not None:
            found[place] = numbers.setdefault(value, len(numbers))
    return list(numbers), found[which.reshape(-1)]


def sum_by_group(values: Array, groups: Array, count: int) -> Array:
    """Return the exact sum of the integers of each group."""
    result = np.zeros(count, np.int64)
    np.add.at(result, groups, values)
    return result
