"""Finds the thread that runs the loop of a program, in a trace and in each process of it."""

from __future__ import annotations

import numpy as np

from .table import Array, Table
from .trace_data import TraceData


def main_thread(trace: TraceData) -> int:
    """Return the thread of the steps; without steps, the thread that spent the most time in regions; or -1.

    Without regions as well, it is the thread that spent the most time in outermost operators.
    """
    autograd = np.array([*(thread.autograd for thread in trace.threads), False])
    regions = trace.regions
    operators = trace.operators.where(trace.operators.parent < 0)
    rows = trace.steps or regions.where(~autograd[regions.thread]) or regions
    rows = rows or operators.where(~autograd[operators.thread]) or operators
    times = _time_on_threads(rows, int(rows.thread.max(initial=-1)) + 1)
    return int(np.argmax(times)) if len(times) else -1


def main_threads(steps: Table, regions: Table, process_of: Array) -> Array:
    """Return the `main_thread` of each process; the last element is -1, for no process."""
    count = len(process_of) - 1
    process, times = process_of[:count], _time_on_threads(steps, count)
    main = np.full(int(process.max(initial=-1)) + 2, -1)
    stepping = np.zeros(len(main), bool)
    stepping[process[times >= 0]] = True
    times = np.where(stepping[process], times, _time_on_threads(regions, count))
    order = np.lexsort((-np.arange(count), times, process))  # the longest of each process last
    order = order[times[order] >= 0]
    main[process[order]] = order
    return main


def _time_on_threads(rows: Table, count: int) -> Array:
    """Return the time that each of ``count`` threads spent in the rows; -1 for a thread without rows."""
    known = rows.thread >= 0
    threads = rows.thread[known]
    return np.where(
        np.bincount(threads, minlength=count) > 0, np.bincount(threads, rows.duration_ns[known], count), -1
    )
