"""Bounds what the steps can win if the CPU saves the time of some events: only later launches can start sooner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..traces.intervals import Intervals, covered_ns, merge_overlaps
from ..traces.lanes import group_rows
from ..traces.synchronizations import Synchronization
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .idle_causes import IdleCauses

_NOT_ON_CPU = ("launch_latency", "other", "unknown")


class ProcessSavings(NamedTuple):
    """The times at which the CPU's lead over its recorded self changes, in order.

    Attributes:
        at_ns: when a gap of the GPU ends, or a synchronization returns.
        idle_ns: how long the GPU has idled in that gap: for its end, because of the CPU.
        returns: which of them are returns of synchronizations.
    """

    at_ns: Array
    idle_ns: Array
    returns: Array

    def most_won_ns(self, times: Intervals) -> int:
        """Return the most that the steps can win if the CPU saves these times.

        Each saved nanosecond puts the CPU ahead of its recorded self by one. A gap that waits for a launch becomes
        shorter by that lead, and uses it up, whatever the CPU does in it: loading a batch begins sooner, too. The
        rest is kept for later gaps, but a synchronization loses it: the CPU then waits longer for the GPU.
        """
        saved = np.diff(covered_ns(times, np.full(len(self.at_ns), np.iinfo(np.int64).min), self.at_ns), prepend=0)
        lead = won = 0
        for more, idle, is_return in zip(
            saved.tolist(), self.idle_ns.tolist(), self.returns.tolist(), strict=True
        ):
            lead += more
            if is_return:
                lead = min(lead, idle)
            else:
                used = min(lead, idle)
                lead, won = lead - used, won + used
        return won


def times_by_process(process_of: Array, events: Sequence[Table]) -> dict[int, Intervals]:
    """Return for each process when any of its threads was in one of these events."""
    columns = (
        np.concatenate([getattr(each, name) for each in events]) for name in ("thread", "start_ns", "end_ns")
    )
    thread, starts, ends = columns
    return {process: merge_overlaps(starts[rows], ends[rows]) for process, rows in group_rows(process_of[thread])}


def process_savings(
    trace: Trace,
    idle: IdleCauses,
    waits: Sequence[Synchronization],
    until_ns: int,
    process: int,
    process_of: Array,
) -> ProcessSavings:
    """Return what bounds the savings of one process.

    Args:
        trace: the trace.
        idle: the idle time of the GPUs that the process uses.
        waits: the synchronizations of the program.
        until_ns: the end of the window: of the steps on the CPU, if the GPU idles then.
        process: the number of the process; see `process_of_threads`.
        process_of: the process of each thread.
    """
    host_ns = idle.end_ns - idle.start_ns - sum(idle.by_cause[cause] for cause in _NOT_ON_CPU)
    host_ns = host_ns + np.where(idle.end_ns == until_ns, idle.by_cause["unknown"], 0)
    ends = np.flatnonzero(host_ns)
    launches = trace.runtime.where(np.unique(trace.gpu.launch[trace.gpu.launch >= 0]))
    launched = launches.start_ns[process_of[launches.thread] == process]
    own = [wait for wait in waits if wait.thread >= 0 and wait.blocked_ns and process_of[wait.thread] == process]
    called, returned = np.array([(wait.start_ns, wait.end_ns) for wait in own], np.int64).reshape(-1, 2).T
    alone = np.searchsorted(launched, called, "right") == np.searchsorted(launched, returned)
    gap = np.searchsorted(idle.start_ns, returned, "right") - 1
    inside = alone & (gap >= 0) & (returned < np.append(idle.end_ns, 0)[gap])
    returned, gap = returned[inside], gap[inside]
    at = np.concatenate((returned, idle.end_ns[ends]))
    idle_ns = np.concatenate((returned - idle.start_ns[gap], host_ns[ends]))
    returns = np.arange(len(at)) < len(returned)
    order = np.argsort(at, kind="stable")
    return ProcessSavings(at[order], idle_ns[order], returns[order])
