"""Launches: their delay, their cost on the CPU, the queue, calls that synchronize, and work that is lost."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from ...read.measures.launches import Launches, launches_of
from ...read.tables.intervals import merge_overlaps, total_ns
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from .utilization import ratio

_SYNC = re.compile("Synchronize")


def delays(gpu: Table, runtime: Table) -> dict[str, int | None]:
    """Return the time from the start of the launching call to the start of the kernel."""
    kernels = gpu.category == KERNEL
    matched = kernels & (gpu.launch >= 0)
    waits = np.sort(gpu.start_ns[matched] - runtime.start_ns[gpu.launch[matched]])
    count = len(waits)
    return {
        "median": int(waits[count // 2]) if count else None,
        "p95": int(waits[int(count * 0.95)]) if count else None,
        "matched": count,
        "unmatched": int(kernels.sum()) - count,
    }


def calls(gpu: Table, runtime: Table) -> dict[str, Any]:
    """Return the number and the durations of the calls that launched work."""
    launching = np.zeros(len(runtime), bool)
    launching[gpu.launch[gpu.launch >= 0]] = True
    durations = np.sort(runtime.duration_ns[launching])
    count = len(durations)
    return {
        "n": count,
        "sum": int(durations.sum()),
        "median": int(durations[count // 2]) if count else None,
        "max": int(durations[-1]) if count else None,
    }


def queue(gpu: Table, launched_ns: Array) -> dict[str, float | int | None]:
    """Return how much work was launched and not yet finished: the maximum, and the mean over time."""
    rows = (gpu.launch >= 0) & (launched_ns <= gpu.end_ns)
    begin, end = np.sort(launched_ns[rows]), np.sort(gpu.end_ns[rows])
    if not len(begin):
        return {"max": None, "mean": None}
    waiting = np.arange(1, len(begin) + 1) - np.searchsorted(end, begin, "right")
    return {"max": int(waiting.max()), "mean": ratio(int(np.sum(end - begin)), int(end[-1]) - int(begin[0]))}


def syncs(runtime: Table) -> dict[str, int]:
    """Return the number of calls that synchronize, and the time during which any thread was in one."""
    rows = runtime.matching("name", _SYNC)
    waited = merge_overlaps(runtime.start_ns[rows], runtime.end_ns[rows])
    return {"sync_calls": int(rows.sum()), "sync_union_ns": total_ns(waited)}


_SKEW_NS = 5_000  # between the clocks of CPU and GPU
_TOO_MUCH = 0.1  # of the launches: if more are lost, times of the GPU say too little


class LostWork(NamedTuple):
    """What of the launched work is lost.

    Attributes:
        launches: launches of kernels up to the launch of the last recorded work.
        missing: those without a kernel in the trace.
        graphs: launches of CUDA graphs, likewise.
        missing_graphs: those without work in the trace.
        misplaced: launches whose work has only impossible times; work without a known launch counts as a launch.
        early: GPU work that begins before its launch.
        at_zero: GPU work at time 0, before anything else.
        without_duration: kernels without a duration, if most are.
    """

    launches: int
    missing: int
    graphs: int
    missing_graphs: int
    misplaced: int
    early: int
    at_zero: int
    without_duration: int

    @property
    def too_much(self) -> str:
        """Why times of the GPU are not known; empty if at most a tenth of the launches is lost."""
        missing = self.missing + self.missing_graphs
        launches = self.launches + self.graphs
        if missing + self.misplaced <= _TOO_MUCH * launches:
            return ""
        of = f"of {launches:,} launches"
        if not missing:
            return f"the kernels of {self.misplaced:,} {of} have impossible times"
        more = f", and those of {self.misplaced:,} have impossible times" if self.misplaced else ""
        return f"the kernels of {missing:,} {of} are not in the trace{more}"


def lost_work(trace: Trace, since_ns: int) -> LostWork:
    """Return what is lost of the work that was launched since a time.

    Launches after the launch of the last recorded work do not count: their work ran after the recording.
    """
    gpu, launched_ns = trace.gpu, trace.runtime.start_ns
    early = gpu.launch >= 0
    early[early] = gpu.start_ns[early] < launched_ns[gpu.launch[early]] - _SKEW_NS
    on_cpu = [int(table.start_ns.min()) for table in (trace.steps, trace.operators, trace.runtime) if table]
    at_zero = (gpu.start_ns == 0) & (min(on_cpu, default=0) > _SKEW_NS)
    kernels = gpu.category == KERNEL
    empty = kernels & (gpu.duration_ns <= 0)
    empty &= 2 * int(empty.sum()) > int(kernels.sum())  # a few may be shorter than the clock's tick
    wrong = early | at_zero | empty
    launches = _until_last_recorded(trace, since_ns)
    lacking = _until_last_recorded(trace, since_ns, gpu.where(~wrong)) if wrong.any() else launches
    alone = int((wrong & (gpu.launch < 0)).sum())
    graphs, missing = launches.graph, launches.missing
    return LostWork(
        int((~graphs).sum()) + alone,
        int((missing & ~graphs).sum()),
        int(graphs.sum()),
        int((missing & graphs).sum()),
        int(lacking.missing.sum() - missing.sum()) + alone,
        int((early & ~at_zero).sum()),
        int(at_zero.sum()),
        int(empty.sum()),
    )


def _until_last_recorded(trace: Trace, since_ns: int, work: Table | None = None) -> Launches:
    """Return the launches from a time to the launch of the last recorded work."""
    launches, start_ns = launches_of(trace, work), trace.runtime.start_ns
    last_ns = int(start_ns[trace.gpu.launch[trace.gpu.launch >= 0]].max(initial=since_ns))
    at = start_ns[launches.rows]
    return launches.where((at >= since_ns) & (at <= last_ns))
