"""Every rule fires on a trace that shows what it finds, made here or recorded, and on no healthy one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from instrument.diagnosis.diagnose import Diagnosis, diagnose
from instrument.diagnosis.rule import RULES
from instrument.findings import Finding
from instrument.traces.read import read_file
from instrument.traces.trace import Device
from tests.support.shared_traces import shared

from .made_loops import GEMM, STEP, MadeLoop

Made = Callable[[], MadeLoop]
SHOWN: dict[str, Made] = {}
BF16 = "c10::BFloat16"


def shows(rule: str) -> Callable[[Made], Made]:
    """Register a made loop on which ``rule`` fires."""

    def register(function: Made) -> Made:
        SHOWN[rule] = function
        return function

    return register


def each_step(steps: int = 3) -> range:
    """Return the starts of the steps."""
    return range(0, steps * STEP, STEP)


@shows("input-wait")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, start + 400)
        loop.work(GEMM, start + 400, start + 401, start + 999)
    return loop


@shows("launch-overhead")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 20):
            loop.work("k", at, at + 2, at + 7)
    return loop


@shows("long-synchronization")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 500)
        loop.operator("aten::item", start + 5, start + 520)
        loop.call("cudaStreamSynchronize", start + 10, start + 500)
        loop.work(GEMM, start + 700, start + 701, start + 999)
    return loop


@shows("cold-first-step")
def _() -> MadeLoop:
    loop = MadeLoop(steps=4)
    loop.rows["regions"][0]["start_ns"] -= 900_000
    loop.rows["regions"][0]["duration_ns"] += 900_000
    return loop.work(GEMM, -900, -899, 0)


@shows("slow-region-start")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("loss", start + 1, start + 990)
        loop.operator("aten::mm", start + 400, start + 410)
        loop.work(GEMM, start + 405, start + 406, start + 989)
    return loop


@shows("occupancy-queries")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 20):
            loop.call("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", at, at + 4)
            loop.work("k", at + 5, at + 6, at + 10)
    return loop


@shows("garbage-collection")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("gc.collect", start, start + 300).work(GEMM, start + 301, start + 302, start + 999)
    return loop


@shows("driver-allocation")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.call("cudaMalloc", start, start + 300).work(GEMM, start + 301, start + 302, start + 999)
    return loop


@shows("module-loading")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.call("cuModuleLoadData", start, start + 300).work(GEMM, start + 301, start + 302, start + 999)
    return loop


@shows("compilation")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("_compile.compile_inner (dynamo_timed)", start, start + 300)
        loop.work(GEMM, start + 301, start + 302, start + 999)
    return loop


@shows("unexplained-idle")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start - 50, start + 300, start + 999)
    return loop


@shows("for-loop-optimizer")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.region("Optimizer.step#SGD.step", start, start + 999)
        for at in range(start, start + 990, 8):
            loop.work("void at::native::add_kernel<float>", at, at + 1, at + 4)
    return loop


@shows("exposed-copies")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("Memcpy HtoD (Pageable -> Device)", start, start + 1, start + 200, bytes=1 << 20)
        loop.work(GEMM, start + 2, start + 200, start + 999)
    return loop


def copies(parent: str) -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + 990, 12):
            loop.operator(parent, at, at + 9).operator("aten::copy_", at + 1, at + 8)
            loop.work("Memcpy DtoD (Device -> Device)", at + 2, at + 4, at + 5)
    return loop


@shows("device-copies")
def _() -> MadeLoop:
    return copies("torch.distributed.ddp.reducer::copy_bucket_to_grad")


@shows("bias-copies")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.operator("aten::addmm", start, start + 20)
        loop.work("Memcpy DtoD (Device -> Device)", start + 1, start + 2, start + 100)
        loop.work(GEMM, start + 3, start + 100, start + 999)
    return loop


@shows("layout-conversions")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("void cudnn::ops::nchwToNhwcKernel<float, float>(...)", start, start + 1, start + 100)
        loop.work(GEMM, start + 3, start + 100, start + 999)
    return loop


@shows("memsets")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + 990, 9):
            loop.work("Memset (Device)", at, at + 1, at + 3)
    return loop


@shows("low-sm-efficiency")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 100):
            loop.work("k", at - 1, at, at + 100, blocks=33, block_threads=128)
    return loop


@shows("low-occupancy")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 100):
            loop.work("k", at - 1, at, at + 100, blocks=1320, blocks_per_sm=10.0, occupancy_percent=6.0)
    return loop


@shows("varying-kernels")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start, took in zip(each_step(), (1000, 1000, 1500), strict=True):
        loop.work(GEMM, start, start + 1, start + took)
    return loop


@shows("single-stream")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 600)
        loop.work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start + 2, start + 600, start + 999)
    return loop


@shows("dominant-kernel")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 800).work("k", start + 2, start + 800, start + 999)
    return loop


@shows("fp32-matmuls")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("ampere_sgemm_128x128_tn", start, start + 1, start + 1000)
    return loop


@shows("tensor-cores-unused")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    name = "void cutlass::Kernel2<cutlass_80_simt_hgemm_f16_128x128_8x2_nn_align1>(cutlass::Params)"
    for start in each_step():
        loop.work(name, start, start + 1, start + 1000)
    return loop


def matmul(m: int, n: int, k: int, name: str = GEMM, **columns: int) -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.operator("aten::mm", start, start + 10, [[m, k], [k, n]], [BF16, BF16])
        loop.work(name, start + 1, start + 2, start + 1000, **columns)
    return loop


@shows("old-kernels")
def _() -> MadeLoop:
    name = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(cutlass::Params)"
    return matmul(4097, 4097, 4097, name, blocks=1320)


@shows("misaligned-matmuls")
def _() -> MadeLoop:
    return matmul(4097, 4097, 4097, blocks=1320)


@shows("few-tiles")
def _() -> MadeLoop:
    return matmul(256, 512, 131072, blocks=8)


@shows("thin-matmuls")
def _() -> MadeLoop:
    return matmul(1, 8192, 8192, blocks=1320)


@shows("unfused-attention")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.operator("aten::bmm", start, start + 10, [[16, 2048, 64], [16, 64, 2048]], [BF16, BF16])
        loop.work(GEMM, start + 1, start + 2, start + 300)
        loop.operator("aten::_softmax", start + 20, start + 30, [[16, 2048, 2048], [], []], [BF16, "", ""])
        loop.work("cunn_SoftMaxForward", start + 21, start + 300, start + 700)
        loop.operator("aten::bmm", start + 40, start + 50, [[16, 2048, 2048], [16, 2048, 64]], [BF16, BF16])
        loop.work(GEMM, start + 41, start + 700, start + 1000)
    return loop


def attention(queries: int, size: int, took: int = 1000) -> MadeLoop:
    loop = MadeLoop(busy=False)
    shape = [2, 16, queries, size]
    for start in each_step():
        name = "aten::_scaled_dot_product_flash_attention"
        loop.operator(name, start, start + 10, [shape, shape, shape], [BF16] * 3)
        loop.work("flash_fwd_kernel", start + 1, start + 2, start + took)
    return loop


@shows("slow-attention")
def _() -> MadeLoop:
    return attention(2048, 64)


@shows("short-attention")
def _() -> MadeLoop:
    return attention(128, 64)


@shows("padded-heads")
def _() -> MadeLoop:
    return attention(2048, 80)


@shows("elementwise-chains")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    for start in each_step():
        for number in range(5):
            loop.work(name, start + number, start + 5 + 100 * number, start + 5 + 100 * (number + 1))
        loop.work(GEMM, start + 9, start + 505, start + 1000)
    return loop


@shows("unfused-normalization")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for number, name in enumerate(("pow", "mean", "add", "rsqrt", "mul")):
            loop.operator(f"aten::{name}", start + 10 * number, start + 10 * number + 8)
            at = start + 100 * number
            loop.work(f"{name}_kernel", start + 10 * number + 1, at + 50, at + 150)
        loop.work(GEMM, start + 90, start + 550, start + 1000)
    return loop


def compiled(*regions: str, cpu: int = 20) -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for number, name in enumerate(regions):
            at = start + 300 * number
            loop.operator("TorchDynamo Cache Lookup", at, at + 20)
            loop.operator(f"Torch-Compiled Region: {name}", at + 20, at + 20 + cpu)
            loop.work("triton_poi_fused_add_0", at + 21, at + 40, at + 50)
    return loop


@shows("graph-breaks")
def _() -> MadeLoop:
    loop = compiled("0/0", cpu=200)
    for start in each_step():
        loop.operator("Torch-Compiled Region: 1/0", start + 100, start + 200)
    return loop


@shows("recompilations")
def _() -> MadeLoop:
    return compiled("0/0", "0/1", "0/2")


@shows("cache-lookups")
def _() -> MadeLoop:
    return compiled("0/0")


@shows("compiled-overhead")
def _() -> MadeLoop:
    return compiled("0/0", cpu=250)


@shows("memory-growth")
def _() -> MadeLoop:
    loop = MadeLoop()
    for number, start in enumerate(each_step()):
        loop.memory(start + 500, (10 + number) * 10**8, 2 * 10**9)
    return loop


@shows("fragmented-memory")
def _() -> MadeLoop:
    return MadeLoop().memory(500, 4 * 10**9, 9 * 10**9)


@shows("memory-nearly-full")
def _() -> MadeLoop:
    return MadeLoop().memory(500, 78 * 10**9, 79 * 10**9)


@shows("exposed-communication")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 600)
        loop.work("ncclDevKernel_AllReduce_Sum_bf16", start + 2, start + 500, start + 999, stream=20)
    return loop


@shows("small-collectives")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 40):
            loop.work("ncclDevKernel_AllReduce_Sum_f32", at, at + 1, at + 30, elements_in=64, dtype="Float")
    return loop


@shows("lost-graph-kernels")
def _() -> MadeLoop:
    loop = MadeLoop()
    for start in each_step():
        loop.call("cudaGraphLaunch", start - 10, start - 5)
    return loop


@shows("lost-kernels")
def _() -> MadeLoop:
    loop = MadeLoop()
    for start in each_step():
        loop.call("cudaLaunchKernel", start + 600, start + 601)
    return loop


LOGGED = {"compile-time", "generated-kernels", "damaged-trace"}
"""Rules that need a log of torch.compile or a file: test_compile_log.py, test_diagnose.py."""


def named(diagnosis: Diagnosis) -> dict[str, Finding]:
    """Return the first finding of each rule."""
    return {found.rule: found for found in reversed(diagnosis.findings)}


def test_a_healthy_loop_has_no_findings() -> None:
    """A loop whose GPU is busy has no findings, and says what bounds it."""
    diagnosis = diagnose(MadeLoop().trace())
    assert (diagnosis.findings, diagnosis.failed, diagnosis.bound) == ((), {}, "compute")


def test_every_rule_is_tested() -> None:
    """Each built-in rule has a loop that shows it; those that need a manifest or ranks are tested apart."""
    assert {*SHOWN, "stretched-window", "late-rank", "uneven-compute", "missing-ranks", *LOGGED} == {*RULES}


@pytest.mark.parametrize("rule", SHOWN)
def test_rule_fires(rule: str) -> None:
    """The rule finds what the loop shows, with evidence and no more to win than the step."""
    trace = SHOWN[rule]().trace()
    diagnosis = diagnose(trace)
    found = named(diagnosis)
    assert rule in found, list(found)
    finding = found[rule]
    assert finding.title
    assert finding.evidence
    assert all(
        each.definition and each.unit in ("ns", "1", "%", "bytes", "events", "") for each in finding.evidence
    )
    assert len({each.name for each in finding.evidence}) == len(finding.evidence)
    assert finding.win_ns is None or 0 <= finding.win_ns <= diagnosis.step_ns
    assert rule not in named(diagnose(trace, ignore=[rule]))


@pytest.mark.parametrize("rule", SHOWN)
def test_parts_add_up(rule: str) -> None:
    """The parts of the step add up to it, and the idle parts to the idle time by cause."""
    diagnosis = diagnose(SHOWN[rule]().trace())
    idle = sum(diagnosis.parts[name] for name in ("input", "synchronization", "overhead", "other"))
    assert sum(diagnosis.parts.values()) == pytest.approx(diagnosis.step_ns, abs=10)
    assert sum(diagnosis.idle_by_cause.values()) == pytest.approx(idle, abs=10)


@pytest.mark.parametrize(
    ("rule", "win_us"),
    [
        ("input-wait", 400),
        ("long-synchronization", 200),
        ("garbage-collection", 300),
        ("exposed-communication", 399),
        ("few-tiles", 998 * (1 - 8 / 132)),
        ("elementwise-chains", 400),
    ],
)
def test_time_to_win(rule: str, win_us: float) -> None:
    """Where the time to win can be said exactly, it is exact."""
    win_ns = named(diagnose(SHOWN[rule]().trace()))[rule].win_ns
    assert win_ns is not None
    assert win_ns / 1000 == pytest.approx(win_us, rel=0.01)


def test_functions_compiled_side_by_side() -> None:
    """Several compiled functions are no graph breaks."""
    assert "graph-breaks" not in named(diagnose(compiled("0/0", "1/0", "2/0").trace()))


def test_a_graph_break_of_the_installed_torch(tmp_path: Path) -> None:
    """The ranges of a function with two breaks, as the installed torch records them, are a finding."""

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x + 3

    x = torch.ones(4)
    broken(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        broken(x)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    torch.compiler.reset()
    found = named(diagnose(tmp_path / "trace.json"))["graph-breaks"]
    assert found.title == "Graphs of torch.compile break 2 times per step"


def test_lost_kernels_and_the_verdict() -> None:
    """The verdict abstains if many kernels are lost; those that ran after the recording are no loss."""
    lossy = diagnose(SHOWN["lost-kernels"]().trace())
    assert lossy.bound is None
    assert lossy.coverage == "the kernels of 2 of 5 launches are not in the trace"
    ahead = MadeLoop()
    for at in range(2500, 2900, 10):
        ahead.call("cudaLaunchKernel", at, at + 1)
    assert (diagnose(ahead.trace()).findings, diagnose(ahead.trace()).bound) == ((), "compute")


def test_gpu_time_wins_nothing_if_the_cpu_sets_the_pace() -> None:
    """A loop that only launches is not faster with faster kernels."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work("ampere_sgemm_128x128_tn", start, start + 1, start + 300)
    assert "fp32-matmuls" not in named(diagnose(loop.trace()))


