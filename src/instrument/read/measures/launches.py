"""What regions launched, launches without work in the trace, and those that blocked as the GPU's queue was full.

A launch returns at once until the driver's queue is full (1,024 launches on CUDA); from then on it returns when
the GPU finishes an earlier launch. The CPU waits for the GPU in a call that does not synchronize.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..tables.lanes import LaneAxis, group_rows, is_among, pairs
from ..tables.nest import NestedRanges
from ..tables.steps import launched_before, process_of_threads
from ..tables.table import Array, Table
from ..tables.trace import Trace

GRAPH_LAUNCH = re.compile("GraphLaunch")
"""Calls of the runtime that launch a CUDA graph."""

LAUNCH = re.compile(r"Launch\w*Kernel|KernelLaunch|GraphLaunch")
"""Calls of the runtime, of CUDA, HIP or Level Zero, that launch kernels or a graph."""

_COPY = re.compile(r"Memcpy|Memset|MemFill|MemoryCopy|MemoryFill")
_CAPTURE = re.compile(r"Stream(?:Begin|End)Capture")
_END = re.compile("StreamEndCapture")


class Launches(NamedTuple):
    """The calls that launch kernels or graphs to run.

    A launch that a stream capture records runs nothing, and a call of the driver inside a launch is part of it:
    neither counts.

    Attributes:
        rows: the rows of `Trace.runtime`.
        missing: which of them have no work in the trace.
        graph: which of them launch a graph.
    """

    rows: Array
    missing: Array
    graph: Array

    def where(self, chosen: Array) -> Launches:
        """Return the launches that a mask selects."""
        return Launches(*(column[chosen] for column in self))


def launches_of(trace: Trace, work: Table | None = None) -> Launches:
    """Return the launches in a trace, in order of their start.

    Work whose id several processes use has no known launch; all calls with this id may have launched it, and none
    of them is missing its work.

    Args:
        trace: the trace.
        work: the GPU work that counts; None counts all.
    """
    runtime, gpu = trace.runtime, trace.gpu if work is None else work
    rows = np.flatnonzero(runtime.matching("name", LAUNCH))
    calls = runtime.where(rows)
    worked = np.zeros(len(runtime), bool)
    worked[gpu.launch[gpu.launch >= 0]] = True
    has = worked[rows]
    unlinked = gpu.correlation[(gpu.launch < 0) & (gpu.correlation >= 0)]
    has |= is_among(calls.correlation, unlinked)
    parents = NestedRanges(calls.start_ns, calls.end_ns, calls.thread).parents
    for inner in np.flatnonzero(parents >= 0)[::-1].tolist():  # parents come first
        has[parents[inner]] |= has[inner]
    graph = calls.matching("name", GRAPH_LAUNCH)
    return Launches(rows, ~has, graph).where((parents < 0) & (has | ~_is_captured(trace, rows)))


def copy_calls(trace: Trace) -> Array:
    """Return the rows of `Trace.runtime` that copy or set memory of a GPU, outside of captures."""
    rows = np.flatnonzero(trace.runtime.matching("name", _COPY))
    return rows[~_is_captured(trace, rows)]


def lost_at_head(trace: Trace) -> int:
    """Return how many of the first launches of kernels have no kernel in the trace, although later ones have.

    CUPTI registers its clock anew in each recording, and drops the records before that: the window number n of a
    process can lack its first n kernels. A trace without any kernel has no GPU work at all, and 0 is returned.
    """
    launches = launches_of(trace)
    ran = ~launches.missing[~launches.graph]
    return int(np.argmax(ran)) if ran.any() else 0


def _is_captured(trace: Trace, rows: Array) -> Array:
    """Return which calls are made while their process captures a graph, on any of its threads.

    A backward pass, for one, is captured on the threads of autograd.
    """
    runtime, process_of = trace.runtime, process_of_threads(trace)
    captured = np.zeros(len(rows), bool)
    marks = np.flatnonzero(runtime.matching("name", _CAPTURE))
    change = np.where(runtime.where(marks).matching("name", _END), -1, 1)
    of_rows = process_of[runtime.thread[rows]]
    for process, own in group_rows(process_of[runtime.thread[marks]]):
        open_ = np.concatenate(([0], np.cumsum(change[own])))
        open_ -= min(open_.min(), 0)  # a capture may have begun before the recording
        mine = np.flatnonzero(of_rows == process)
        at = np.searchsorted(runtime.start_ns[marks[own]], runtime.start_ns[rows[mine]], "right")
        captured[mine] = open_[at] > 0
    return captured


_MIN_FULL_QUEUE = 256  # launches; the smallest queue that CUDA_SCALE_LAUNCH_QUEUES allows
_MIN_BLOCKED_RATIO = 4  # times the usual duration of a launch


class BlockedLaunches(NamedTuple):
    """Launches that blocked, in order of their start.

    Attributes:
        start_ns: When the call had lasted as long as a launch usually does.
        end_ns: When it returned.
        thread: The thread, as in `Trace.runtime`.
    """

    start_ns: Array
    end_ns: Array
    thread: Array


def find_blocked_launches(trace: Trace) -> BlockedLaunches:
    """Return the launches that took much longer than usual while the queue of the GPU was full.

    The work of such a launch starts after the call has returned. Launches that are slow for another reason, such
    as loading a kernel's code, are excluded.
    """
    gpu, runtime = trace.gpu, trace.runtime
    linked = np.flatnonzero(gpu.launch >= 0)
    rows, place, launch = np.unique(gpu.launch[linked], return_index=True, return_inverse=True)
    first = linked[place]  # work is in order of start
    calls = runtime.where(rows)
    queued = _queue_lengths(
        trace, calls.start_ns, _last_ends(gpu.end_ns[linked], launch, len(rows)), gpu.device[first]
    )
    room = queued < _MIN_FULL_QUEUE
    usual = _usual_durations(calls.name, calls.duration_ns, room)
    waited = ~room & (calls.duration_ns > _MIN_BLOCKED_RATIO * usual) & (gpu.start_ns[first] >= calls.end_ns)
    return BlockedLaunches((calls.start_ns + usual)[waited], calls.end_ns[waited], calls.thread[waited])


def _usual_durations(name: Array, duration: Array, room: Array) -> Array:
    """Return the usual duration of each launch: the median of its function while the queue has room."""
    usual = np.zeros(len(name), np.int64)
    for _, rows in group_rows(name):
        some = duration[rows[room[rows]]]
        usual[rows] = int(np.median(some)) if len(some) else duration[rows].min()
    return usual


def _queue_lengths(trace: Trace, start: Array, done: Array, device: Array) -> Array:
    """Return the number of unfinished launches on the device at the start of each; a graph is one launch."""
    gpu = trace.gpu
    earlier = np.flatnonzero(launched_before(trace))
    queued = np.zeros(len(start), np.int64)
    for number in np.unique(device).tolist():
        on_device, before = device == number, earlier[gpu.device[earlier] == number]
        ids, launch = np.unique(gpu.correlation[before], return_inverse=True)
        ends = np.sort(np.concatenate((done[on_device], _last_ends(gpu.end_ns[before], launch, len(ids)))))
        queued[on_device] = len(ids) + np.searchsorted(np.sort(start[on_device]), start[on_device])
        queued[on_device] -= np.searchsorted(ends, start[on_device], "right")
    return queued


def _last_ends(end: Array, launch: Array, launches: int) -> Array:
    """Return when the last work of each launch ended."""
    last = np.full(launches, np.iinfo(np.int64).min)
    np.maximum.at(last, launch, end)
    return last


_PAIRS = 1 << 21  # of region and work that are processed at once: about 200 MB


def projection(trace: Trace) -> Table:
    """Return the GPU work that was launched within each region.

    A kernel, memcpy or memset belongs to a region, and to the regions around it, if the call that launched it
    began and ended in the region on the same thread. This is the definition of ``nsys stats --report
    nvtx_gpu_proj_trace`` (``nvtxgpuproj`` until 2023), which excludes ranges that another thread ended. In
    addition, work that autograd threads launch belongs to the regions open on the thread that waits for the
    backward pass.

    The time grows with the number of launches times the number of regions around each.

    Returns:
        One row for each row of ``trace.regions``, in the same order, with the columns

        - ``start_ns``, ``duration_ns``: from the start of the first work to the end of the last; -1, 0 without;
        - ``busy_ns``: how long any of the work ran;
        - ``ops``: the number of kernels, memcpys and memsets;
        - ``launches``: the number of calls that launched them; a CUDA graph is launched by one call.
    """
    regions, (work, lanes) = trace.regions, _work(trace)
    names = ("duration_ns", "busy_ns", "ops", "launches")
    result = {name: np.zeros(len(regions), np.int64) for name in names} | {"start_ns": np.full(len(regions), -1)}
    rows = np.argsort(regions.thread, kind="stable")
    thread = regions.thread[rows]
    begin, end = (lanes.positions(thread, times[rows]) for times in (regions.start_ns, regions.end_ns))
    for region, op in _launched(begin, end, work):
        owns, columns = _sums(region, op, work)
        for name, column in columns.items():
            result[name][rows[owns]] = column
    return Table(result, [])


class _WorkArrays(NamedTuple):
    """The launched work of all threads, in order of the calls, whose times are positions on a `LaneAxis`."""

    call: Array
    call_start: Array
    call_end: Array
    start: Array
    end: Array


def _work(trace: Trace) -> tuple[_WorkArrays, LaneAxis]:
    rows = np.flatnonzero(trace.gpu.launch >= 0)
    rows = rows[trace.runtime.thread[trace.gpu.launch[rows]] >= 0]
    calls = trace.runtime.where(trace.gpu.launch[rows])
    lent, lent_thread, lent_ns = _backward_threads(trace, rows, calls.thread)
    thread = np.concatenate((calls.thread, lent_thread))
    begin_ns, end_ns = np.concatenate((calls.start_ns, lent_ns)), np.concatenate((calls.end_ns, lent_ns + 1))
    gpu = trace.gpu.where(np.concatenate((rows, lent)))
    regions = trace.regions
    lanes = LaneAxis(len(trace.threads), begin_ns, end_ns, regions.start_ns, regions.end_ns)
    begin, end = (lanes.positions(thread, times) for times in (begin_ns, end_ns))
    order = np.lexsort((gpu.launch, begin))
    return _WorkArrays(*(column[order] for column in (gpu.launch, begin, end, gpu.start_ns, gpu.end_ns))), lanes


def _backward_threads(trace: Trace, rows: Array, threads: Array) -> tuple[Array, Array, Array]:
    """Return the work that autograd threads launched for another thread: its rows, that thread, and a time on it.

    The time is the start of the outermost region around the launch or, outside regions, the launch itself.
    """
    autograd = np.array([thread.autograd for thread in trace.threads], bool)
    own = autograd[threads] & (trace.gpu.region[rows] >= 0)
    rows, threads = rows[own], threads[own]
    regions, region = trace.regions, trace.gpu.region[rows].astype(np.int64)
    thread, times_ns = regions.thread[region], trace.runtime.start_ns[trace.gpu.launch[rows]]
    inside = np.flatnonzero(thread == threads)
    while len(inside):  # until the region is on the other thread
        times_ns[inside] = regions.start_ns[region[inside]]
        region[inside] = regions.parent[region[inside]]
        thread[inside] = np.where(region[inside] >= 0, regions.thread[region[inside]], -1)
        inside = inside[thread[inside] == threads[inside]]
    lent = thread >= 0
    return rows[lent], thread[lent], times_ns[lent]


def _launched(begin: Array, end: Array, work: _WorkArrays) -> Iterator[tuple[Array, Array]]:
    """Yield pairs of a region and work that it launched, for some regions at a time, which limits the memory."""
    first = np.searchsorted(work.call_start, begin, "left")
    after = np.maximum(np.searchsorted(work.call_start, end, "right"), first)
    total = np.cumsum(after - first)
    done = 0
    while done < len(begin):
        before = total[done - 1] if done else 0
        stop = max(done + 1, int(np.searchsorted(total, before + _PAIRS, "right")))
        region, op = pairs(first[done:stop], after[done:stop])
        inside = work.call_end[op] <= end[done:stop][region]
        if inside.any():
            yield region[inside] + done, op[inside]
        done = stop


def _sums(region: Array, op: Array, work: _WorkArrays) -> tuple[Array, dict[str, Array]]:
    """Return the regions, and what their work did; the pairs of a region are adjacent, as are those of a call."""
    new = np.diff(work.call[op], prepend=-1).astype(bool) | np.diff(region, prepend=-1).astype(bool)
    owns, heads, ops = np.unique(region, return_index=True, return_counts=True)
    start = np.minimum.reduceat(work.start[op], heads)
    return owns, {
        "start_ns": start,
        "duration_ns": np.maximum.reduceat(work.end[op], heads) - start,
        "busy_ns": np.add.reduceat(_added(region, work.start[op], work.end[op]), heads),
        "ops": ops,
        "launches": np.add.reduceat(new.astype(np.int64), heads),
    }


def _added(region: Array, start: Array, end: Array) -> Array:
    """Return how much each row adds to the time that earlier rows of its region cover, in order of start.

    The rows of a region stay together.
    """
    order = np.lexsort((start, region))
    region, start, end = region[order], start[order], end[order]
    # Ranks of the ends, offset by region, so that one running maximum serves all regions.
    ends, rank = np.unique(end, return_inverse=True)
    reach = ends[np.maximum.accumulate(region * len(ends) + rank) % len(ends)]
    covered = np.where(np.diff(region, prepend=-1) > 0, start, np.concatenate((start[:1], reach[:-1])))
    added: Array = np.maximum(end - np.maximum(start, covered), 0)
    return added
