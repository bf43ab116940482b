"""The overhead of instrument, as ratios against comparable libraries: ``make bench``.

All candidates are timed in turn, round after round in one process, and the medians are compared: the machine's
speed drifts less between neighbors than between runs.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable

import nvtx
import torch
import wrapt
from measure import ROUNDS, Candidates, medians, show, verdict
from torch.profiler import ProfilerActivity, record_function

import instrument
from instrument.base.compat import profilers

RecordFunctionFast = torch._C._profiler._RecordFunctionFast


def body(a: int, b: int) -> None:
    """Do nothing, so that only the call is measured."""


def passed_on(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap with functools.wraps, as decorators are usually written."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return wrapper


@wrapt.decorator
def through_wrapt(
    wrapped: Callable[..., object], _: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Wrap with wrapt."""
    return wrapped(*args, **kwargs)


def calls() -> Candidates:
    """Return calls of `body`, each annotated in a different way."""
    by_wraps, by_wrapt, by_instrument = passed_on(body), through_wrapt(body), instrument.annotate("body")(body)
    fast = RecordFunctionFast("body")
    whole = nvtx.annotate("body")

    def in_record_function() -> None:
        with record_function("body"):
            body(1, 2)

    def in_fast() -> None:
        with fast:
            body(1, 2)

    def in_nvtx() -> None:
        with whole:
            body(1, 2)

    def in_with() -> None:
        with instrument.annotate("body"):
            body(1, 2)

    return {
        "plain call": lambda: body(1, 2),
        "functools.wraps": lambda: by_wraps(1, 2),
        "wrapt": lambda: by_wrapt(1, 2),
        "@instrument.annotate": lambda: by_instrument(1, 2),
        "with instrument.annotate": in_with,
        "with record_function": in_record_function,
        "with nvtx.annotate, made before": in_nvtx,
        "with _RecordFunctionFast, made before": in_fast,
    }


def idle() -> None:
    """Measure without a profiler: the cost of every step of a job."""
    times = medians(calls(), 2000)
    show("An annotated call, idle", times, "functools.wraps")
    plain, ours, torchs = times["plain call"], times["@instrument.annotate"], times["with record_function"]
    verdict("annotated call to functools.wraps", ours / times["functools.wraps"], 1.0)
    verdict("what annotate adds to what record_function adds", (ours - plain) / (torchs - plain), 1 / 30)


def recording() -> None:
    """Measure under torch.profiler."""
    candidates = calls()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):  # a profiler a round: its memory would grow, and time with it
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            for name, call in candidates.items():
                call()
                times[name].append(timeit.timeit(call, number=200) / 200 * 1e9)
    by_name = {name: statistics.median(values) for name, values in times.items()}
    show("An annotated call, recorded", by_name, "with record_function")
    verdict(
        "annotated call to record_function", by_name["@instrument.annotate"] / by_name["with record_function"], 0.4
    )


def interleaved(tasks: int = 1000) -> None:
    """Measure interleaved tasks, in a recording ordered as for a GPU and in one of the CPU alone."""

    async def task() -> None:
        async with instrument.annotate("request"):
            await asyncio.sleep(0)
            async with instrument.annotate("decode"):
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def step() -> None:
        await asyncio.gather(*(task() for _ in range(tasks)))

    original = profilers.needs_nested_ranges
    steps: dict[str, list[float]] = {"of the CPU": [], "as of a GPU": []}
    stops: dict[str, list[float]] = {"of the CPU": [], "as of a GPU": []}
    try:
        for _ in range(ROUNDS):
            for name in steps:
                profilers.needs_nested_ranges = lambda _, name=name: name == "as of a GPU"
                prof = torch.profiler.profile(activities=[ProfilerActivity.CPU])
                prof.start()
                steps[name].append(timeit.timeit(lambda: asyncio.run(step()), number=1) * 1e9)
                stops[name].append(timeit.timeit(prof.stop, number=1) * 1e9)
    finally:
        profilers.needs_nested_ranges = original
    for title, times in ((f"A step of {tasks:,} interleaved tasks", steps), ("The recording's stop", stops)):
        by_name = {name: statistics.median(values) for name, values in times.items()}
        show(title, by_name, "of the CPU")
        verdict("as of a GPU to of the CPU", by_name["as of a GPU"] / by_name["of the CPU"], 2)


def compiled() -> None:
    """Measure inside torch.compile."""
    x = torch.ones(4)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    annotated = instrument.annotate("plain")(lambda x: x + 1)
    one = torch.compile(plain, fullgraph=True, backend="eager")
    two = torch.compile(lambda x: annotated(x), fullgraph=True, backend="eager")
    one(x), two(x)
    times = medians({"compiled": lambda: one(x), "compiled, annotated": lambda: two(x)}, 300)
    show("A compiled call", times, "compiled")


def stepping() -> None:
    """Measure the cost for a loop outside windows."""
    plan = {"wait": 10**9, "warmup": 1, "active": 1}
    with tempfile.TemporaryDirectory() as folder:
        ours = instrument.profile(folder, schedule=instrument.schedule(**plan))
        torchs = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], schedule=torch.profiler.schedule(**plan)
        )
        with ours, torchs:
            times = medians({"instrument.profile": ours.step, "torch.profiler.profile": torchs.step}, 1000)
    show("prof.step() off-window", times, "torch.profiler.profile")
    verdict("step() to torch's", times["instrument.profile"] / times["torch.profiler.profile"], 1 / 20)


def iterating() -> None:
    """Measure the cost that `steps` adds to an iteration."""
    items = range(20_000)

    def bare() -> None:
        for _ in items:
            pass

    with tempfile.TemporaryDirectory() as folder:
        loop = instrument.steps(items, folder, wait=10**12, active=1)
        loop.profile.stop = lambda: None  # type: ignore[method-assign]  # its end is not part of an iteration

        def stepped() -> None:
            for _ in loop:
                pass

        times = medians({"for item in items": bare, "for item in instrument.steps(items)": stepped}, 1)
    each = {name: time / len(items) for name, time in times.items()}
    show("An iteration", each, "for item in items")
    first, second = each.values()
    verdict("what steps() adds to an iteration", (second - first) / 1000, 0.5, "us")


def importing() -> None:
    """Measure `import instrument` in fresh processes."""
    code = "import time; t = time.perf_counter(); import {}; print((time.perf_counter() - t) * 1e9)"
    times = {}
    for name, runs in (("instrument", 11), ("torch", 3)):
        command = [sys.executable, "-c", code.format(name)]
        values = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(runs)]
        times[name] = statistics.median(values)
    show("import", times, "torch")
    verdict("import instrument", times["instrument"] / 1e6, 15, "ms")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, medians of {ROUNDS} rounds")
    for part in (idle, recording, interleaved, compiled, stepping, iterating, importing):
        part()
