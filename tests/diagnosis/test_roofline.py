"""Peaks, operations and bytes of operators, and what share of the peak they reach."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.metrics.operator_work import operator_work
from instrument.explain.metrics.roofline import PRODUCTS, peak_of, roofline
from instrument.read.jobs.read import read_file
from instrument.read.tables.trace import Device
from tests.support.shared_traces import shared

from .made_loops import GEMM, MadeLoop

BF16 = "c10::BFloat16"
SIZES = st.integers(1, 64)


def work(name: str, shapes: Any, kind: str = BF16) -> Any:
    return operator_work(name, json.dumps(shapes), json.dumps([kind] * len(shapes)))


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "elements"),
    [
        ("aten::mv", [[3, 4], [4]], 24, 12 + 4 + 3),
        ("aten::addmv", [[3], [3, 4], [4]], 24, 3 + 12 + 4 + 3),
        ("aten::dot", [[5], [5]], 10, 5 + 5 + 1),
        ("aten::addbmm", [[3, 6], [5, 3, 4], [5, 4, 6]], 2 * 5 * 3 * 4 * 6, 18 + 60 + 120 + 18),
        ("aten::baddbmm", [[5, 3, 6], [5, 3, 4], [5, 4, 6]], 2 * 5 * 3 * 4 * 6, 90 + 60 + 120 + 90),
    ],
)
def test_matmuls_of_vectors_and_sums(name: str, shapes: Any, flops: int, elements: int) -> None:
    """A vector is a matrix with one row or column; a sum of matmuls is one result."""
    got = work(name, shapes)
    assert (got.kind, got.flops, got.bytes) == ("matmul", flops, 2 * elements)
    assert work(name, [shape[:-1] for shape in shapes]) is None


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H800", "H800 SXM"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("Tesla V100-DGXS-32GB", "V100 SXM2"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("NVIDIA A100-PG509-200", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD Instinct MI250X", "MI250X die"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Quadro GP100", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("", None),
    ],
)
def test_names_of_devices(name: str, product: str | None) -> None:
    """The names that CUDA and HIP report lead to the product."""
    peak = peak_of(name)
    assert (peak and peak.name) == product


@pytest.mark.parametrize("peak", PRODUCTS, ids=lambda peak: peak.name)
def test_peaks_are_plausible(peak: Any) -> None:
    """Smaller types are at least as fast, and the ridge of 16 bits lies where that of all GPUs does."""
    rates = [
        peak.flops_per_s[kind] for kind in ("fp64", "fp32", "tf32", "fp16", "fp8") if kind in peak.flops_per_s
    ]
    assert rates == sorted(rates)
    assert 30 < peak.ridge("fp16") < 450
    assert peak.source


@given(m=SIZES, n=SIZES, k=SIZES, batch=SIZES)
def test_matmuls(m: int, n: int, k: int, batch: int) -> None:
    """A matmul is 2*m*n*k operations; a batch of one is the same as none."""
    found = work("aten::bmm", [[batch, m, k], [batch, k, n]])
    assert found.flops == 2 * batch * m * n * k
    assert found.bytes == 2 * batch * (m * k + k * n + m * n)
    assert work("aten::mm", [[m, k], [k, n]]).flops == work("aten::bmm", [[1, m, k], [1, k, n]]).flops


@given(batch=SIZES, heads=SIZES, queries=SIZES, keys=SIZES, size=SIZES)
def test_attention(batch: int, heads: int, queries: int, keys: int, size: int) -> None:
    """Attention is its two matmuls, its backward pass five; fused, the scores are not in memory."""
    name = "aten::_scaled_dot_product_flash_attention"
    q, k = [batch, heads, queries, size], [batch, heads, keys, size]
    found = work(name, [q, k, k])
    one = work("aten::bmm", [[batch * heads, queries, size], [batch * heads, size, keys]])
    assert found.flops == 2 * one.flops
    assert found.bytes == 2 * 2 * batch * heads * size * (queries + keys)
    assert work(f"{name}_backward", [q, q, k, k]).flops == 5 * one.flops


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::mm", [[2, 3], [4, 5]]),
        ("aten::mm", []),
        ("aten::_scaled_dot_product_flash_attention", [[2, 3]]),
        ("aten::convolution_backward", [[2, 3], [2, 3, 4, 4], [3, 3, 1, 1]]),
        ("aten::relu", [[]]),
        ("aten::relu", ["x"]),
        ("aten::nothing", [[2, 3]]),
    ],
)
def test_shapes_that_do_not_fit(name: str, shapes: Any) -> None:
    """Shapes that do not fit the operator, and unknown operators, give nothing."""
    assert work(name, shapes) is None


@pytest.mark.parametrize(
    "text", ["", "x", "null", "3", '{"a": 1}', "[[1e999, 2], [2, 3]]", '["a", "b"]', "[" * 100_000]
)
def test_hostile_texts(text: str) -> None:
    """Shapes that are not shapes give nothing."""
    for name in ("aten::mm", "aten::relu", "aten::_softmax", "aten::convolution_backward", "aten::add"):
        assert operator_work(name, text, text) is None


def test_convolutions_without_their_other_inputs() -> None:
    """Without them, a convolution has operations only if a backward one shows the shape of its result."""
    image, weight, result = [8, 64, 56, 56], [128, 64, 3, 3], [8, 128, 28, 28]

    def loop(*, backward: bool) -> MadeLoop:
        made = MadeLoop(busy=False)
        for start in (0, 1000, 2000):
            made.operator("aten::convolution", start, start + 9, [image, weight], [BF16] * 2)
            made.work("conv", start + 1, start + 10, start + 400)
            if backward:
                name = "aten::convolution_backward"
                made.operator(name, start + 20, start + 29, [result, image, weight], [BF16] * 3)
                made.work("conv", start + 21, start + 400, start + 900)
        return made

    flops = 2 * 8 * 128 * 28 * 28 * 64 * 9
    assert roofline(loop(backward=False).trace()).rows == []
    found = {row.name: row.work.flops for row in roofline(loop(backward=True).trace()).rows}
    assert found == {"aten::convolution": flops, "aten::convolution_backward": 2 * flops}


CONVOLUTIONS = {
    "plain": (torch.nn.Conv2d(3, 8, 3), (2, 3, 16, 12)),
    "strided": (torch.nn.Conv2d(4, 8, 5, stride=(2, 3), padding=2, dilation=2), (2, 4, 40, 41)),
    "grouped": (torch.nn.Conv2d(8, 16, 3, groups=4, bias=False), (2, 8, 16, 16)),
    "one dimension": (torch.nn.Conv1d(3, 8, 7, padding="same"), (2, 3, 50)),
    "three dimensions": (torch.nn.Conv3d(2, 4, 3), (1, 2, 8, 8, 8)),
    "transposed": (torch.nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, output_padding=1), (2, 6, 9, 7)),
    "transposed in groups": (torch.nn.ConvTranspose1d(6, 4, 3, groups=2), (2, 6, 9)),
}


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_recorded_convolutions(kind: str, needs_input: bool, tmp_path: Path) -> None:
    """The operations of recorded convolutions, forward and backward, are those that torch counts."""
    layer, shape = CONVOLUTIONS[kind]
    image = torch.randn(shape, requires_grad=needs_input)
    with FlopCounterMode(display=False) as counter:
        layer(image).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as prof:
        layer(image).sum().backward()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    operators = read_file(tmp_path / "trace.json").operators
    texts = zip(*(operators.text(name) for name in ("name", "shapes", "types", "scalars")), strict=True)
    found = {text[0]: one.flops for text in texts if (one := operator_work(*text)) and one.kind == "convolution"}
    theirs = counter.get_flop_counts()["Global"]
    expected = {f"aten::{str(name).removeprefix('aten.')}": flops for name, flops in theirs.items()}
    if "group" in kind:  # torch counts the gradient of the weight as if there were one group
        expected["aten::convolution_backward"] = (1 + needs_input) * expected["aten::convolution"]
    assert found == expected


@pytest.mark.parametrize(
    "scalars",
    [
        "[",
        "3",
        '["", "", ""]',
        '["", "", "", "[0]", "[1]", "[1]", "False", "[0]", "1"]',
        json.dumps(["", "", "", "[1]", "[1]", "[1]", "False", "[" * 100_000, "1"]),
        json.dumps(["", "", "", "[1]", '{"a": 1}', "[1]", "False", "[0]", "1"]),
        json.dumps(["", "", "", "[1e999]", "[1]", "[1]", "False", "[0]", "1"]),
        json.dumps(["", "", "", "[1]", "[1]", "[1]", "True", "[0]", "[2]"]),
    ],
)
def test_hostile_parameters(scalars: str) -> None:
    """Parameters that no convolution has give nothing, and so do none without a result."""
    shapes, types = "[[2, 3, 8, 8], [4, 3, 3, 3]]", '["float", "float"]'
    for name in ("aten::convolution", "aten::convolution_backward"):
        assert operator_work(name, shapes, types, scalars) is None


def test_nothing_counts_twice() -> None:
    """An operator inside another counts once, for the one whose operations are known best."""
    loop = MadeLoop(steps=1, busy=False)
    loop.operator("aten::linear", 0, 90, [[512, 512], [512, 512], []], [BF16] * 3)
    loop.operator("aten::addmm", 10, 80, [[512], [512, 512], [512, 512]], [BF16] * 3)
    loop.operator("aten::copy_", 20, 30, [[512, 512]], [BF16])
    loop.work("copy", 21, 100, 200).work(GEMM, 50, 200, 900)
    found = roofline(loop.trace())
    assert [(row.name, row.gpu_ns) for row in found.rows] == [("aten::addmm", 800_000)]
    assert (found.covered_ns, found.of_ns) == (800_000, 800_000)


def mfu(device: Device) -> dict[str, Any]:
    loop = MadeLoop(steps=1, busy=False)
    loop.operator("aten::mm", 0, 90, [[8192, 8192], [8192, 8192]], [BF16] * 2)
    return dict(diagnose(loop.work(GEMM, 1, 2, 2002).trace(device)).goodput)


def test_goodput() -> None:
    """Model FLOPs utilization is operations / peak / time; above 1 it says so, without peaks there is none."""
    name = "NVIDIA H100 80GB HBM3"
    found = mfu(Device(0, name=name))
    assert found["mfu"] == pytest.approx(2 * 8192**3 / 989.4e12 / 2002e-6, rel=0.01)
    assert (found["flops"], found["unknown"], found["coverage"]) == (2 * 8192**3, None, 1.0)
    too_fast = mfu(Device(0, name="Tesla T4"))
    assert too_fast["mfu"] is None
    assert too_fast["unknown"] == "the peak of a type is not known"
    slow = mfu(Device(0, name="NVIDIA L4"))
    assert slow["mfu"] > 1
    assert slow["unknown"].startswith("more operations than the peak allows")
    assert mfu(Device(0, name="?"))["unknown"] == "the peaks of the GPU are not known"


def test_goodput_needs_most_of_the_work() -> None:
    """If the shapes of most matmuls and convolutions are unknown, there is no utilization."""
    loop = MadeLoop(steps=1, busy=False).operator("aten::mm", 0, 90, [[8192, 8192]] * 2, [BF16] * 2)
    loop.work(GEMM, 1, 2, 500).work("sm90_xmma_fprop_implicit_gemm_bf16bf16", 100, 500, 2000)
    found = diagnose(loop.trace()).goodput
    assert found["mfu"] is None
    assert found["unknown"] == "the operations of only 25 % of the time of matmuls and the like are known"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1", "tf32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma", "fp32"),
        ("ampere_sgemm_128x128_tn", "fp32"),
    ],
)
def test_tf32(kernel: str, kind: str) -> None:
    """Whether float32 operators computed in TF32 is in the names of their kernels."""
    loop = MadeLoop(steps=1, busy=False)
    loop.operator("aten::mm", 0, 90, [[512, 512], [512, 512]], ["float", "float"])
    (row,) = roofline(loop.work(kernel, 1, 2, 900).trace()).rows
    assert row.kind == kind


def test_recomputation() -> None:
    """Operators of a forward pass inside autograd's engine are computed again; gradients are not."""
    loop = MadeLoop(steps=1, busy=False)
    shapes = [[512, 512], [512, 512]]
    for at, around in ((0, []), (100, ["autograd::engine::evaluate_function: MulBackward0"])):
        for name in (*around, "aten::linear", "aten::mm"):
            loop.operator(name, at + len(name) % 7, at + 90, shapes, [BF16] * 2)
        loop.work(GEMM, at + 20, at + 100, at + 190)
    loop.operator("autograd::engine::evaluate_function: MmBackward0", 200, 290)
    loop.operator("aten::mm", 210, 280, shapes, [BF16] * 2)
    loop.work(GEMM, 220, 300, 390)
    found = roofline(loop.trace())
    assert (found.flops, found.recomputed_flops) == (3 * 2 * 512**3, 2 * 512**3)
    assert found.peak_ns == pytest.approx(3 * (found.recomputed_peak_ns or 0))


