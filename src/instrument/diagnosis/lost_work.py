"""Counts the launches whose GPU work is not in the trace, or has impossible times."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..traces.table import KERNEL, Array
from ..traces.trace import Trace

KERNEL_LAUNCH = re.compile("LaunchKernel")
"""Calls of the runtime that launch a kernel."""

_LAUNCH = re.compile("LaunchKernel|GraphLaunch")
_SKEW_NS = 5_000  # between the clocks of CPU and GPU
_TOO_MUCH = 0.1  # of the launches: if more are lost, times of the GPU say too little


class LostWork(NamedTuple):
    """What of the launched work is lost.

    Attributes:
        launches: launches of kernels and CUDA graphs up to that of the last recorded work.
        missing: those without work in the trace.
        misplaced: those whose work has only impossible times; work without a known launch counts as a launch.
        early: GPU work that begins before its launch.
        at_zero: GPU work at time 0, before anything else.
        without_duration: kernels without a duration, if most are.
    """

    launches: int
    missing: int
    misplaced: int
    early: int
    at_zero: int
    without_duration: int

    @property
    def too_much(self) -> str:
        """Why times of the GPU are not known; empty if at most a tenth of the launches is lost."""
        if self.missing + self.misplaced <= _TOO_MUCH * self.launches:
            return ""
        of = f"of {self.launches:,} launches"
        if not self.missing:
            return f"the kernels of {self.misplaced:,} {of} have impossible times"
        more = f", and those of {self.misplaced:,} have impossible times" if self.misplaced else ""
        return f"the kernels of {self.missing:,} {of} are not in the trace{more}"


def lost_work(trace: Trace, since_ns: int) -> LostWork:
    """Return what is lost of the work that was launched since a time."""
    gpu = trace.gpu
    linked = gpu.launch >= 0
    early, at_zero, empty = _early(trace), _at_zero(trace), _without_duration(trace)
    wrong = early | at_zero | empty
    right = np.zeros(len(trace.runtime), bool)
    right[gpu.launch[linked & ~wrong]] = True
    calls, missing = launches_without_work(trace, _LAUNCH, since_ns)
    misplaced = int((~right[calls]).sum()) - missing + int((wrong & ~linked).sum())
    return LostWork(
        len(calls) + int((wrong & ~linked).sum()),
        missing,
        misplaced,
        int((early & ~at_zero).sum()),
        int(at_zero.sum()),
        int(empty.sum()),
    )


def launches_without_work(trace: Trace, pattern: re.Pattern[str], since_ns: int) -> tuple[Array, int]:
    """Return the rows of such calls since a time, and how many of them have no GPU work.

    Calls after the launch of the last recorded work do not count: their work ran after the recording.
    """
    runtime, gpu = trace.runtime, trace.gpu
    linked = np.zeros(len(runtime), bool)
    linked[gpu.launch[gpu.launch >= 0]] = True
    last = int(runtime.start_ns[linked].max(initial=since_ns))
    calls = np.flatnonzero(runtime.matching("name", pattern))
    calls = calls[(runtime.start_ns[calls] >= since_ns) & (runtime.start_ns[calls] <= last)]
    return calls, int((~linked[calls]).sum())


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