def test_an_unknown_gpu_does_not_fail() -> None:
    """Without known peaks no rule fails."""
    for made in SHOWN.values():
        assert diagnose(made().trace(Device(0, name="Some GPU"))).failed == {}


REAL = {
    "tl_h100_owlv2.json.gz": ["input-wait", "unfused-attention", "old-kernels"],
    "tl_h100_bert_small.json.gz": ["launch-overhead"],
    "hta_nccl_data.json.gz": ["device-copies"],
    "hta_ns_resolution.json.gz": ["device-copies"],
    "kineto_tb_resnet50_nw0_v100.json.gz": ["input-wait"],
    "labelled/gemm_01_compute_few_tiles.json.gz": ["few-tiles"],
    "labelled/gemm_03_compute_misaligned.json.gz": ["misaligned-matmuls"],
    "labelled/sdpa_01_long_seq_low_eff.json.gz": ["slow-attention"],
    "labelled/sdpa_03_short_seq_overhead.json.gz": ["short-attention"],
}


@functools.cache
def of_real(name: str) -> Diagnosis:
    return diagnose(shared(name))


@pytest.mark.parametrize("name", REAL)
def test_first_findings_of_real_traces(name: str) -> None:
    """What is known of a real trace is among its first three findings."""
    assert {*REAL[name]} <= {found.rule for found in of_real(name).findings[:3]}


