"""Projects regions to the GPU: when and how long the work that each launched ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..tables.lanes import LaneAxis, pairs
from ..tables.table import Array, Table
from ..tables.trace import Trace

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
    found = thread >= 0
    return rows[found], thread[found], times_ns[found]


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
