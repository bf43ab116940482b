"""What belongs to the steps of a trace: what starts in the range of one, on the threads of its process."""

from __future__ import annotations

import numpy as np

from .intervals import covered, length, union
from .table import Array, Table
from .trace import Trace


class Steps:
    """Which step holds a time: the last of its process to start, if that or one around it still runs."""

    def __init__(self, trace: Trace) -> None:
        self._marked = bool(trace.steps)
        known = {thread.process: number for number, thread in reversed(list(enumerate(trace.threads)))}
        self._process = np.array([*(known[thread.process] for thread in trace.threads), -1])
        of = self._process[trace.steps.thread]
        self._rows = {process: np.flatnonzero(of == process) for process in np.unique(of).tolist()}
        self._starts, self._ends = trace.steps.start_ns, trace.steps.end_ns

    def of(self, times_ns: Array, threads: Array) -> Array:
        """Return the row of the step that each time on each thread is in, or -1; without steps, 0 for all."""
        if not self._marked:
            return np.zeros(len(times_ns), np.int64)
        found = np.full(len(times_ns), -1)
        process = self._process[threads]
        for number, rows in self._rows.items():
            here = np.flatnonzero((process == number) | (process < 0) | (number < 0))
            at = np.searchsorted(self._starts[rows], times_ns[here], "right") - 1
            ends = np.maximum.accumulate(self._ends[rows])
            inside = (at >= 0) & (times_ns[here] < ends[at])
            found[here[inside]] = rows[at[inside]]
        return found


def steps_ns(trace: Trace) -> int:
    """The durations of the steps, added up; without any, from the first event to the last."""
    if trace.steps:
        return int(trace.steps.duration_ns.sum())
    start, end = span(trace.operators, trace.regions, trace.runtime, trace.gpu)
    return end - start


def span(*tables: Table) -> tuple[int, int]:
    """The first start and the last end of what is in the tables."""
    some = [table for table in tables if table]
    if not some:
        return 0, 0
    return int(min(table.start_ns[0] for table in some)), int(max(table.end_ns.max() for table in some))


def in_no_region_ns(trace: Trace, regions: Table) -> int:
    """How long no region was open on any thread, of the steps or, without any, of the whole."""
    open_ = union(regions.start_ns, regions.end_ns)
    if not trace.steps:
        return steps_ns(trace) - length(open_)
    return int((trace.steps.duration_ns - covered(open_, trace.steps.start_ns, trace.steps.end_ns)).sum())


def outside_ns(trace: Trace) -> int:
    """How much of the time from the first event on the CPU to the last is in no step."""
    if not trace.steps:
        return 0
    start, end = span(trace.operators, trace.regions, trace.runtime)
    within = covered(union(trace.steps.start_ns, trace.steps.end_ns), np.array([start]), np.array([end]))
    return end - start - int(within[0])


def counted_work(trace: Trace, steps: Steps) -> Array:
    """Which GPU work was launched in a step, or nobody knows where."""
    launched = trace.gpu.launch >= 0
    counts = ~launched
    launches = trace.runtime.where(trace.gpu.launch[launched])
    counts[launched] = steps.of(launches.start_ns, launches.thread) >= 0
    return counts