def test_the_time_to_win_of_a_real_fix() -> None:
    """More worker processes won 50 ms of a ResNet's step; the trace before said at most 59 ms."""
    before, after = "kineto_tb_resnet50_nw0_v100.json.gz", "pairs/resnet50_workers4_a.json.gz"
    medians = [float(np.median(read_file(shared(name)).steps.duration_ns[1:])) for name in (before, after)]
    won_ns = medians[0] - medians[1]
    said_ns = named(of_real(before))["input-wait"].win_ns
    assert said_ns is not None
    assert won_ns <= said_ns <= 1.25 * won_ns


def test_overlapped_communication_is_no_finding() -> None:
    """DeepSeek's training step overlaps its communication."""
    rules = {found.rule for found in of_real("deepseek_train_h800.json.gz").findings}
    assert not rules & {"exposed-communication", "small-collectives", "single-stream"}


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("tl_h100_owlv2.json.gz", "input"),
        ("tl_h100_bert_small.json.gz", "overhead"),
        ("tl_mi300_resnet_actckpt.json.gz", "communication"),
        ("deepseek_train_h800.json.gz", "compute"),
    ],
)
def test_verdicts_of_real_traces(name: str, bound: str) -> None:
    """The verdict is what is known of these traces."""
    assert of_real(name).bound == bound


def test_no_evidence_no_finding() -> None:
    """A trace of a CPU alone, an empty trace and one without steps have no findings of a GPU."""
    cpu = MadeLoop(busy=False)
    for start in each_step():
        cpu.operator("aten::mm", start, start + 990)
    empty = MadeLoop(steps=0, busy=False)
    for loop in (cpu, empty):
        diagnosis = diagnose(loop.trace())
        assert (diagnosis.findings, diagnosis.bound, diagnosis.failed) == ((), None, {})
        assert diagnosis.coverage == "the trace has no GPU work"
