"""A CPU that runs ahead: the window begins at the end of the work that was launched before the recording."""

from __future__ import annotations

import pytest

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.read.jobs.read import read_file
from tests.support.shared_traces import shared

from .made_loops import GEMM, STEP, MadeLoop
from .shown import each_step, named
from .small_traces import kernel

FP32 = "ampere_sgemm_128x128_tn"


def lagging_loop(lag: int = 1500) -> MadeLoop:
    """Return a loop whose GPU first finishes earlier steps, for ``lag`` us, and then does 3 steps of 1,000 us."""
    loop = MadeLoop(busy=False)
    for number, start in enumerate(range(0, lag, 500)):
        row = kernel(FP32, 1000 * start, 1000 * (start + 500), correlation=10_000 + number)
        loop.rows["gpu"].append(row)
    for start in each_step():
        loop.work(FP32, start, start + lag, start + lag + 500).work(
            "k", start + 5, start + lag + 500, start + lag + 1000
        )
    return loop


def test_the_work_of_each_step_counts_once() -> None:
    """The work before the recording is in no number per step."""
    found = diagnose(lagging_loop().trace())
    assert found.step_ns == 1_000_000
    assert "3 steps of 1.00 ms each" in found.verdict
    assert found.parts["compute"] == 1_000_000
    fp32 = named(found)["fp32-matmuls"]
    assert fp32.evidence[0].value == 500_000
    assert fp32.win_ns is not None
    assert fp32.win_ns < 500_000


def test_work_that_starts_beside_that_before_the_recording() -> None:
    """Work of the first step that runs on another stream beside earlier work is counted."""
    loop = lagging_loop()
    for start in each_step():
        loop.work("Memcpy HtoD (Pinned -> Device)", start + 2, start + 3, start + 9, stream=8, bytes=1)
    facts = TraceFacts(loop.trace())
    assert facts.window == (1_500_000, 4_500_000)
    assert facts.recorded == (0, 4_500_000)
    assert len(facts.gpu) == 9


def test_only_work_launched_before_the_recording() -> None:
    """If no work of the steps is left, the window begins with the first step."""
    loop = MadeLoop(steps=1, busy=False)
    loop.work(GEMM, -9, 1, 2).rows["gpu"].append(kernel(GEMM, 0, 1_000_500, correlation=10_000, stream=9))
    assert TraceFacts(loop.trace()).window == (0, STEP * 1000)


@pytest.mark.parametrize(
    ("name", "step_ms"), [("tl_mi300_resnet_actckpt.json.gz", 18.84), ("tl_h100_qwen05b.json.gz", 35.18)]
)
def test_real_traces_of_a_gpu_that_lags(name: str, step_ms: float) -> None:
    """The step is as long as the time in which the GPU does the work of one step."""
    assert diagnose(shared(name)).step_ns / 1e6 == pytest.approx(step_ms, abs=0.01)


def test_copies_of_a_real_trace_of_a_gpu_that_lags() -> None:
    """Three steps of a ResNet on an MI300 launch 366 copies within the GPU."""
    facts = TraceFacts(read_file(shared("tl_mi300_resnet_actckpt.json.gz")))
    copies = named(diagnose(facts.trace))["device-copies"]
    assert "122 copies per step within the GPU" in copies.title
    assert (facts.earlier.sum(), len(facts.gpu)) == (968, 2685)
