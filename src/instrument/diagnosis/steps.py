"""How the GPU spent each step of the training loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..traces.intervals import clip, covered, length
from ..traces.table import Table
from .activity import Activity, ratio


def window(steps: Table) -> tuple[int, int] | None:
    """Return the start of the first step and the end of the last, on the CPU, in ns; None without steps."""
    return (int(steps.start_ns.min()), int(steps.end_ns.max())) if steps else None


def summary(steps: Table, done: Activity) -> dict[str, Any]:
    """Return the steps, their durations, and the share of their time at which a kernel ran (torch_tb_profiler)."""
    bounds = window(steps)
    size = bounds[1] - bounds[0] if bounds else None
    used = length(clip(done.kernels, *bounds)) if bounds else 0
    return {
        "n": len(steps),
        "names": steps.text("name"),
        "min_ns": int(steps.duration_ns.min()) if steps else None,
        "median_ns": float(np.median(steps.duration_ns)) if steps else None,
        "max_ns": int(steps.duration_ns.max()) if steps else None,
        "window_ns": size,
        "kernel_util_cpu_step_window": ratio(used, size or 0),
    }


def each(steps: Table, done: Activity) -> list[dict[str, Any]]:
    """Return for each step what the GPU did from its start to its end on the CPU, whoever launched it."""
    start, end = steps.start_ns, steps.end_ns
    compute, working, busy = (covered(times, start, end) for times in (done.compute, done.working, done.busy))
    columns = {
        "number": steps.number,
        "start_ns": start,
        "duration_ns": end - start,
        "busy_ns": busy,
        "compute_ns": compute,
        "exposed_comm_ns": working - compute,
        "exposed_memcpy_ns": busy - working,
        "idle_ns": end - start - busy,
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [
        {"name": name, **dict(zip(columns, row, strict=True))}
        for name, row in zip(steps.text("name"), values, strict=True)
    ]
