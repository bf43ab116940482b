"""Occupancy and SM efficiency, estimated from the grids of the kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..traces.intervals import merge_overlaps, total_ns
from ..traces.lanes import LaneAxis
from ..traces.table import KERNEL, Array, Table
from ..traces.trace import Device
from .activity import ratio

_BY_THREADS = re.compile(r"^hip(?:Ext|Hcc)ModuleLaunchKernel$")
"""Functions that take the number of threads instead of blocks; traces record that number as the grid."""


def blocks_per_sm(gpu: Table, runtime: Table, devices: Sequence[Device]) -> Array:
    """Return the blocks per multiprocessor of each kernel, as the file says or as grid / multiprocessors.

    NaN if neither is known.
    """
    sms = of_device(gpu, {device.id: device.sms for device in devices})
    known = (gpu.blocks >= 0) & (sms > 0)
    blocks = gpu.blocks.astype(float)
    if runtime:
        by_threads = (gpu.launch >= 0) & runtime.matching("name", _BY_THREADS)[gpu.launch]
        blocks = np.where(by_threads, np.ceil(blocks / np.maximum(gpu.block_threads, 1)), blocks)
    derived = np.where(known, blocks / np.maximum(sms, 1), np.nan)
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
