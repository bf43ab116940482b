"""Splits the time of the GPUs into compute, communication, memcpys and idle time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..traces.gpus import gpu_numbers
from ..traces.intervals import Intervals, merge_overlaps, overlap_ns, total_ns, union
from ..traces.lanes import group_rows
from ..traces.table import KERNEL, MEMCPY, MEMSET, Array, Table

_PARTS = ("busy_ns", "idle_ns", "compute_ns", "exposed_comm_ns", "exposed_memcpy_ns")


class Activity(NamedTuple):
    """When the GPUs, on any stream of any device, were busy with each kind of work.

    Attributes:
        kernels: any kernel.
        kernel_compute: a kernel that does not communicate.
        compute: a kernel that does not communicate, or a memset, as TraceLens counts it.
        communication: a kernel that communicates.
        memcpy: a memcpy.
        memset: a memset.
        working: compute or communication.
        busy: any work.
    """

    kernels: Intervals
    kernel_compute: Intervals
    compute: Intervals
    communication: Intervals
    memcpy: Intervals
    memset: Intervals
    working: Intervals
    busy: Intervals


def activity(gpu: Table, communication_mask: Array) -> Activity:
    """Return when the GPUs were busy with each kind of work.

    Args:
        gpu: the GPU work.
        communication_mask: which rows are kernels that communicate.
    """
    start, end, kernel = gpu.start_ns, gpu.end_ns, gpu.category == KERNEL

    def times(rows: Array) -> Intervals:
        return merge_overlaps(start[rows], end[rows])

    kernel_compute, communication = times(kernel & ~communication_mask), times(kernel & communication_mask)
    memcpy, memset = times(gpu.category == MEMCPY), times(gpu.category == MEMSET)
    compute = union(kernel_compute, memset)
    working = union(compute, communication)
    return Activity(
        kernels=union(kernel_compute, communication),
        kernel_compute=kernel_compute,
        compute=compute,
        communication=communication,
        memcpy=memcpy,
        memset=memset,
        working=working,
        busy=union(working, memcpy),
    )


def span(gpu: Table) -> tuple[int, int]:
    """Return the first start and the last end in ns; (0, 0) without any work."""
    return (int(gpu.start_ns.min()), int(gpu.end_ns.max())) if gpu else (0, 0)


def split(done: Activity, span_ns: int) -> dict[str, int | float | None]:
    """Return how the time from the first start to the last end was spent."""
    busy, kernels = total_ns(done.busy), total_ns(done.kernels)
    idle = span_ns - busy
    compute, communication = total_ns(done.compute), total_ns(done.communication)
    exposed = communication - overlap_ns(done.communication, done.compute)
    exposed_memcpy = total_ns(done.memcpy) - overlap_ns(done.memcpy, done.working)
    assert compute + exposed + exposed_memcpy + idle == span_ns
    return {
        "span_ns": span_ns,
        "busy_ns": busy,
        "idle_ns": idle,
        "compute_ns": compute,
        "kernel_compute_ns": total_ns(done.kernel_compute),
        "comm_ns": communication,
        "memcpy_ns": total_ns(done.memcpy),
        "memset_ns": total_ns(done.memset),
        "exposed_comm_ns": exposed,
        "exposed_memcpy_ns": exposed_memcpy,
        "overlap_comm_compute_ns": overlap_ns(done.communication, done.kernel_compute),
        "kernel_util_span": ratio(kernels, span_ns),
        "busy_pct": 100 * busy / span_ns if span_ns else None,
        "idle_pct": 100 - 100 * busy / span_ns if span_ns else None,
    }


def ratio(part: float, whole: float) -> float | None:
    """Return ``part / whole``; None if ``whole`` is 0."""
    return float(part / whole) if whole else None


def counts(gpu: Table) -> dict[str, int | dict[str, int]]:
    """Return the numbers of kernels, memcpys and memsets, and totals of some kinds."""
    kernels = gpu.duration_ns[gpu.category == KERNEL]
    inside = np.array(["DtoD" in word for word in gpu.strings], bool)[gpu.name] & (gpu.category == MEMCPY)
    return {
        "gpu_events": len(gpu),
        "kernels": len(kernels),
        "memcpys": int(np.sum(gpu.category == MEMCPY)),
        "memsets": int(np.sum(gpu.category == MEMSET)),
        "kernel_sum_ns": int(kernels.sum()),
        "kernels_lt_10us": int(np.sum(kernels < 10_000)),
        "dtod": {
            "n": int(inside.sum()),
            "ns": int(gpu.duration_ns[inside].sum()),
            "bytes": int(np.maximum(gpu.bytes[inside], 0).sum()),
        },
    }


def per_gpu(gpu: Table, communication_mask: Array, span_ns: int) -> list[dict[str, Any]]:
    """Return for each GPU how much work it did, and how it spent the time that all GPUs have in common.

    Args:
        gpu: the GPU work.
        communication_mask: which rows are kernels that communicate.
        span_ns: the time from the first start to the last end on any GPU.
    """
    rows = []
    for device, work in group_rows(gpu_numbers(gpu)):
        own = gpu.where(work)
        parts = split(activity(own, communication_mask[work]), span_ns)
        counts = {"gpu_events": len(own), "work_ns": int(own.duration_ns.sum())}
        rows.append({"device": device, **counts, **{name: parts[name] for name in _PARTS}})
    return rows
