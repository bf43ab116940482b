"""The time to win: no more than the GPU idles for it, or than it lasts on one GPU outside other work."""

from __future__ import annotations

import pytest

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.diagnosis.verdict import verdict_of
from instrument.explain.rules.trace_facts import TraceFacts

from .made_loops import GEMM, STEP, MadeLoop
from .shown import each_step, named

DTOD = "Memcpy DtoD (Device -> Device)"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
FP32 = "ampere_sgemm_128x128_tn"


def on_two_gpus(*works: tuple[str, float, float, int]) -> MadeLoop:
    """Return a loop whose steps run this work (name, start, end, stream) on two GPUs, and wait for it."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for device in (0, 1):
            for number, (name, begin, end, stream) in enumerate(works):
                at = start + 0.1 * number
                loop.work(name, at, start + begin, start + end, device=device, stream=stream, took=0.05)
        loop.call("cudaDeviceSynchronize", start + 0.5, start + 999.5)
    return loop


def test_two_gpus_do_not_win_twice() -> None:
    """Kernels that run at the same time on two GPUs win their time once, and say it once."""
    found = diagnose(on_two_gpus((FP32, 1, 999, 7)).trace())
    fp32 = named(found)["fp32-matmuls"]
    assert fp32.win_ns == pytest.approx(998_000 * (1 - 67 / 989.4), rel=0.01)
    assert fp32.evidence[0].value == 998_000
    assert "3 steps of 1.00 ms each on 2 GPUs" in found.verdict


def test_utilization_of_two_gpus() -> None:
    """The peak of two GPUs is twice that of one."""
    shapes = [[4096, 4096], [4096, 4096]]
    mfu = []
    for devices in ((0,), (0, 1)):
        loop = MadeLoop(busy=False)
        for start in each_step():
            for device in devices:
                at = start + 20 * device
                loop.operator("aten::mm", at, at + 10, shapes, ["c10::BFloat16"] * 2)
                loop.work(GEMM, at + 1, at + 2, start + 1000, device=device)
        mfu.append(diagnose(loop.trace()).goodput["mfu"])
    assert mfu[0] == pytest.approx(mfu[1], rel=0.05)


def test_copies_beside_compute_win_nothing() -> None:
    """Copies within the GPU that run while kernels compute on another stream win no time there."""
    loop = MadeLoop()
    for start in each_step():
        for at in range(start + 10, start + 990, 12):
            loop.work(DTOD, at, at + 1, at + 11, stream=8)
    assert "device-copies" not in named(diagnose(loop.trace()))


def test_communication_on_the_stream_of_compute() -> None:
    """Streams count for each GPU; the time to win is no more than the communication that nothing hides."""
    found = named(diagnose(on_two_gpus((GEMM, 1, 600, 7), (NCCL, 600, 999, 7)).trace()))["single-stream"]
    assert found.win_ns == 399_000
    apart = diagnose(on_two_gpus((GEMM, 1, 600, 7), (NCCL, 600, 999, 20)).trace())
    assert "single-stream" not in named(apart)


def test_launches_of_graphs_are_no_cost_of_memsets() -> None:
    """The launch of a CUDA graph, which runs other work too, is not won by removing its memsets."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.call("cudaGraphLaunch", start, start + 600)
        loop.rows["runtime"][-1]["correlation"] = 10_000 + start
        for at in range(start + 610, start + 990, 3):
            loop.work("Memset (Device)", at, at, at + 1)
            loop.rows["gpu"][-1]["correlation"] = 10_000 + start
    assert "memsets" not in named(diagnose(loop.trace()))


def test_gaps_between_kernels_are_not_won_on_the_cpu() -> None:
    """A GPU that pauses between kernels launched in time does not wait for the CPU."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 20):
            loop.work("k", at - 50, at + 3, at + 20)
    facts = TraceFacts(loop.trace())
    assert facts.cpu_win(facts.trace.runtime) <= facts.per_step(facts.idle.total("launch_overhead"))
    verdict = verdict_of(facts)
    assert verdict.parts["latency"] > 10 * verdict.parts["overhead"]


def test_gaps_that_a_step_waits_for() -> None:
    """Pauses between kernels are the first finding where the CPU waits for the GPU, not where it is as slow."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for number in range(49):
            at = start + 3 + 20 * number
            loop.work("k", start + 2 * number, at + 3, at + 20)
        loop.call("cudaDeviceSynchronize", start + 100, start + 985)
    found = diagnose(loop.trace())
    assert found.findings[0].rule == "launch-latency"
    assert found.waits is not None
    assert found.waits.wins["overhead"] < 0.1 * found.step_ns


