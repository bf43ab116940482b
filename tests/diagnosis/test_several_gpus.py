"""Of several GPUs, numbers are means over them, counts and bytes as well as times."""

from __future__ import annotations

import re

from instrument.explain.diagnosis.diagnose import diagnose
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop
from .shown import each_step, named

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def test_counts_are_per_gpu() -> None:
    """A kernel that each of two GPUs runs once in a step has one call, and its time is that of one call."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for device in (0, 1):
            loop.work(GEMM, start, start + 1, start + 801, device=device)
            loop.work("k", start + 2, start + 801, start + 999, device=device)
    found = named(diagnose(loop.trace()))["dominant-kernel"]
    assert found.title.endswith(", 1 call per step and GPU")
    values = {each.name: each.value for each in found.evidence}
    assert values["gpu_ns"] == 800_000
    assert found.evidence[1].definition.endswith("Mean over the GPUs.")


def test_bytes_are_per_gpu() -> None:
    """The bytes beside the time of one GPU are those of one GPU."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for device in (0, 1):
            copy = {"stream": 7, "device": device, "bytes": 1_000_000}
            loop.work("Memcpy HtoD (Pinned -> Device)", start, start + 1, start + 501, **copy)
            loop.work(GEMM, start + 2, start + 501, start + 999, device=device)
    values = {each.name: each.value for each in named(diagnose(loop.trace()))["exposed-copies"].evidence}
    assert (values["copies_per_step"], values["bytes_per_step"]) == (1, 1_000_000)


def test_the_gpu_that_communicates_on_one_stream() -> None:
    """The GPU is named whose communication is on the stream of compute."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for device, took in ((0, 100), (1, 399)):
            loop.work(GEMM, start, start + 41, start + 640, device=device)
            loop.work(NCCL, start + 2, start + 641, start + 641 + took, device=device)
    found = named(diagnose(loop.trace()))["single-stream"]
    assert found.title == "Communication of 399 us per step runs on the stream of compute of GPU 1"


def test_communication_beside_a_chain_of_the_cpu_that_is_as_long() -> None:
    """Shorter communication alone would win nothing now, so it is hidden, and named all the same."""
    loop = MadeLoop(busy=True)
    for start in each_step():
        loop.work(GEMM, start, start + 41, start + 640)
        loop.work(NCCL, start + 2, start + 641, start + 1000)
    found = diagnose(loop.trace())
    listed = {each.rule: each for each in (*found.findings, *found.hidden)}
    assert "single-stream" in listed


def test_counts_of_two_real_gpus() -> None:
    """Two H100 run 68 calls of flash attention, of which two were launched before the recording."""
    found = diagnose(shared("nsys/mfu_2gpu_before.sqlite"), thresholds={"dominant-kernel": {"share": 0.4}})
    title = named(found)["dominant-kernel"].title
    assert re.search(r"flash_fwd_kernel<bf16>, 33 calls per GPU in the window", title)
