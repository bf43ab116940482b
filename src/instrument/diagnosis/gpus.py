"""How each of several GPUs spent the time from the first start to the last end of GPU work."""

from __future__ import annotations

from typing import Any

from ..traces.gpus import gpu_numbers
from ..traces.lanes import group_rows
from ..traces.table import Array, Table
from .activity import activity, split

_PARTS = ("busy_ns", "idle_ns", "compute_ns", "exposed_comm_ns", "exposed_memcpy_ns")


def per_gpu(gpu: Table, communication_mask: Array, span_ns: int) -> list[dict[str, Any]]:
    """Return for each GPU how much it did, and the parts of the time that all of them have in common.

    Args:
        gpu: the work on the GPUs.
        communication_mask: which rows are kernels that communicate.
        span_ns: from the first start to the last end on any of them.
    """
    rows = []
    for device, work in group_rows(gpu_numbers(gpu)):
        own = gpu.where(work)
        parts = split(activity(own, communication_mask[work]), span_ns)
        counts = {"gpu_events": len(own), "work_ns": int(own.duration_ns.sum())}
        rows.append({"device": device, **counts, **{name: parts[name] for name in _PARTS}})
    return rows
