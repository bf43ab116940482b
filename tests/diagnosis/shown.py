"""Loops that each show what one rule finds."""

from __future__ import annotations

from collections.abc import Callable

from instrument.base.findings import Finding
from instrument.explain.diagnosis.diagnose import Diagnosis

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
        loop.work(GEMM, start - 50, start + 300, start + 1010)
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


@shows("throttled-clock")
def _() -> MadeLoop:
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 20):
        loop.counter("SM Clock (MHz)", at, 1980 if at < STEP else 990).counter("Power (W)", at, 700)
    return loop


@shows("memory-at-peak")
def _() -> MadeLoop:
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 20):
        loop.counter("DRAM BW (%)", at, 90)
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
        loop.call("cudaDeviceSynchronize", start + 10, start + 999.5)
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


@shows("no-gpu-work")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.call("cudaLaunchKernel", start + 600, start + 601)
    return loop


@shows("initialization")
def _() -> MadeLoop:
    loop = MadeLoop(steps=1, busy=False)
    loop.rows["regions"][0]["duration_ns"] = 201_000_000
    loop.call("cudaFree", 0, 200_000)
    return loop.work(GEMM, 200_001, 200_010, 200_500)


@shows("launch-latency")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        for number, at in enumerate(range(start, start + 980, 20)):
            loop.work("k", start + 2 * number, at + 3, at + 20)
        loop.call("cudaDeviceSynchronize", start + 100, start + 982)
    return loop


@shows("low-utilization")
def _() -> MadeLoop:
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start + 400, start + 401, start + 999)
    return loop


def named(diagnosis: Diagnosis) -> dict[str, Finding]:
    """Return the first finding of each rule."""
    return {found.rule: found for found in reversed(diagnosis.findings)}
