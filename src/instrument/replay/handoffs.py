"""Finds where one thread of the program goes on when another is done, as between a loop and autograd's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..traces.intervals import Intervals, covered_ns
from ..traces.table import Array
from ..traces.trace import Trace

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
