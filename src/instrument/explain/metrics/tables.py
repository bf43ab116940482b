"""Totals of events by group, and the tables of GPU time by kernel, operator, region and module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...read.tables.lanes import distinct
from ...read.tables.nest import ancestor_levels
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import MODULE
from .utilization import ratio

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
        own = group[first]
        begin[own] = np.where(result.count[own] > 0, begin[own], start[first])
        reached[own] = np.maximum(reached[own], reach[last])
        result.count[own] += last - first + 1
        result.sum[own] += np.add.reduceat(self._duration[row], first)
        result.busy[own] += np.add.reduceat(np.maximum(reach - np.maximum(start, before), 0), first)


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
    rows, which = distinct(*keys.T)
    numbers: dict[Value, int] = {}
    number_of_row = np.full(len(rows), -1)
    for place, codes in enumerate(keys[rows].tolist()):
        if (value := value_of(*codes)) is not None:
            number_of_row[place] = numbers.setdefault(value, len(numbers))
    return list(numbers), number_of_row[which]


def one_of(table: Table, column: str, words: Collection[str]) -> Array:
    """Return a mask of the rows of a table whose text in a column is one of these words."""
    codes = table[column]
    among = np.bincount(codes, minlength=1) > 0
    for code in np.flatnonzero(among).tolist():
        among[code] = table.strings[code] in words
    return among[codes]


def sum_by_group(values: Array, groups: Array, count: int) -> Array:
    """Return the exact sum of the integers of each group."""
    result = np.zeros(count, np.int64)
    np.add.at(result, groups, values)
    return result


Rows = list[dict[str, Any]]


def kernel_table(gpu: Table) -> Rows:
    """Return the kernels by name, with their short name and family, number, durations and share, longest first."""
    kernels = gpu.category == KERNEL
    if not kernels.any():
        return []
    order = np.argsort(gpu.name[kernels], kind="stable")
    name, duration = gpu.name[kernels][order], gpu.duration_ns[kernels][order]
    first = np.flatnonzero(np.diff(name, prepend=-1))
    count = np.diff(np.append(first, len(duration)))
    total = np.add.reduceat(duration, first)
    columns = {
        "count": count,
        "sum_ns": total,
        "mean_ns": total / count,
        "min_ns": np.minimum.reduceat(duration, first),
        "max_ns": np.maximum.reduceat(duration, first),
    }
    whole = int(total.sum())
    rows = _rows(gpu, name[first], columns, "sum_ns")
    described = gpu.where(np.flatnonzero(kernels)[order][first])
    texts = zip(*(described.text(column) for column in ("name", "short_name", "family")), strict=True)
    about = {name: {"short_name": short, "family": family} for name, short, family in texts}
    return [row | {"share": ratio(row["sum_ns"], whole)} | about[row["name"]] for row in rows]


def operator_table(operators: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the operators by name: calls, CPU time without children, and work on the GPU.

    ``gpu_self_ns`` adds up the work that the calls launched themselves, ``gpu_ns`` includes the work of the
    operators that they called, and ``gpu_busy_ns`` is the time during which any of that runs. Work under an
    operator that calls an operator of the same name counts once.
    """
    inside = np.flatnonzero(operators.parent >= 0)
    children = GroupedEvents(operators.start_ns[inside], operators.end_ns[inside]).totals(
        [(np.arange(len(inside)), operators.parent[inside])], len(operators)
    )
    names, of = unique_codes(operators.name)
    own = np.flatnonzero(gpu.operator >= 0)
    launched = work.totals([(own, of[gpu.operator[own]])], len(names))
    pairs = ancestor_pairs(gpu.operator, operators.parent)
    below = work.totals(((rows, of[above]) for rows, above in pairs), len(names))
    columns = {
        "calls": np.bincount(of, minlength=len(names)),
        "cpu_self_ns": sum_by_group(operators.duration_ns - children.busy, of, len(names)),
        "gpu_self_ns": launched.sum,
        "gpu_ns": below.sum,
        "gpu_busy_ns": below.busy,
    }
    return _rows(operators, names, columns, "gpu_self_ns", "cpu_self_ns")


def region_table(regions: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the named regions and the GPU work launched inside them.

    ``gpu_ns`` adds up the durations of that work, ``gpu_busy_ns`` is the time during which any of it runs, and
    ``gpu_projection_ns`` adds up, over the calls, the time from the first start to the last end.
    """
    return _nested(regions, work, gpu.region, regions.parent, np.ones(len(regions), bool))


def module_table(frames: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the modules, with the columns of `region_table`; they need a trace recorded with stacks."""
    is_module = frames.matching("name", MODULE)
    return _nested(frames, work, gpu.module, _module_above(frames.parent, is_module), is_module)


def _module_above(parents: Array, is_module: Array) -> Array:
    """Return the module around each module, or -1."""
    result = np.full(len(parents), -1)
    modules = np.flatnonzero(is_module)
    rows = parents[modules]
    while len(modules):
        arrived = (rows < 0) | is_module[rows]
        result[modules[arrived]] = rows[arrived]
        modules, rows = modules[~arrived], parents[rows[~arrived]]
    return result


def _nested(ranges: Table, work: GroupedEvents, inner: Array, parents: Array, chosen: Array) -> Rows:
    if not chosen.any():
        return []
    names, of = unique_codes(ranges.name[chosen])
    number = np.zeros(len(ranges), np.int64)
    number[chosen] = of
    by_name = work.totals(((rows, number[above]) for rows, above in ancestor_pairs(inner, parents)), len(names))
    by_call = work.totals(ancestor_pairs(inner, parents), len(ranges))
    columns = {
        "calls": np.bincount(of, minlength=len(names)),
        "cpu_ns": sum_by_group(ranges.duration_ns[chosen], of, len(names)),
        "gpu_count": by_name.count,
        "gpu_ns": by_name.sum,
        "gpu_busy_ns": by_name.busy,
        "gpu_projection_ns": sum_by_group(by_call.extent[chosen], of, len(names)),
    }
    return _rows(ranges, names, columns, "gpu_ns", "cpu_ns")


def _rows(table: Table, names: Array, columns: dict[str, Array], *by: str) -> Rows:
    """Return one dict per name, the largest in these columns first and, of equal ones, in order of the names."""
    texts = [table.strings[name] for name in names.tolist()]
    order = np.lexsort((_ranks(texts), *(-columns[name] for name in reversed(by))))
    values = zip(*(column[order].tolist() for column in columns.values()), strict=True)
    return [
        {"name": texts[place], **dict(zip(columns, row, strict=True))}
        for place, row in zip(order.tolist(), values, strict=True)
    ]


def _ranks(texts: list[str]) -> Array:
    """Return the place of each text in their order."""
    ranks = np.empty(len(texts), np.int64)
    ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
    return ranks
