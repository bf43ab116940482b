"""Regions of interleaved asyncio tasks, and of threads that torch does not record."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import instrument
from instrument.read.charts.flame import REGION, ranges_of
from instrument.read.measures.summary import summarize
from instrument.read.tables.steps import times_of_steps
from instrument.read.tables.trace import Trace
from instrument.show.terminal.summary import print_summary
from tests.support.torch_versions import records_all_threads

LINEAR = torch.nn.Linear(64, 64)


@instrument.annotate("worker")
def work(_: int) -> float:
    return float(LINEAR(torch.ones(8, 64)).sum().item())


@instrument.annotate("compute")
def compute() -> None:
    LINEAR(torch.ones(8, 64))


@instrument.annotate("child")
async def child() -> None:
    await asyncio.sleep(0.002)
    compute()
    await asyncio.sleep(0.002)


@instrument.annotate("task")
async def task(number: int) -> None:
    with instrument.annotate(f"before-{number}"):
        await asyncio.sleep(0.005)
    with instrument.annotate("compute"):
        LINEAR(torch.ones(8, 64))
    with instrument.annotate("children"):
        await asyncio.gather(child(), child())
    compute()


async def tasks() -> None:
    await asyncio.gather(*(task(number) for number in range(3)))


def record(out: Path, step: Callable[[], object], **options: Any) -> Trace:
    """Record one step, which calls ``step()``, after one in warm-up."""
    with instrument.profile(out, schedule=instrument.schedule(warmup=1, active=1), **options) as prof:
        for _ in range(2):
            step()
            prof.step()
    (path,) = out.glob("window-*/*")
    trace = instrument.read_trace(path)
    assert isinstance(trace, Trace)
    return trace


def paths(trace: Trace) -> Counter[str]:
    """Count the calls of each region, by its name and those around it."""
    regions = trace.regions

    def path(row: int) -> str:
        around = path(regions.parent[row]) + " > " if regions.parent[row] >= 0 else ""
        return around + trace.strings[regions.name[row]]

    return Counter(map(path, range(len(regions))))


def test_nesting_of_tasks(tmp_path: Path) -> None:
    """A region is inside the region of its own task, or of the task's creator, whatever else was open."""

    def step() -> None:
        with instrument.annotate("around"):
            asyncio.run(tasks())
        compute()

    trace = record(tmp_path, step)
    inside = "around > task"
    expected = {
        "around": 1,
        inside: 3,
        **{f"{inside} > before-{number}": 1 for number in range(3)},
        f"{inside} > compute": 6,
        f"{inside} > children": 3,
        f"{inside} > children > child": 6,
        f"{inside} > children > child > compute": 6,
        "compute": 1,
    }
    assert expected == paths(trace)
    ranges = ranges_of(trace, times_of_steps(trace))  # of the flame graph
    rows = ranges.places(REGION, trace.regions.parent)
    places = ranges.places(REGION, torch.arange(len(trace.regions)).numpy())
    assert rows.tolist() == ranges.nest.parents[places].tolist()


@pytest.mark.parametrize("all_threads", [False, True])
def test_regions_on_other_threads(tmp_path: Path, all_threads: bool) -> None:
    """The summary counts and names the regions that torch did not record; there are none if it records all."""
    options = {"experimental_config": records_all_threads()} if all_threads else {}
    with ThreadPoolExecutor(2) as pool:

        def step() -> None:
            list(pool.map(work, range(6)))
            compute()

        trace = record(tmp_path, step, **options)
    assert {"compute": 1} | ({"worker": 6} if all_threads else {}) == paths(trace)
    summary = summarize(trace)
    assert ({} if all_threads else {"worker": 6}) == summary.unrecorded
    text = io.StringIO()
    print_summary(summary, files=[], folder=tmp_path, console=Console(file=text, width=300))
    sentence = "Not in the trace: 6 calls of regions on threads that torch.profiler does not record"
    assert (f"{sentence} (worker)." in text.getvalue()) is not all_threads
