"""What instrumentation costs on a GPU: medians, compared within one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from .check import Figures, Given, expect

_ROUNDS = 30


def _median_ms(given: Given, call: Callable[[], Any], rounds: int = _ROUNDS) -> float:
    """Return the median time of ``call`` and the work that it launches."""
    times = []
    for _ in range(2 if given.rehearsal else rounds):
        given.cuda.synchronize()
        began = time.perf_counter_ns()
        call()
        given.cuda.synchronize()
        times.append(time.perf_counter_ns() - began)
    return round(median(times) / 1e6, 3)


def checkpointing(given: Given) -> Figures:
    """Backward with recomputation: without regions, with modules that nobody listens to, and recorded."""
    import instrument

    from .network import Training

    training = Training(given.device, blocks=4 if given.rehearsal else 400, width=64, recomputed=True)
    plain = Training(given.device, blocks=4 if given.rehearsal else 400, width=64, recomputed=True)
    losses = [plain.step().item() for _ in range(3)]
    figures: Figures = {"off_ms": _median_ms(given, plain.step, 10)}
    with instrument.annotate_modules(training.model):
        expect([training.step().item() for _ in range(3)] == losses, "other losses with modules as regions")
        figures["annotated_ms"] = _median_ms(given, training.step, 10)
        with instrument.profile(
            given.folder / "run", schedule=instrument.schedule(wait=0, warmup=1, active=100)
        ) as prof:
            prof.step()
            figures["recorded_ms"] = _median_ms(given, lambda: (training.step(), prof.step()), 10)
    figures["ratio"] = round(figures["recorded_ms"] / figures["off_ms"], 2)
    return figures


def launches(given: Given) -> Figures:
    """A loop of small kernels before and after a window, and after a detector."""
    import torch

    import instrument

    x = torch.ones(16, device=given.device)

    def loop() -> None:
        for _ in range(1000):
            x.add_(1)

    loop()
    figures: Figures = {"before_ms": _median_ms(given, loop)}
    with instrument.profile(given.folder / "run", schedule=instrument.schedule(at="1")) as prof:
        prof.step()
        loop()
        prof.step()
    figures["after_window_ms"] = _median_ms(given, loop)
    with instrument.detect_syncs():
        loop()
    figures["after_detector_ms"] = _median_ms(given, loop)
    return figures


def compiled(given: Given) -> Figures:
    """`torch.compile(mode="reduce-overhead")` across two windows: the same numbers; the times."""
    import torch

    import instrument

    from .network import Training

    training = Training(given.device)
    options: dict[str, Any] = {"backend": "eager"} if given.rehearsal else {"mode": "reduce-overhead"}
    forward = torch.compile(training.model, **options)
    with torch.no_grad():
        for _ in range(5):
            expected = forward(training.batch).clone()

        def call() -> None:
            forward(training.batch)

        figures: Figures = {"before_ms": _median_ms(given, call)}
        with instrument.profile(given.folder / "run", schedule=instrument.schedule(at=[1, 4])) as prof:
            for _ in range(7):
                same = torch.equal(forward(training.batch), expected)
                expect(same, f"another result in step {prof.step_num}")
                prof.step()
        figures["after_ms"] = _median_ms(given, call)
    statuses = [window["status"] for window in prof.windows]
    expect(statuses == ["recorded"] * 2, f"windows: {statuses}")
    return figures
