"""How busy the GPUs are: their time by kind of work, and the occupancy and SM efficiency of their kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...read.tables.intervals import Intervals, merge_overlaps, overlap_ns, total_ns, union
from ...read.tables.lanes import LaneAxis, group_rows
from ...read.tables.table import KERNEL, MEMCPY, MEMSET, Array, Table
from ...read.tables.trace import Device
from ...read.tables.work_classes import gpu_numbers

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


_BY_THREADS = re.compile(r"^hip(?:Ext|Hcc)ModuleLaunchKernel$")
"""Functions that take the number of threads instead of blocks; traces record that number as the grid."""


def blocks_per_sm(gpu: Table, runtime: Table, devices: Sequence[Device]) -> Array:
    """Return the blocks per multiprocessor of each kernel, as the file says or as grid / multiprocessors.

    NaN if neither is known.
    """
    sms = of_device(gpu, {device.id: device.sms for device in devices})
    computable = (gpu.blocks >= 0) & (sms > 0)
    blocks = gpu.blocks.astype(float)
    if runtime:
        by_threads = (gpu.launch >= 0) & runtime.matching("name", _BY_THREADS)[gpu.launch]
        blocks = np.where(by_threads, np.ceil(blocks / np.maximum(gpu.block_threads, 1)), blocks)
    derived = np.where(computable, blocks / np.maximum(sms, 1), np.nan)
    return np.where(np.isnan(gpu.blocks_per_sm), derived, gpu.blocks_per_sm)


def of_device(gpu: Table, values: Mapping[int, int]) -> Array:
    """Return the value of the device of each row; 0 if it is not known.

    ROCm numbers CPUs and GPUs together in its records of work, but lists only the GPUs: if all listed devices
    have the same value, the other devices get it as well.
    """
    distinct = set(values.values())
    result = np.full(len(gpu), distinct.pop() if len(distinct) == 1 else 0)
    devices = np.array(sorted(values), np.int64)
    at = np.minimum(np.searchsorted(devices, gpu.device), len(devices) - 1)
    listed = devices[at] == gpu.device if len(devices) else np.zeros(len(gpu), bool)
    result[listed] = np.array([values[device] for device in devices.tolist()], np.int64)[at[listed]]
    return result


def sm_efficiency(gpu: Table, blocks: Array, span_ns: int) -> dict[str, float | None]:
    """Return the share of multiprocessors in use, over the span and over the time during which kernels ran.

    The estimate of torch_tb_profiler: the integral over time of min(1, blocks per multiprocessor of all running
    kernels), as the mean over the devices that ran kernels.
    """
    rows = np.flatnonzero((gpu.category == KERNEL) & (blocks > 0))
    device, which = np.unique(gpu.device[rows], return_inverse=True)
    start, end = gpu.start_ns[rows], gpu.end_ns[rows]
    used = sum(_integrals(which, len(device), start, end, blocks[rows]))
    lanes = LaneAxis(len(device), start, end)
    ran = total_ns(merge_overlaps(lanes.positions(which, start), lanes.positions(which, end)))
    return {"sm_eff_span": ratio(used, len(device) * span_ns), "sm_eff_kernel_time": ratio(used, ran)}


def _integrals(device: Array, count: int, start_ns: Array, end_ns: Array, blocks: Array) -> Iterator[float]:
    """Yield the integral of min(1, blocks of all running kernels) in ns for each device, in exact fixed point."""
    kernels = np.bincount(device, minlength=count)
    one = np.exp2(61 - np.frexp(kernels)[1])[device]
    level = (np.minimum(blocks, 1.0) * one).astype(np.int64)
    times, device = np.concatenate((start_ns, end_ns)), np.concatenate((device, device))
    order = np.lexsort((times, device))
    levels = np.cumsum(np.concatenate((level, -level))[order]) / np.concatenate((one, one))[order]
    parts = np.minimum(levels[:-1], 1.0) * np.diff(times[order])
    ends = 2 * np.cumsum(kernels)
    for first, last in zip((ends - 2 * kernels).tolist(), ends.tolist(), strict=True):
        yield float(np.sum(parts[first : last - 1]))


def occupancy(gpu: Table, blocks: Array, threads: Array) -> dict[str, float | int | None]:
    """Return the occupancy of kernels in percent, weighted by duration.

    ``occ_*`` are the estimates in the file: min(blocks that fit, blocks of the kernel) * threads per block /
    threads that a multiprocessor holds. How many blocks fit depends on registers and shared memory; files from AMD
    GPUs lack these estimates. ``occ_limit_weighted`` assumes that all blocks fit, and so is an upper bound.
    """
    kernels = gpu.category == KERNEL
    has = kernels & ~np.isnan(gpu.occupancy_percent)
    percent, duration = gpu.occupancy_percent[has], gpu.duration_ns[has]
    some = percent > 0
    sized = kernels & ~np.isnan(blocks) & (gpu.block_threads > 0) & (threads > 0)
    limit = np.minimum(blocks[sized] * gpu.block_threads[sized] / threads[sized], 1) * 100
    return {
        "occ_weighted": _mean(percent, duration),
        "occ_weighted_nonzero": _mean(percent[some], duration[some]),
        "occ_zero_kernels": int(np.sum(~some)) if has.any() else None,
        "occ_limit_weighted": _mean(limit, gpu.duration_ns[sized]),
    }


def _mean(values: Array, weights: Array) -> float | None:
    return ratio(float(np.sum(values * weights)), int(weights.sum()))