def test_recomputation_of_real_traces() -> None:
    """A ResNet with activation checkpointing recomputes; others do not."""
    assert roofline(read_file(shared("tl_mi300_resnet_actckpt.json.gz"))).recomputed_flops > 0
    for name in ("tl_h100_owlv2.json.gz", "hta_tracediff_control.json.gz"):
        assert roofline(read_file(shared(name))).recomputed_flops == 0


def tracelens(name: str) -> list[dict[str, str]]:
    with shared(f"tracelens/h100_{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


NAMES = {
    "google_owlv2-large-patch14-ensemble": "tl_h100_owlv2.json.gz",
    "Qwen_Qwen1.5-0.5B-Chat": "tl_h100_qwen05b.json.gz",
    "gaunernst_bert-small-uncased": "tl_h100_bert_small.json.gz",
}
NUMBER: Callable[[str], float] = float


@pytest.mark.parametrize("name", NAMES)
def test_matmuls_agree_with_tracelens(name: str) -> None:
    """FLOPs and bytes by shape are those of TraceLens, which also counts the addition of a bias."""
    rows = {
        (row.name, row.work.sizes): row
        for row in roofline(read_file(shared(NAMES[name]))).rows
        if row.work.kind == "matmul"
    }
    compared = 0
    for each in tracelens(f"{name}_GEMM"):
        batch, m, n, k = (int(each[f"param: {side}"] or 1) for side in "BMNK")
        row = rows.get((each["name"], (batch, m, n, k)))
        if row is None:
            continue
        compared += 1
        bias = batch * m * n if ast.literal_eval(each["param: bias"]) else 0
        assert (row.work.flops + bias) / 1e9 == pytest.approx(NUMBER(each["GFLOPS_first"]), rel=1e-9)
        assert row.work.bytes == pytest.approx(NUMBER(each["Data Moved (MB)_first"]) * 2**20, rel=1e-9)
        assert row.calls == int(each["name_count"])
    assert compared >= 2


@pytest.mark.parametrize("name", ["Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased"])
def test_attention_agrees_with_tracelens(name: str) -> None:
    """FLOPs are those of TraceLens, which reads from the call that a mask is causal, and then counts half."""
    rows = {row.name: row for row in roofline(read_file(shared(NAMES[name]))).rows}
    (each,) = tracelens(f"{name}_SDPA_fwd")
    factor = 2 if ast.literal_eval(each["param: causal"]) else 1
    found = rows[each["name"]].work
    assert found.flops / 1e9 == pytest.approx(factor * NUMBER(each["GFLOPS_first"]), rel=1e-9)
    assert found.bytes == pytest.approx(NUMBER(each["Data Moved (MB)_first"]) * 2**20, rel=1e-9)
