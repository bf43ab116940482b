"""How long the end of a window blocks the loop, beside torch's own ways to write a trace.

python benchmarks/stalls.py [EVENTS] [ROUNDS]

The candidates take turns; each figure is a median. The clock counts the CPU time of the loop's thread, as other
work on the machine adds to the wall time, which is shown beside it.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import verdict
from torch.profiler import ProfilerActivity, tensorboard_trace_handler

import instrument

EVENTS = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 3
OPERATORS = 33  # in each region; an operator is three events
TENSORBOARD, BARE = "torch, TensorBoard's handler", "torch, stop and raw export"
PROFILE, STEPS = "instrument.profile", "instrument.steps"


class Stall(NamedTuple):
    """The end of one window: seconds of CPU and of wall time, and MB of memory and of the files."""

    cpu: float
    wall: float
    rss: float
    files: float


def work() -> None:
    """Call small operators in regions, which make so many events."""
    for _ in range(EVENTS // (3 * OPERATORS + 1)):
        with instrument.annotate("region"):
            for _ in range(OPERATORS):
                torch.ones(2)


def end(step: Callable[[], object]) -> Stall:
    """Record the work as a window, which ``step`` ends."""
    work()
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return Stall(cpu, wall, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 0)


def with_torch(handler: Callable[[Any], object], out: str) -> Stall:
    """End a window of torch.profiler."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    activities = [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=handler) as prof:
        prof.step()
        return end(prof.step)


def with_profile(out: str, **options: Any) -> Stall:
    """End a window of `instrument.profile`, whose events stay readable."""
    with instrument.profile(out, schedule=instrument.schedule(at=1, warmup=1), **options) as prof:
        prof.step()
        return end(prof.step)


def with_steps(out: str, **options: Any) -> Stall:
    """End a window of `instrument.steps`; requesting the next item ends it."""
    items = iter(instrument.steps(range(4), out, at=1, warmup=1, **options))
    next(items)
    next(items)
    stall = end(functools.partial(next, items))
    list(items)
    return stall


def candidates(out: str) -> dict[str, Callable[[], Stall]]:
    """Return the ways to record a window into the folder ``out``."""
    tensorboard = tensorboard_trace_handler(out, use_gzip=True)
    bare = functools.partial(_export, Path(out, "raw.json"))
    details = {f"{STEPS}, {detail}": detail for detail in ("regions", "operators", "full")}
    return {
        TENSORBOARD: lambda: with_torch(tensorboard, out),
        BARE: lambda: with_torch(bare, out),
        PROFILE: lambda: with_profile(out),
        **{name: functools.partial(with_steps, out, detail=detail) for name, detail in details.items()},
    }


def _export(path: Path, prof: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    prof.export_chrome_trace(str(path))


def measure(folder: str) -> dict[str, Stall]:
    """Return the medians of all candidates."""
    stalls: dict[str, list[Stall]] = {}
    for number in range(ROUNDS + 1):  # the first round warms up
        for place, name in enumerate(candidates(folder)):
            out = f"{folder}/{number}-{place}"
            stall = candidates(out)[name]()
            gc.collect()  # what torch keeps of a window
            files = sum(path.stat().st_size for path in Path(out).rglob("*.json*")) / 1e6
            if number:
                stalls.setdefault(name, []).append(stall._replace(files=files))
    return {name: Stall(*map(statistics.median, zip(*seen, strict=True))) for name, seen in stalls.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    instrument.configure(summary=False)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(folder)
    print(f"\nThe end of a window of {EVENTS:,} events (with operators)")
    for name, stall in found.items():
        print(
            f"  {name:34} {stall.cpu:7.2f} s CPU, {stall.wall:7.2f} s wall, {stall.rss:7,.0f} MB resident, "
            f"{stall.files:6.1f} MB of files"
        )
    gzip, bare = found[TENSORBOARD].cpu, found[BARE].cpu
    for name in (PROFILE, f"{STEPS}, operators"):
        verdict(f"{name} to {TENSORBOARD}", found[name].cpu / gzip, 0.5)
        verdict(f"{name} to {BARE}", found[name].cpu / bare, 1.2)
    verdict(f"{STEPS}, regions to {TENSORBOARD}", found[f"{STEPS}, regions"].cpu / gzip, 0.1)