def test_few_long_gaps_are_no_cost_of_launches() -> None:
    """A GPU that idles in one long gap is not helped by CUDA graphs."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.rows["regions"][start // STEP] |= {"start_ns": 9000 * start, "duration_ns": 9_000_000}
        loop.work(GEMM, 9 * start + 8000, 9 * start + 8001, 9 * start + 9000)
    diagnosis = diagnose(loop.trace())
    assert "is waiting for the CPU, mostly between operators (Python or other code)" in diagnosis.verdict
    found = named(diagnosis)["launch-overhead"]
    assert "in 3 gaps of over 1 ms in which the CPU launches nothing" in found.title
    assert found.fix is not None
    assert "reduce-overhead" not in found.fix.after


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("call", "cudaDeviceGetAttribute", "the CPU to launch work"),
        ("region", "_compile.compile_inner (dynamo_timed)", "torch.compile to compile"),
        ("region", "gc.collect", "Python to collect garbage"),
        ("call", "cudaMalloc", "the driver to allocate or free memory"),
        ("call", "cuModuleLoadData", "the driver to load the code of kernels"),
    ],
)
def test_the_verdict_names_the_overhead(kind: str, name: str, text: str) -> None:
    """Of the kinds of overhead, the verdict says the longest."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        getattr(loop, kind)(name, start, start + 600).work(GEMM, start + 601, start + 602, start + 999)
    found = diagnose(loop.trace())
    assert found.bound == "overhead"
    assert f"is waiting for {text} (" in found.verdict


def test_copies_of_an_operator_are_not_in_its_roofline() -> None:
    """A copy from the CPU under `aten::copy_` says nothing of the GPU's memory."""
    loop = MadeLoop(steps=1, busy=False)
    for at, name in ((0, "Memcpy HtoD (Pinned -> Device)"), (500, "void at::native::copy_kernel<float>")):
        loop.operator("aten::copy_", at, at + 9, [[1 << 20], [1 << 20], []], ["float", "float", "Scalar"])
        loop.work(name, at + 1, at + 2, at + 400)
    (row,) = diagnose(loop.trace()).roofline.rows
    assert (row.calls, row.gpu_ns) == (1, 398_000)


@pytest.mark.parametrize(
    ("name", "stream", "text"),
    [
        ("Memcpy HtoD (Pageable -> Device)", 7, "Copy from pinned memory"),
        ("Memcpy HtoD (Pinned -> Device)", 7, "Copy on a separate stream"),
        ("Memcpy HtoD (Pinned -> Device)", 8, "The copies already use pinned memory and a separate stream"),
        ("Memcpy DtoH (Device -> Pageable)", 7, "Keep results on the GPU"),
    ],
)
def test_fix_of_exposed_copies(name: str, stream: int, text: str) -> None:
    """The fix follows from the memory and the stream of the copies."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(name, start, start + 1, start + 400, stream=stream, bytes=1 << 20)
        loop.work(GEMM, start + 2, start + 400, start + 999)
    fix = named(diagnose(loop.trace()))["exposed-copies"].fix
    assert fix is not None
    assert fix.text.startswith(text)


def test_copies_that_nothing_can_hide() -> None:
    """Copies that take longer than all kernels are not helped by a stream of their own."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("Memcpy HtoD (Pinned -> Device)", start, start + 1, start + 900, bytes=1 << 30)
        loop.work(GEMM, start + 2, start + 900, start + 999)
    fix = named(diagnose(loop.trace()))["exposed-copies"].fix
    assert fix is not None
    assert fix.text.startswith("The copies take longer than all kernels")


@pytest.mark.parametrize(
    ("kernel", "bound"),
    [
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "memory"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x256x1", "compute"),
        ("aiter_fused_moe_kernel_bf16", None),
        ("void gemv2T_kernel_val<int, int, float>()", "memory"),
        ("void at::native::vectorized_elementwise_kernel<4, add>()", "memory"),
    ],
)
def test_what_limits_a_kernel_without_shapes(kernel: str, bound: str | None) -> None:
    """Without shapes a matmul counts by its tile; without a tile it is not known what limits it."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(kernel, start, start + 10, start + 990).call("cudaDeviceSynchronize", start + 20, start + 995)
    assert diagnose(loop.trace()).bound == bound


def test_the_start_of_the_driver() -> None:
    """A launch of seconds is the start of the driver, not a cost of launches or of memory."""
    loop = MadeLoop(steps=0, busy=False)
    loop.work("k", -10, -9, 0).work("k", 1, 4_000_000, 4_000_010, took=4_000_000)
    loop.call("cudaFree", 4_000_020, 6_000_020).work("k", 6_000_030, 6_000_031, 6_000_040)
    found = diagnose(loop.trace())
    assert found.findings[0].rule == "initialization"
    assert "in the window" not in found.findings[0].title
    assert not {"launch-overhead", "driver-allocation"} & {*named(found)}
    assert found.bound == "overhead"
    assert "100 % is waiting for a driver call of over 100 ms, as when the driver starts (" in found.verdict


def test_titles_without_steps() -> None:
    """Without steps, nothing is said per step."""
    loop = MadeLoop(steps=0, busy=False)
    loop.work(GEMM, 0, 1, 500).work(NCCL, 2, 500, 900)
    found = diagnose(loop.trace())
    assert found.findings
    for text in (str(found), found.to_markdown()):
        assert "per step" not in " ".join(text.split())
