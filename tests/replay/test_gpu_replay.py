"""Predictions for loops that are recorded here, on a GPU, compared with the loops without the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import instrument
from instrument.replay.replayer import mean_ns

pytestmark = pytest.mark.gpu


def recorded(out: Path, work: Callable[[], None]) -> instrument.Diagnosis:
    """Return the diagnosis of ten recorded steps that call ``work``."""
    for _ in instrument.steps(range(16), out, wait=3, warmup=1, active=10):
        work()
    return instrument.diagnose(out)


def kernels(count: int, size: int = 2048) -> Callable[[], None]:
    x = torch.ones(size, size, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(count):
            x @ x

    return work


def check(before: instrument.Diagnosis, after: instrument.Diagnosis, **change: object) -> None:
    """Check that the prediction is within 10 % of the loop without the cause, and that a comparison sees it."""
    guess = before.what_if(**change)  # type: ignore[arg-type]
    assert guess.abstained is None
    assert after.replayer is not None
    assert guess.step_ns is not None
    assert abs(guess.step_ns / mean_ns(after.replayer.recorded_ns) - 1) < 0.1
    found = instrument.compare(before, after)
    assert found.verdict == "faster"
    assert sum(part.ns for part in found.parts) == found.delta_ns


def test_a_sleep(tmp_path: Path) -> None:
    """A sleep between launches is removed."""
    matmuls = kernels(50)

    def with_sleep() -> None:
        matmuls()
        with instrument.annotate("sleep"):
            time.sleep(0.02)
        matmuls()
        torch.cuda.synchronize()

    def without_sleep() -> None:
        matmuls()
        matmuls()
        torch.cuda.synchronize()

    before, after = recorded(tmp_path / "before", with_sleep), recorded(tmp_path / "after", without_sleep)
    check(before, after, without=["region:sleep"])


def test_synchronizations(tmp_path: Path) -> None:
    """Synchronizations after each of many short kernels are removed."""
    x = torch.ones(512, 512, device="cuda")

    def work(*, wait: bool) -> None:
        for _ in range(200):
            x.add(1)
            if wait:
                torch.cuda.current_stream().synchronize()

    before = recorded(tmp_path / "before", lambda: work(wait=True))
    check(before, recorded(tmp_path / "after", lambda: work(wait=False)), without=["sync"])


def test_the_error_without_a_change(tmp_path: Path) -> None:
    """The replays of a loop that the GPU bounds and of one that the CPU bounds are exact."""
    for name, work in (("gpu", kernels(50, 4096)), ("cpu", kernels(200, 64))):
        guess = recorded(tmp_path / name, work).what_if()
        assert guess.self_error is not None
        assert guess.self_error < 0.02, name
