"""The points on the threads of the program between which a replay keeps the recorded time of the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..traces.blocked_launches import BlockedLaunches
from ..traces.synchronizations import Synchronization
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .handoffs import Handoffs

RETURN, UNBLOCKED, END, FORK, JOIN, START, LAUNCH, SYNC = range(8)
"""Kinds of points, in the order of those at one time."""


class CpuPoints(NamedTuple):
    """Points on threads, in order of thread and time.

    Attributes:
        thread: the thread.
        time_ns: the recorded time.
        kind: what happens: a step starts (START) or ends (END); a call launches work (LAUNCH) or begins to wait
            for the GPU (SYNC); such a call (RETURN) or a launch into a full queue (UNBLOCKED) goes on; the thread
            goes on after another one (JOIN), or lets another go on (FORK).
        of: the row of the step, of the call of `Trace.runtime`, of the synchronization, of the blocked launch, or
            of the hand-off.
    """

    thread: Array
    time_ns: Array
    kind: Array
    of: Array


def cpu_points(
    trace: Trace, steps: Table, waits: Iterable[Synchronization], full: BlockedLaunches, handoffs: Handoffs
) -> CpuPoints:
    """Return the points of a trace.

    Args:
        trace: the trace.
        steps: the steps.
        waits: the synchronizations.
        full: the launches that found the queue of the GPU full.
        handoffs: the hand-offs between threads.
    """
    runtime = trace.runtime
    launches = np.unique(trace.gpu.launch[trace.gpu.launch >= 0])
    waited = np.array([(wait.thread, wait.start_ns, wait.start_ns + wait.blocked_ns) for wait in waits], np.int64)
    thread, began, returned = waited.reshape(-1, 3).T
    parts = (
        (JOIN, handoffs.thread, handoffs.time_ns, None),
        (START, steps.thread, steps.start_ns, None),
        (LAUNCH, runtime.thread[launches], runtime.start_ns[launches], launches),
        (SYNC, thread, began, None),
        (RETURN, thread, returned, None),
        (UNBLOCKED, full.thread, full.end_ns, None),
        (END, steps.thread, steps.end_ns, None),
        (FORK, handoffs.by_thread, handoffs.by_ns, None),
    )
    threads, times = (np.concatenate([part[column] for part in parts]).astype(np.int64) for column in (1, 2))
    kinds = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
    of = np.concatenate([np.arange(len(part[1])) if part[3] is None else part[3] for part in parts])
    order = np.lexsort((kinds, times, threads))
    return CpuPoints(threads[order], times[order], kinds[order], of[order])
