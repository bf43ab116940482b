"""Launches: their delay, their cost on the CPU and the length of the queue; and calls that synchronize."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..traces.intervals import merge_overlaps, total_ns
from ..traces.table import KERNEL, Array, Table
from .activity import ratio

_SYNC = re.compile("Synchronize")


def delays(gpu: Table, runtime: Table) -> dict[str, int | None]:
    """Return the time from the start of the launching call to the start of the kernel."""
    kernels = gpu.category == KERNEL
    matched = kernels & (gpu.launch >= 0)
    waits = np.sort(gpu.start_ns[matched] - runtime.start_ns[gpu.launch[matched]])
    count = len(waits)
    return {
        "median": int(waits[count // 2]) if count else None,
        "p95": int(waits[int(count * 0.95)]) if count else None,
        "matched": count,
        "unmatched": int(kernels.sum()) - count,
    }


def calls(gpu: Table, runtime: Table) -> dict[str, Any]:
    """Return the number and the durations of the calls that launched work."""
    launching = np.zeros(len(runtime), bool)
    launching[gpu.launch[gpu.launch >= 0]] = True
    durations = np.sort(runtime.duration_ns[launching])
    count = len(durations)
    return {
        "n": count,
        "sum": int(durations.sum()),
        "median": int(durations[count // 2]) if count else None,
        "max": int(durations[-1]) if count else None,
    }


def queue(gpu: Table, launched_ns: Array) -> dict[str, float | int | None]:
    """Return how much work was launched and not yet finished: the maximum, and the mean over time."""
    rows = (gpu.launch >= 0) & (launched_ns <= gpu.end_ns)
    begin, end = np.sort(launched_ns[rows]), np.sort(gpu.end_ns[rows])
    if not len(begin):
        return {"max": None, "mean": None}
    waiting = np.arange(1, len(begin) + 1) - np.searchsorted(end, begin, "right")
    return {"max": int(waiting.max()), "mean": ratio(int(np.sum(end - begin)), int(end[-1]) - int(begin[0]))}


def syncs(runtime: Table) -> dict[str, int]:
    """Return the number of calls that synchronize, and the time during which any thread was in one."""
    rows = runtime.matching("name", _SYNC)
    waited = merge_overlaps(runtime.start_ns[rows], runtime.end_ns[rows])
    return {"sync_calls": int(rows.sum()), "sync_union_ns": total_ns(waited)}
