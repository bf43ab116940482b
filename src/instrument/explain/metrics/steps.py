"""Metrics of the steps: what the GPU does in each, how long they take, and what the loop does on the CPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...read.measures.step_lengths import StepLengths
from ...read.tables.intervals import clip, covered_ns, total_ns, union
from ...read.tables.steps import main_thread
from ...read.tables.table import Table
from ...read.tables.trace import Trace
from .idle import input_ranges, named_ranges, times_of
from .utilization import Activity, ratio


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


def gpu_ends(lengths: StepLengths | None) -> list[int]:
    """Return the last end of the GPU work of each step that has any, in ns."""
    return [step.gpu_last_ns for step in lengths.steps if step.gpu_last_ns is not None] if lengths else []


CPU_PARTS = {
    "compute": "operators run in the thread of the loop",
    "communication": "the loop runs or waits for a collective",
    "input": "the loop waits for its next batch",
    "overhead": "the loop runs no operator: Python, and libraries without operators of torch",
}
"""The parts of the time of a program without a GPU, which add up to it exactly."""

_COLLECTIVE = re.compile(r"^(?:c10d|gloo|mpi|ucc)[:_]")


def cpu_parts(trace: Trace, window: tuple[int, int]) -> dict[str, int]:
    """Return the time of each of `CPU_PARTS` in a window of the trace, in ns.

    What a DataLoader runs in the thread of the loop is input, and what runs inside a collective communication. The
    loop waits for a collective of another thread, as those of gloo, while it runs no operator.
    """
    main = main_thread(trace)
    operators = trace.operators.where((trace.operators.parent < 0) & (trace.operators.thread == main))
    collectives = named_ranges(trace, _COLLECTIVE)
    layers = (
        ("input", input_ranges(trace)),
        ("communication", [each.where(each.thread == main) for each in collectives]),
        ("compute", [operators]),
        ("communication", collectives),  # those of gloo run in threads of their own
    )
    parts, covered, known_ns = dict.fromkeys(CPU_PARTS, 0), times_of([]), 0
    for name, tables in layers:
        covered = union(covered, clip(times_of(tables), *window))
        parts[name] += total_ns(covered) - known_ns
        known_ns = total_ns(covered)
    parts["overhead"] = window[1] - window[0] - known_ns
    return parts


def cpu_numbers(trace: Trace, window: tuple[int, int] | None) -> dict[str, Any]:
    """Return `cpu_parts` of the steps, or of the whole trace, as metrics."""
    parts = dict.fromkeys(CPU_PARTS, 0) if window is None else cpu_parts(trace, window)
    return {
        "cpu_ns": 0 if window is None else window[1] - window[0],
        "cpu_operators_ns": parts["compute"],
        "cpu_input_ns": parts["input"],
        "cpu_comm_ns": parts["communication"],
        "cpu_other_ns": parts["overhead"],
    }
