"""Divides the time of the steps by what the thread of the loop does on the CPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..traces.intervals import Intervals, clip, merge_overlaps, total_ns, union
from ..traces.main_threads import main_thread
from ..traces.table import Table
from ..traces.trace import Trace
from .idle_causes import input_ranges, named_ranges

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

    What a DataLoader runs in the thread of the loop is input, and what runs inside a collective communication.
    """
    main = main_thread(trace)
    operators = trace.operators.where((trace.operators.parent < 0) & (trace.operators.thread == main))
    collectives = [found.where(found.thread == main) for found in named_ranges(trace, _COLLECTIVE)]
    layers = {"input": input_ranges(trace), "communication": collectives, "compute": [operators]}
    parts, covered, known_ns = dict.fromkeys(CPU_PARTS, 0), _times([], window), 0
    for name, tables in layers.items():
        covered = union(covered, _times(tables, window))
        parts[name] = total_ns(covered) - known_ns
        known_ns += parts[name]
    parts["overhead"] = window[1] - window[0] - known_ns
    return parts


def _times(tables: list[Table], window: tuple[int, int]) -> Intervals:
    starts, ends = (
        np.concatenate([np.empty(0, np.int64), *(getattr(table, name) for table in tables)])
        for name in ("start_ns", "end_ns")
    )
    return clip(merge_overlaps(starts, ends), *window)


def numbers(trace: Trace, window: tuple[int, int] | None) -> dict[str, Any]:
    """Return `cpu_parts` of the steps, or of the whole trace, as metrics."""
    parts = dict.fromkeys(CPU_PARTS, 0) if window is None else cpu_parts(trace, window)
    return {
        "cpu_ns": 0 if window is None else window[1] - window[0],
        "cpu_operators_ns": parts["compute"],
        "cpu_input_ns": parts["input"],
        "cpu_comm_ns": parts["communication"],
        "cpu_other_ns": parts["overhead"],
    }
