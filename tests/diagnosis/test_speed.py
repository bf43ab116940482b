"""Metrics of a large trace are fast, and their time grows linearly."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from instrument.explain.metrics.metrics import metrics
from instrument.read.tables.links import assemble
from instrument.read.tables.table import KERNEL, Array, Strings
from instrument.read.tables.trace import ReadLosses, Thread, Trace


def large_trace(launches: int) -> Trace:
    """Return a trace with a kernel, a call and two operators per launch; 100 launches per nested region."""
    strings, number = Strings(), np.arange(launches)

    def every(each: int, start: int, size: int, name: str, names: int = 50) -> dict[str, Array]:
        at = np.arange(0, launches, each)
        codes = np.array([strings[f"{name} {place}"] for place in range(names)])
        return {
            "start_ns": at * 1000 + start,
            "duration_ns": np.full(len(at), size),
            "name": codes[at // each % names],
            "thread": np.zeros(len(at), np.int32),
        }

    inner, outer = every(1, 20, 100, "aten::inner"), every(1, 10, 200, "aten::outer")
    regions = every(100, 5, 95_000, "outer"), every(100, 6, 94_000, "inner")
    columns = {
        "operators": {key: np.concatenate((inner[key], outer[key])) for key in inner},
        "regions": {key: np.concatenate([part[key] for part in regions]) for key in inner},
        "runtime": every(1, 50, 10, "cudaLaunchKernel", 1) | {"correlation": number},
        "gpu": every(1, 500, 900, "gemm")
        | {"correlation": number, "category": np.full(launches, KERNEL), "stream": number % 4},
    }
    columns["gpu"].pop("thread")
    return assemble(
        Path("made"), "kineto", columns, strings, [Thread(1, 1)], devices=[], metadata={}, lost=ReadLosses()
    )


def seconds(trace: Trace) -> float:
    times = []
    for _ in range(3):
        begin = time.process_time()
        metrics(trace)
        times.append(time.process_time() - begin)
    return min(times)


def test_time_is_linear() -> None:
    """Eight times the events take at most 16 times as long, and 800,000 events less than three seconds."""
    few, many = seconds(large_trace(25_000)), seconds(large_trace(200_000))
    assert many < 16 * max(few, 0.01)
    assert many < 3
