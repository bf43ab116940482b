"""The cost of a trace grows with its events, not with its threads, processes, streams, devices or categories."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from instrument.explain.metrics.metrics import metrics
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.launches import projection
from instrument.read.measures.summary import summarize
from instrument.read.tables.nest import NestedRanges
from instrument.read.tables.steps import StepIndex
from instrument.read.tables.table import table
from instrument.read.tables.trace import Thread, Trace

KINDS = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "kernel", "cuda_sync")
COUNT = 600


def events(lanes: int, kind: str) -> list[dict[str, Any]]:
    """Return a file with a fixed number of events on ``lanes`` of one ``kind``."""
    found: list[dict[str, Any]] = []
    for number in range(COUNT):
        lane = {"thread": 0, "process": 0, "stream": 0, "device": 0, "category": 0} | {kind: number % lanes}
        args = {"correlation": number // len(KINDS), "stream": lane["stream"], "device": lane["device"]}
        args |= {"grid": [4, 1, 1], "block": [64, 1, 1], "blocks per SM": 0.5}
        place = {"pid": lane["process"], "tid": lane["thread"], "ts": number * 10, "dur": 8, "args": args}
        found.append({"ph": "X", "cat": KINDS[number % len(KINDS)], "name": f"name{number % 7}"} | place)
        step = {"cat": "user_annotation", "name": f"ProfilerStep#{number % 9}"} if number % 100 == 0 else {}
        found.append({"ph": "X", "cat": f"category {lane['category']}", "name": "other"} | place | step)
    return found


@contextmanager
def elements_used() -> Iterator[list[int]]:
    """Count the elements of the arrays passed to numpy and to `Table.end_ns`."""
    count = [0]

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "c_call":
            count[0] += getattr(getattr(arg, "__self__", None), "size", 0)
        elif event == "call" and frame.f_code.co_name == "end_ns":
            count[0] += len(frame.f_locals["self"])
        elif event == "call" and str(frame.f_globals.get("__name__")).startswith("numpy"):
            count[0] += sum(value.size for value in frame.f_locals.values() if isinstance(value, np.ndarray))

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)


def trace(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def cost(path: Path, use: Callable[[Any], object]) -> int:
    use(read_kineto(path))  # imports and caches
    with elements_used() as count:
        use(read_kineto(path))
    return count[0]


@pytest.mark.parametrize("use", [metrics, summarize, projection])
@pytest.mark.parametrize("kind", ["thread", "process", "stream", "device", "category"])
def test_lanes(tmp_path: Path, kind: str, use: Callable[[Any], object]) -> None:
    """One lane per event needs less than twice as many elements as two lanes."""
    few, many = (cost(trace(tmp_path, events(lanes, kind)), use) for lanes in (2, COUNT))
    assert many < 2 * few, (few, many)


@pytest.mark.parametrize("apart", [1, 2**61])
def test_nests_of_threads(apart: int) -> None:
    """The ranges of each thread nest independently of others, even if times are far apart."""
    random = np.random.default_rng(0)
    for _ in range(50):
        count = int(random.integers(1, 40))
        start = np.sort(random.integers(-1, 2, count) * apart + random.integers(0, 30, count))
        end = start + random.integers(0, 12, count)
        order = np.lexsort((-end, start))
        start, end, threads = start[order], end[order], random.integers(-1, 4, count)
        times, on = random.choice([*start, *end], 60) + random.integers(-1, 2, 60), random.integers(-1, 6, 60)
        nest = NestedRanges(start, end, threads)
        parents, found = np.full(count, -1), np.full(60, -1)
        for thread in range(-1, 4):
            rows, here = np.flatnonzero(threads == thread), np.flatnonzero(on == thread)
            alone = NestedRanges(start[rows], end[rows])
            for result, at, inside in (
                (parents, rows, alone.parents),
                (found, here, alone.innermost_at(times[here])),
            ):
                result[at] = np.append(rows, -1)[inside]
        assert parents.tolist() == nest.parents.tolist()
        assert found.tolist() == nest.innermost_at(times, on).tolist()


def test_steps_of_several_processes() -> None:
    """A time without a process is in the steps of any process; the last process counts."""
    threads = [Thread(process, process) for process in range(3)]
    rows = {
        "start_ns": [0, 5, 6, 20],
        "duration_ns": [30, 4, 9, 0],
        "thread": [0, 2, 1, 2],
        "number": [0, 1, 2, 3],
    }
    steps = table("steps", {name: np.array(values) for name, values in rows.items()}, [""])
    found = StepIndex(cast(Trace, SimpleNamespace(steps=steps, threads=threads)))
    times = np.array([-1, 0, 5, 8, 9, 15, 20, 30])
    assert [-1, 0, 1, 1, 2, 0, 0, -1] == found.rows_at(times, np.full(8, -1)).tolist()
    assert [-1, -1, 1, 1, -1, -1, -1, -1] == found.rows_at(times, np.full(8, 2)).tolist()


def test_many_phases(tmp_path: Path) -> None:
    """At most a few phases of unread events are listed."""
    odd = [{"ph": f"p{number}", "name": "n", "ts": number, "pid": 1, "tid": 1} for number in range(COUNT)]
    lost = read_kineto(trace(tmp_path, [*events(2, "thread"), *odd])).lost
    assert not lost
    assert sum(lost.left_out.values()) == COUNT
    assert len(lost.left_out) < 20
    assert lost.left_out[f"events of {COUNT - 10} more phases"] == COUNT - 10
