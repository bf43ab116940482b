"""Costs of instrumentation on a GPU: medians, compared within one process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

from .check import CheckContext, expect, recorded

_ROUNDS = 30
_SERIES = 3  # the least of this many medians, as other programs only add time


class _Costs:
    """Times with their ratios to another time, by default the first, and the limits of these ratios."""

    def __init__(self, context: CheckContext, rounds: int = _ROUNDS) -> None:
        self._context, self._rounds = context, 2 if context.rehearsal else rounds
        self.calls = self._rounds * _SERIES  # of each measured function
        self._too_slow: list[str] = []
        self._first = ""

    def measure(
        self, name: str, call: Callable[[], Any], at_most: float | None = None, *, of: str | None = None
    ) -> None:
        """Measure ``call`` with the work that it launches, as the least of three medians.

        Args:
            name: the name of the figure.
            call: the measured function.
            at_most: the largest ratio to the time named ``of``.
            of: the name of the time to compare with; by default the first.
        """
        took_ms = min(self._median_ms(call) for _ in range(_SERIES))
        self._context.note(f"{name} ms", took_ms)
        of = of or self._first
        if of:
            ratio = round(took_ms / float(self._context.figures[f"{of} ms"]), 3)
            expected = f'at most {at_most:g} x "{of}"' if at_most is not None else ""
            self._context.note(f"{name} ratio", ratio, expected)
            if at_most is not None and ratio > at_most:
                self._too_slow.append(f"{name} {ratio:.2f} x, expected {expected}")
        self._first = self._first or name

    def _median_ms(self, call: Callable[[], Any]) -> float:
        cuda, times = self._context.cuda, []
        for _ in range(self._rounds):
            cuda.synchronize()
            began = time.perf_counter_ns()
            call()
            cuda.synchronize()
            times.append(time.perf_counter_ns() - began)
        return median(times) / 1e6

    def verdict(self) -> None:
        """Raise `FailedError` if a ratio is above its limit; rehearsals have no limits."""
        expect(self._context.rehearsal or not self._too_slow, "; ".join(self._too_slow))


class _QuietEmitter:
    """An emitter that does nothing."""

    name = "quiet"

    def push(self, region: Any) -> None:
        """Open a range."""

    def pop(self, handle: Any) -> None:
        """Close a range."""

    start, end, mark = push, pop, push


@contextlib.contextmanager
def _attached_emitter() -> Iterator[None]:
    """Attach an emitter."""
    from instrument.record.regions.dispatch import active

    emitter = _QuietEmitter()
    active.add(emitter)
    try:
        yield
    finally:
        active.remove(emitter)


def checkpointing(context: CheckContext) -> None:
    """Recomputation in backward: plain, with module regions, with an attached emitter, and recorded.

    The blocks compute little and have three regions each, so the cost of regions shows: on a CPU a step takes
    1.4 times as long with an attached emitter. Walks over the whole graph would make backward 3.5 times as long.
    """
    import instrument

    from .network import Training

    blocks = 4 if context.rehearsal else 400
    plain = Training(context.device, blocks=blocks, width=64, recomputed=True)
    training = Training(context.device, blocks=blocks, width=64, recomputed=True)
    losses = [plain.step().item() for _ in range(3)]
    costs = _Costs(context, rounds=5)
    costs.measure("off", plain.step)
    with _record(context, "plain", costs.calls) as step:
        costs.measure("recorded without modules", lambda: (plain.step(), step()))
    with instrument.annotate_modules(training.model):
        expect([training.step().item() for _ in range(3)] == losses, "other losses with modules as regions")
        costs.measure("annotated", training.step, 1.1)
        with _attached_emitter():
            costs.measure("listening", training.step, 2.5)
        with _record(context, "modules", costs.calls) as step:
            costs.measure(
                "recorded with modules", lambda: (training.step(), step()), 2.5, of="recorded without modules"
            )
    costs.verdict()


@contextlib.contextmanager
def _record(context: CheckContext, name: str, steps: int) -> Iterator[Callable[[], None]]:
    """Record ``steps``; each ends with a call of the yielded function."""
    import instrument

    plan = instrument.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with instrument.profile(context.folder / name, schedule=plan) as prof:
        prof.step()
        yield prof.step
    recorded(context.folder / name, [1, steps])


def region(context: CheckContext) -> None:
    """A hundred regions: without a window, and in one, where they cost what torch's own ranges do."""
    from torch.profiler import record_function

    import instrument

    def many(kind: Callable[[str], Any]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(100):
                with kind("region"):
                    pass

        return call

    costs = _Costs(context)
    many(instrument.annotate)()
    costs.measure("without a window", many(instrument.annotate))
    with _record(context, "run", 1) as step:
        costs.measure("torch's ranges", many(record_function))
        costs.measure("recorded", many(instrument.annotate), 1.5, of="torch's ranges")
        step()
    costs.verdict()


def launches(context: CheckContext) -> None:
    """A loop of small kernels: plain, with an attached emitter, and after windows and a detector.

    CUPTI stays attached after the first window unless `TEARDOWN_CUPTI` is set.
    """
    import torch

    import instrument

    x = torch.ones(16, device=context.device)

    def loop() -> None:
        for _ in range(20):
            with instrument.annotate("fifty launches"):
                for _ in range(50):
                    x.add_(1)

    def window(name: str) -> None:
        with instrument.profile(context.folder / name, schedule=instrument.schedule(at="1")) as prof:
            prof.step()
            loop()
            prof.step()

    loop()
    costs = _Costs(context)
    costs.measure("before", loop)
    with _attached_emitter():
        costs.measure("listening", loop, 1.1)
    with instrument.detect_syncs():
        loop()
    costs.measure("after a detector", loop, 1.05)
    window("first")
    costs.measure("after a window", loop, 1.05)
    with mock.patch.dict(os.environ, TEARDOWN_CUPTI="1"):
        window("second")
    costs.measure("after a window with TEARDOWN_CUPTI", loop, 1.05)
    costs.verdict()


def compiled(context: CheckContext) -> None:
    """`torch.compile(mode="reduce-overhead")` across two windows: unchanged results, and the times."""
    import torch

    import instrument

    from .network import Training

    training = Training(context.device)
    options: dict[str, Any] = {"backend": "eager"} if context.rehearsal else {"mode": "reduce-overhead"}
    forward = torch.compile(training.model, **options)
    costs = _Costs(context)
    with torch.no_grad():
        for _ in range(5):
            expected = forward(training.batch).clone()
        costs.measure("before", lambda: forward(training.batch))
        with instrument.profile(context.folder / "run", schedule=instrument.schedule(at=[1, 4])) as prof:
            for _ in range(7):
                same = torch.equal(forward(training.batch), expected)
                expect(same, f"another result in step {prof.step_num}")
                prof.step()
        costs.measure("after two windows", lambda: forward(training.batch), 1.05)
    statuses = [window["status"] for window in prof.windows]
    expect(statuses == ["recorded"] * 2, f"windows: {statuses}")
    costs.verdict()
