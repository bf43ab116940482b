"""Predictions for loops that are recorded here, on a GPU, compared with the loops without the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import instrument
from instrument.explain.replay.replay import mean_ns
from tests.support.simulated_gpu import skip_if_cpus_are_busy

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


def check(out: Path, slow: Callable[[], None], fast: Callable[[], None], without: str) -> None:
    """Check that the prediction is within 10 % of the loop without the cause, and that a comparison sees it.

    Both are recorded again, at most twice, as other programs may take the CPU's time from one of them.
    """
    for attempt in range(3):
        before, after = recorded(out / f"before{attempt}", slow), recorded(out / f"after{attempt}", fast)
        guess, found = before.what_if(without=without), instrument.compare(before, after)
        assert after.replayer is not None
        assert sum(part.ns for part in found.parts) == found.delta_ns
        factor = (guess.step_ns or 0) / mean_ns(after.replayer.recorded_ns)
        if abs(factor - 1) < 0.1 and found.verdict == "faster":
            return
    skip_if_cpus_are_busy()
    assert (None, pytest.approx(1, abs=0.1), "faster") == (guess.abstained, factor, found.verdict)


def test_a_sleep(tmp_path: Path) -> None:
    """A sleep between launches is removed."""
    matmuls = kernels(50, 4096)  # the GPU bounds the loop without the sleep, and not the CPU, whose time varies

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

    check(tmp_path, with_sleep, without_sleep, without="region:sleep")


def test_synchronizations(tmp_path: Path) -> None:
    """Synchronizations after each of many short kernels are removed.

    The kernels take longer than their launch, so that the GPU bounds the loop without synchronizations.
    """
    x = torch.ones(3072, 3072, device="cuda")

    def work(*, wait: bool) -> None:
        stream = torch.cuda.current_stream()
        for _ in range(200):
            x.add(1)
            if wait:
                stream.synchronize()
        torch.cuda.synchronize()  # else the CPU runs ahead, until the queue is full

    check(tmp_path, lambda: work(wait=True), lambda: work(wait=False), without="sync")


def test_the_error_without_a_change(tmp_path: Path) -> None:
    """The replays of a loop that the GPU bounds and of one that the CPU bounds are exact."""
    for name, work in (("gpu", kernels(50, 4096)), ("cpu", kernels(200, 64))):
        guess = recorded(tmp_path / name, work).what_if()
        assert guess.self_error is not None
        if guess.self_error >= 0.02:
            skip_if_cpus_are_busy()
        assert guess.self_error < 0.02, name
