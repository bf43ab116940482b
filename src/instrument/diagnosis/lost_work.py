"""Counts the launches whose GPU work is not in the trace, or has impossible times."""

from __future__ import annotations

from typing import NamedTuple

from ..traces.missing_work import Launches, launches_of
from ..traces.table import KERNEL, Array, Table
from ..traces.trace import Trace

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
    gpu = trace.gpu
    early, at_zero, empty = _early(trace), _at_zero(trace), _without_duration(trace)
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


def _early(trace: Trace) -> Array:
    """Return a mask of the GPU work that begins before its launch."""
    mask = trace.gpu.launch >= 0
    mask[mask] = trace.gpu.start_ns[mask] < trace.runtime.start_ns[trace.gpu.launch[mask]] - _SKEW_NS
    early: Array = mask
    return early


def _at_zero(trace: Trace) -> Array:
    """Return a mask of the GPU work at time 0, if everything on the CPU happens later."""
    starts = [int(table.start_ns.min()) for table in (trace.steps, trace.operators, trace.runtime) if table]
    mask: Array = trace.gpu.start_ns == 0
    return mask & (min(starts, default=0) > _SKEW_NS)


def _without_duration(trace: Trace) -> Array:
    """Return a mask of the kernels without a duration, if most are; a few may be shorter than the clock's tick."""
    kernels = trace.gpu.category == KERNEL
    mask: Array = kernels & (trace.gpu.duration_ns <= 0)
    return mask & (2 * int(mask.sum()) > int(kernels.sum()))
