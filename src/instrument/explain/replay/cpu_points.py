"""The points on threads between which a replay keeps the time of the CPU, and where one goes on after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...read.measures.launches import BlockedLaunches
from ...read.measures.synchronizations import Synchronization
from ...read.tables.intervals import Intervals, covered_ns
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace

_QUIET_NS = 5_000
MAX_THREADS = 128
"""The number of threads above which hand-offs are not looked for."""


class Handoffs(NamedTuple):
    """The moments at which a thread goes on because another thread is done.

    Attributes:
        thread: the thread that goes on.
        time_ns: when it goes on.
        by_thread: the thread that it waited for.
        by_ns: the last event on that thread before.
    """

    thread: Array
    time_ns: Array
    by_thread: Array
    by_ns: Array


def find_handoffs(trace: Trace, threads: Sequence[int], blocked: dict[int, Intervals]) -> Handoffs:
    """Return the hand-offs between threads.

    A thread waited for another if nothing starts or ends on it for 5 us or since the beginning, and the other
    thread has events during at least half of this time. Times in which the thread waits for the GPU do not count.
    The trace does not show locks and queues.

    Args:
        trace: the trace.
        threads: the threads; of more than `MAX_THREADS`, none is compared.
        blocked: the times during which each thread waits for the GPU.
    """
    edges = {thread: _edges(trace, thread) for thread in threads if len(threads) <= MAX_THREADS}
    first = min((int(own[0]) for own in edges.values() if len(own)), default=0)
    found = [np.empty((4, 0), np.int64)]
    for thread, own in edges.items():
        own = np.concatenate(([first - 1], own))
        quiet = np.flatnonzero(np.diff(own) >= _QUIET_NS)
        since, until = own[quiet], own[quiet + 1]
        if thread in blocked:
            free = covered_ns(blocked[thread], since, until) == 0
            since, until = since[free], until[free]
        last, by = np.full(len(since), -1), np.full(len(since), -1)
        for other, times in edges.items():
            if other == thread or not len(times):
                continue
            begin = np.searchsorted(times, since, "right")
            final = np.searchsorted(times, until) - 1
            inside = final >= begin
            start, end = times[np.minimum(begin, len(times) - 1)], times[np.maximum(final, 0)]
            waits = inside & (2 * (end - start) >= until - since) & (end > last)
            last[waits], by[waits] = end[waits], other
        some = by >= 0
        found.append(np.stack((np.full(int(some.sum()), thread), until[some], by[some], last[some])))
    return Handoffs(*np.concatenate(found, axis=1))


def _edges(trace: Trace, thread: int) -> Array:
    """Return the times at which anything starts or ends on a thread."""
    tables = [table.where(table.thread == thread) for table in (trace.operators, trace.regions, trace.runtime)]
    return np.unique(np.concatenate([times for table in tables for times in (table.start_ns, table.end_ns)]))


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
