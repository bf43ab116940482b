"""The loop of a program: the thread that runs it, and the step to which each event belongs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .intervals import Intervals, clip, covered_ns, merge_overlaps, total_ns
from .lanes import LaneAxis, group_rows, is_among
from .table import Array, Table, linked
from .trace import Trace


def main_thread(trace: Trace) -> int:
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
    placed = rows.thread >= 0
    threads = rows.thread[placed]
    return np.where(
        np.bincount(threads, minlength=count) > 0, np.bincount(threads, rows.duration_ns[placed], count), -1
    )


def process_of_threads(trace: Trace) -> Array:
    """Return a number for the process of each thread; the last element, for no thread, is -1."""
    first_thread = {thread.process: number for number, thread in reversed(list(enumerate(trace.threads)))}
    return np.array([*(first_thread[thread.process] for thread in trace.threads), -1])


def steps_of_process(trace: Trace) -> Array:
    """Return the starts and ends of the steps of the process that recorded most; repeated steps count once."""
    steps, process_of = trace.steps, process_of_threads(trace)
    times = np.stack((steps.start_ns, steps.end_ns), axis=1)
    of_processes = [np.unique(times[rows], axis=0) for _, rows in group_rows(process_of[steps.thread])]
    return max(of_processes, key=len, default=times)


class StepIndex:
    """Finds the step at a time: the last started step of the process, if it or a step around it still runs."""

    def __init__(self, trace: Trace) -> None:
        self._marked = bool(trace.steps)
        self._process = process_of_threads(trace)
        of = self._process[trace.steps.thread]
        self._rows = np.argsort(of, kind="stable")
        self._process_of_row = of[self._rows]
        starts, ends = trace.steps.start_ns[self._rows], trace.steps.end_ns[self._rows]
        self._lanes = LaneAxis(len(trace.threads), starts, ends)
        self._starts = self._lanes.positions(self._process_of_row, starts)
        self._reach = np.maximum.accumulate(self._lanes.positions(self._process_of_row, ends))
        self._latest_process = _LatestOpenProcess(self._process_of_row, starts, ends)

    def rows_at(self, times_ns: Array, threads: Array) -> Array:
        """Return the row of the step at each time on each thread, or -1; 0 for all in a trace without steps."""
        if not self._marked:
            return np.zeros(len(times_ns), np.int64)
        process = self._process[threads]
        steps = self._row_in_process(times_ns, process)
        # Events without a process may be in the steps of any process, and steps without one hold events of any.
        if (unknown := np.flatnonzero(process < 0)).size:
            steps[unknown] = self._row_in_process(times_ns[unknown], self._latest_process.last(times_ns[unknown]))
        if self._process_of_row[0] < 0 and (rest := np.flatnonzero(steps < 0)).size:
            steps[rest] = self._row_in_process(times_ns[rest], np.full(len(rest), -1))
        return steps

    def _row_in_process(self, times_ns: Array, process: Array) -> Array:
        """Return the row of the step of the process at each time, or -1."""
        places = self._lanes.positions(process, times_ns)
        at = np.searchsorted(self._starts, places, "right") - 1
        inside = (at >= 0) & (self._process_of_row[at] == process) & (places < self._reach[at])
        return np.where(inside, self._rows[at], -1)


class _LatestOpenProcess:
    """Finds the highest-numbered process that has a step open at a time."""

    def __init__(self, of: Array, starts: Array, ends: Array) -> None:
        self._edges = np.unique(np.concatenate((starts, ends)))
        first, end = np.searchsorted(self._edges, starts), np.searchsorted(self._edges, ends)
        some = end > first
        of, first, size = of[some], first[some], (end - first)[some]
        # Each step is covered by two ranges whose length is a power of two; these are halved down to length 1.
        power = np.frexp(size)[1] - 1
        last = np.full(len(self._edges), -1)
        for level in range(int(power.max(initial=0)), -1, -1):
            half = 1 << level
            if level < int(power.max(initial=0)):
                last[half:] = np.maximum(last[half:], last[:-half])
            chosen = power == level
            np.maximum.at(last, first[chosen], of[chosen])
            np.maximum.at(last, first[chosen] + size[chosen] - half, of[chosen])
        self._last = last

    def last(self, times_ns: Array) -> Array:
        """Return the process for each time; -1 for none."""
        at = np.searchsorted(self._edges, times_ns, "right") - 1
        return np.where(at >= 0, self._last[at], -1)


def has_cpu(trace: Trace) -> bool:
    """Return whether a trace has events on a CPU thread."""
    return bool(trace.steps) or loop_thread(trace) >= 0


def loop_thread(trace: Trace) -> int:
    """Return the main thread or, if nothing is recorded on it, the thread with the most events; -1 without any."""
    threads = np.concatenate([each.thread for each in _on_cpu(trace)])
    main, busy = main_thread(trace), threads[threads >= 0]
    return main if (busy == main).any() or not len(busy) else int(np.argmax(np.bincount(busy)))


def _on_cpu(trace: Trace) -> tuple[Table, ...]:
    return trace.operators, trace.regions, trace.runtime


def whole_trace(trace: Trace) -> tuple[int, int]:
    """Return when the work of a trace begins and ends in ns, where it has no steps.

    It begins with the first event of the loop, of a thread that launches work, or on a GPU, and ends with the last
    GPU work: what the CPU does later, such as a profiler that stops, is not waited for. Without GPU work, it ends
    with the last event of the loop.
    """
    threads = np.append(trace.runtime.thread[trace.gpu.launch[trace.gpu.launch >= 0]], loop_thread(trace))
    own = [each.where(np.isin(each.thread, threads) & (each.thread >= 0)) for each in _on_cpu(trace)]
    start, end = span(*own, trace.gpu)
    return start, span(trace.gpu)[1] if trace.gpu else end


def whole_window(trace: Trace) -> tuple[int, int]:
    """Return `whole_trace` from the end of the work that was launched before the recording on."""
    start, end = whole_trace(trace)
    done = int(trace.gpu.end_ns[earlier_work(trace)].max(initial=start))
    return (done if done < end else start), end


def times_of_steps(trace: Trace) -> Intervals:
    """Return when steps run on the CPU; without steps, `whole_window`."""
    if trace.steps:
        return merge_overlaps(trace.steps.start_ns, trace.steps.end_ns)
    start, end = whole_window(trace)
    return np.array([start]), np.array([end])


def steps_ns(trace: Trace) -> int:
    """Return the sum of the durations of the steps; without steps, the length of `whole_window`."""
    if trace.steps:
        return int(trace.steps.duration_ns.sum())
    start, end = whole_window(trace)
    return end - start


def span(*tables: Table) -> tuple[int, int]:
    """Return the first start and the last end of the events in the tables."""
    some = [table for table in tables if table]
    if not some:
        return 0, 0
    return int(min(table.start_ns[0] for table in some)), int(max(table.end_ns.max() for table in some))


def in_no_region_ns(trace: Trace, regions: Table) -> int:
    """Return how long no region was open on any thread, during the steps or, without steps, the whole trace."""
    open_ = merge_overlaps(regions.start_ns, regions.end_ns)
    if not trace.steps:
        return steps_ns(trace) - total_ns(clip(open_, *whole_window(trace)))
    return int((trace.steps.duration_ns - covered_ns(open_, trace.steps.start_ns, trace.steps.end_ns)).sum())


def outside_ns(trace: Trace) -> int:
    """Return how much of the time from the first event on the CPU to the last is outside steps."""
    if not trace.steps:
        return 0
    start, end = span(trace.operators, trace.regions, trace.runtime)
    within = covered_ns(
        merge_overlaps(trace.steps.start_ns, trace.steps.end_ns), np.array([start]), np.array([end])
    )
    return end - start - int(within[0])


class GpuWork(NamedTuple):
    """Masks of the GPU work by its relation to the steps.

    Attributes:
        counted: Work that belongs to a step by its launch or, for ``by_time``, by its start; without steps, all
            work. None of `earlier_work` counts.
        before: Work that was launched before the recording.
        by_time: Work without a known launch, which belongs to the step in which it ran.
    """

    counted: Array
    before: Array
    by_time: Array


def gpu_work(trace: Trace, steps: StepIndex) -> GpuWork:
    """Return which GPU work belongs to the steps."""
    gpu = trace.gpu
    by_call, by_operator = gpu.launch >= 0, (gpu.launch < 0) & (gpu.operator >= 0)
    before = launched_before(trace)
    at, thread = (
        np.where(by_call, linked(trace.runtime[name], gpu.launch), linked(trace.operators[name], gpu.operator))
        for name in ("start_ns", "thread")
    )
    at = np.where(by_call | by_operator, at, gpu.start_ns)
    counted = (steps.rows_at(at, thread) >= 0) & ~earlier_work(trace)
    return GpuWork(counted, before, ~(by_call | by_operator | before))


_MOST_BEFORE = 0.1  # of the GPU's time: with more, a recording without steps is that of its GPU work

_BUSY_NS = 1_000_000


def earlier_work(trace: Trace) -> Array:
    """Return a mask of the GPU work that was launched before the recording, and does not count.

    Without steps, it counts if it is much: no step says what the recording is about. If none of it is recorded,
    and the first work starts over 1 ms after its launch, the GPU was busy with such work until then: that first
    work does not count.
    """
    before, gpu = launched_before(trace), trace.gpu
    if trace.steps or not gpu:
        return before
    if gpu.duration_ns[before].sum() > _MOST_BEFORE * gpu.duration_ns.sum():
        return np.zeros(len(before), bool)
    launched_ns = linked(trace.runtime.end_ns, gpu.launch[:1], int(gpu.start_ns[0]))
    before[0] |= not before.any() and bool(gpu.start_ns[0] > launched_ns[0] + _BUSY_NS)
    return before


def launched_before(trace: Trace) -> Array:
    """Return a mask of the GPU work that was launched before the recording.

    Streams run in order: if the trace has launches, work before the first launched work of its stream was launched
    before the recording. A profiler that does not record all launches gives no such evidence.
    """
    gpu = trace.gpu
    launched = (gpu.launch >= 0) | (gpu.operator >= 0)
    before: Array = ~launched & (gpu.correlation >= 0)
    if not (launched.any() and before.any()):
        return np.zeros(len(gpu), bool)
    before &= ~is_among(gpu.correlation, trace.runtime.correlation)  # several processes may use the same id
    streams, stream = np.unique(gpu.stream, return_inverse=True)
    lane = np.unique(gpu.device, return_inverse=True)[1] * len(streams) + stream
    lanes, first = np.unique(lane[launched], return_index=True)  # work is in order of start
    first_ns = np.full(int(lane.max()) + 1, np.iinfo(np.int64).max)
    first_ns[lanes] = gpu.start_ns[launched][first]
    before &= gpu.start_ns < first_ns[lane]
    return before
