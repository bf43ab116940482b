"""Metrics of the steps: what the GPU did in each, how long they took on it, and what bounds the loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..traces.intervals import clip, covered_ns, total_ns
from ..traces.step_lengths import StepLengths
from ..traces.table import Table
from .activity import Activity, ratio


def window(steps: Table) -> tuple[int, int] | None:
    """Return the start of the first step and the end of the last on the CPU, in ns; None without steps."""
    return (int(steps.start_ns.min()), int(steps.end_ns.max())) if steps else None


def summary(steps: Table, done: Activity) -> dict[str, Any]:
    """Return the durations of the steps, and the share of their time during which a kernel ran."""
    bounds = window(steps)
    size = bounds[1] - bounds[0] if bounds else None
    used = total_ns(clip(done.kernels, *bounds)) if bounds else 0
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
    """Return for each step what the GPU did between its start and end on the CPU, whichever step launched it."""
    start, end = steps.start_ns, steps.end_ns
    compute, working, busy = (covered_ns(times, start, end) for times in (done.compute, done.working, done.busy))
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


def lengths_of(steps: Table, lengths: StepLengths | None) -> list[dict[str, Any]]:
    """Return for each step its length on the CPU, and the times of the GPU work that it launched."""
    rows = zip(steps.text("name"), steps.number.tolist(), lengths.steps if lengths else (), strict=False)
    return [{"name": name, "number": number, **step._asdict()} for name, number, step in rows]


def loop(lengths: StepLengths | None) -> dict[str, Any] | None:
    """Return what bounds the loop, how long its steps take by each clock, and how far the CPU ran ahead.

    None for a trace without steps or without GPU work.
    """
    if lengths is None:
        return None
    totals, ahead = lengths.totals, lengths.run_ahead_ns
    return {
        "bound": lengths.bound,
        "unknown": lengths.unknown or None,
        "step_ns": lengths.step_ns,
        "clock": lengths.clock,
        "steps": totals.steps,
        "gpu_step_ns": lengths.gpu_step_ns,
        "cpu_step_ns": lengths.cpu_step_ns,
        "synchronized_step_ns": lengths.synchronized_step_ns,
        "synchronized_steps": totals.synchronized_steps,
        "gpu_waits_share": ratio(totals.gpu_waits_ns, totals.gpu_ns),
        "cpu_waits_share": ratio(totals.cpu_waits_ns, totals.cpu_ns),
        "queue_waits_share": ratio(totals.queue_waits_ns, totals.cpu_ns),
        "exposed_comm_share": ratio(totals.exposed_comm_ns, totals.gpu_ns),
        "run_ahead_ns": {"median": ahead[0], "max": ahead[1]} if ahead else None,
    }


def pace_window(lengths: StepLengths | None) -> tuple[int, int] | None:
    """Return the last end of the GPU work of the first step and of all steps, in ns; None without a period."""
    ends = [step.gpu_last_ns for step in lengths.steps if step.gpu_last_ns is not None] if lengths else []
    return (ends[0], max(ends)) if lengths and lengths.totals.gpu_ns else None


def lengths_window(steps: Table, lengths: StepLengths | None) -> tuple[int, int] | None:
    """Return the start of the first step, and the end of the last step or of the steps' GPU work, in ns."""
    if (bounds := window(steps)) is None:
        return None
    ends = [step.gpu_last_ns for step in lengths.steps if step.gpu_last_ns is not None] if lengths else []
    return bounds[0], max([bounds[1], *ends])
