"""Step lengths on a real GPU, compared with CUDA events and wall time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import instrument
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.step_lengths import StepLengths, step_lengths

pytestmark = pytest.mark.gpu

FIRST, LAST = 2, 11  # the steps that are recorded


def recorded(folder: Path, step: Callable[[], object]) -> StepLengths:
    """Run 12 steps, record the last 10, and return their lengths."""
    schedule = instrument.schedule(wait=1, warmup=1, active=LAST - FIRST + 1, repeat=1)
    with instrument.profile(folder, schedule=schedule) as prof:
        for _ in range(LAST + 1):
            step()
            prof.step()
    (trace,) = folder.rglob("*.pt.trace.json.gz")
    lengths = step_lengths(read_kineto(trace))
    assert lengths is not None
    assert len(lengths.steps) == LAST - FIRST + 1
    return lengths


@pytest.fixture
def matmuls() -> Callable[[], None]:
    """Return eight large matmuls, which take many times as long as their launches."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    product = torch.empty_like(matrix)

    def run() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix, out=product)

    run()
    torch.cuda.synchronize()
    return run


def test_loop_that_runs_ahead(tmp_path: Path, matmuls: Callable[[], None]) -> None:
    """Without synchronization, the GPU length of steps is within 5 % of CUDA events."""
    ends: list[torch.cuda.Event] = []

    def step() -> None:
        matmuls()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()

    lengths = recorded(tmp_path, step)
    torch.cuda.synchronize()
    truth_ns = 1e6 * ends[FIRST].elapsed_time(ends[LAST]) / (LAST - FIRST)
    assert lengths.step_ns == pytest.approx(truth_ns, rel=0.05)
    for number in range(FIRST + 1, LAST + 1):
        step_ns = 1e6 * ends[number - 1].elapsed_time(ends[number])
        assert lengths.steps[number - FIRST].gpu_ns == pytest.approx(step_ns, rel=0.05)
    assert (lengths.bound, lengths.clock, lengths.runs_ahead) == ("gpu", "gpu", True)
    assert lengths.cpu_step_ns is not None
    assert lengths.cpu_step_ns < truth_ns / 2
    last = lengths.steps[-1].run_ahead_ns
    assert last is not None
    assert last > truth_ns


def test_loop_that_synchronizes(tmp_path: Path, matmuls: Callable[[], None]) -> None:
    """If each step ends with a synchronization, its length is the wall time."""
    ends: list[int] = []

    def step() -> None:
        matmuls()
        torch.cuda.synchronize()
        ends.append(time.perf_counter_ns())

    lengths = recorded(tmp_path, step)
    assert lengths.clock == "synchronizations"
    assert lengths.step_ns == pytest.approx((ends[LAST] - ends[FIRST]) / (LAST - FIRST), rel=0.05)
    assert not lengths.runs_ahead


def test_loop_bound_by_the_cpu(tmp_path: Path) -> None:
    """The GPU is idle between small kernels."""
    small = torch.zeros(8, device="cuda")

    def step() -> None:
        for _ in range(50):
            small.add_(1)
            sum(range(10_000))

    lengths = recorded(tmp_path, step)
    assert (lengths.bound, lengths.clock) == ("cpu", "cpu")
    assert lengths.totals.gpu_waits_ns > lengths.totals.gpu_ns / 2


def test_loop_that_fills_the_queue(tmp_path: Path) -> None:
    """After about 1,000 launches the queue is full, and the CPU waits for the GPU in each launch."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    product = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()

    def step() -> None:
        for _ in range(400):
            torch.mm(matrix, matrix, out=product)

    lengths = recorded(tmp_path, step)
    totals = lengths.totals
    assert (lengths.bound, totals.gpu_waits_ns) == ("gpu", pytest.approx(0, abs=0.1 * totals.gpu_ns))
    assert 0.4 * totals.cpu_ns < totals.queue_waits_ns <= totals.cpu_waits_ns
    assert lengths.steps[-1].cpu_ns == pytest.approx(lengths.gpu_step_ns, rel=0.25)
