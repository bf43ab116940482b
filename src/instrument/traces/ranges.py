"""`Ranges`: the regions, modules and operators of all threads as one nesting, and the CPU time of each alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..trace_marks import TASKS
from .intervals import Intervals, covered_ns, merge_overlaps
from .nest import NestedRanges
from .step_content import span
from .table import Array, Table
from .trace_data import MODULE as MODULE_NAME
from .trace_data import TraceData

REGION, MODULE, OPERATOR = range(3)
"""The values of `Ranges.kind`."""


class Ranges(NamedTuple):
    """The ranges that run during the steps, in order of start; of those that start together, the outermost first.

    Attributes:
        kind: `REGION`, `MODULE` or `OPERATOR`.
        row: the row in `Trace.regions`, `Trace.frames` or `Trace.operators`.
        name: the number of the name in `Trace.strings`.
        thread: the number of the thread.
        start_ns: the start.
        end_ns: the end.
        nest: the nesting on each thread.
    """

    kind: Array
    row: Array
    name: Array
    thread: Array
    start_ns: Array
    end_ns: Array
    nest: NestedRanges

    def places(self, kind: int, rows: Array) -> Array:
        """Return the index of the range of each row of a table; -1 for -1, and for rows that are no range here."""
        mine = np.flatnonzero(self.kind == kind)
        index = np.full(max(int(self.row[mine].max(initial=-1)), int(rows.max(initial=-1))) + 2, -1)
        index[self.row[mine]] = mine
        return index[rows]


def ranges_of(trace: TraceData, times: Intervals) -> Ranges:
    """Return the ranges that run between the first and the last of these times."""
    begin, end = (times[0][0], times[1][-1]) if len(times[0]) else (0, 0)
    tables = (trace.regions, trace.frames, trace.operators)
    rows = [np.flatnonzero((table.end_ns >= begin) & (table.start_ns < end)) for table in tables]
    rows[MODULE] = np.intersect1d(rows[MODULE], np.flatnonzero(trace.frames.matching("name", MODULE_NAME)))
    kind = np.repeat(np.arange(len(tables)), [len(each) for each in rows])
    start, end, name, thread = (
        np.concatenate([column[row] for column, row in zip(columns, rows, strict=True)])
        for columns in zip(
            *((table.start_ns, table.end_ns, table.name, table.thread) for table in tables), strict=True
        )
    )
    order = np.lexsort((start - end, start))
    start, end, thread = start[order], end[order], thread[order]
    ranges = Ranges(
        kind[order], np.concatenate(rows)[order], name[order], thread, start, end, NestedRanges(start, end, thread)
    )
    if TASKS in trace.metadata:
        _nest_in_tasks(ranges, trace.regions)
    return ranges


def _nest_in_tasks(ranges: Ranges, regions: Table) -> None:
    """Put each region into the region around it in its task, unless it is in an operator or a module."""
    parents = ranges.nest.parents
    mine = np.flatnonzero((ranges.kind == REGION) & ((parents < 0) | (ranges.kind[parents] == REGION)))
    around = ranges.places(REGION, regions.parent[ranges.row[mine]])
    parents[mine] = np.where(ranges.thread[around] == ranges.thread[mine], around, -1)


def times_of_steps(trace: TraceData) -> Intervals:
    """Return when steps run on the CPU; without steps, the time from the first event to the last."""
    if trace.steps:
        return merge_overlaps(trace.steps.start_ns, trace.steps.end_ns)
    start, end = span(trace.operators, trace.regions, trace.runtime)
    return np.array([start]), np.array([end])


def own_ns(ranges: Ranges, times: Intervals, main: int) -> tuple[Array, int]:
    """Return the CPU time of each range during these times, without that of the ranges inside it.

    At each time, the time of a thread belongs to the range that started last, also where ranges overlap without
    nesting, so that the sum is exact.

    Args:
        ranges: the ranges.
        times: the times that count.
        main: the main thread, whose time outside of ranges counts as well; -1 for none.

    Returns:
        The time of each range, and the time of the main thread outside of ranges.
    """
    edges = np.concatenate((ranges.start_ns, ranges.end_ns, *times))
    thread = np.concatenate((ranges.thread, ranges.thread, np.full(2 * len(times[0]), main)))
    order = np.lexsort((edges, thread))
    edges, thread = edges[order], thread[order]
    changes = np.flatnonzero((np.diff(edges) > 0) & (np.diff(thread) == 0))
    begin, end = edges[changes], edges[changes + 1]
    owner = ranges.nest.innermost_at(begin, thread[changes])
    took = covered_ns(times, begin, end)
    own = np.zeros(len(ranges.start_ns), np.int64)
    np.add.at(own, owner[owner >= 0], took[owner >= 0])
    outside = (owner < 0) & (thread[changes] == main) & (main >= 0)
    return own, int(took[outside].sum())
