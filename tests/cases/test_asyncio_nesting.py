"""Regions of interleaved asyncio tasks, and of threads that torch does not record."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import instrument
from instrument.traces.ranges import REGION, ranges_of, times_of_steps
from instrument.traces.trace import Trace

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


def record(out: Path, step: object) -> Path:
    """Record one step, which calls ``step()``, after one in warm-up."""
    with instrument.profile(out, schedule=instrument.schedule(warmup=1, active=1)) as prof:
        for _ in range(2):
            step()  # type: ignore[operator]
            prof.step()
    (path,) = out.glob("window-*/*")
    return path


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

    trace = instrument.read_trace(record(tmp_path, step))
    assert isinstance(trace, Trace)
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
