"""Metrics of real traces equal values computed in exact arithmetic."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.tables.trace import Trace
from tests.support.shared_traces import shared

pytestmark = pytest.mark.corpus

REFERENCE = Path(__file__).parents[1] / "data" / "reference_values.json"
NAMES = [
    "deepseek_train_h800.json",
    "hta_alexnet_cudasync.json.gz",
    "hta_event_sync_multistream.json.gz",
    "hta_gpu_user_annotation.json.gz",
    "hta_large_integer.json.gz",
    "hta_nccl_data.json.gz",
    "hta_ns_resolution.json.gz",
    "hta_tracediff_control.json.gz",
    "kineto_docs_after_fix.json",
    "kineto_docs_before_fix.json",
    "kineto_tb_resnet50_nw0_v100.json.gz",
    *(f"param_dlrm_8rank_r{rank}.json.gz" for rank in range(8)),
    "param_resnet_kineto.json.gz",
    "tl_h100_bert_small.json.gz",
    "tl_h100_owlv2.json.gz",
    "tl_h100_qwen05b.json.gz",
    "tl_mi300_bert_small.json.gz",
    "tl_mi300_resnet_actckpt.json.gz",
    "tl_torch_compile_triton.json.gz",
    "tl_vllm_decode_full_cudagraph.json.gz",
]


@functools.cache
def read(name: str) -> Trace:
    trace = read_trace(shared({"deepseek_train_h800.json": "deepseek_train_h800.json.gz"}.get(name, name)))
    assert isinstance(trace, Trace)
    return trace


def same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, dict) and isinstance(actual, dict):
        return all(key in actual and same(expected[key], actual[key]) for key in expected)
    if isinstance(expected, float) and isinstance(actual, float):
        return math.isclose(expected, actual, rel_tol=1e-12)
    return bool(expected == actual)


@pytest.mark.parametrize("name", NAMES)
def test_exact_values(name: str) -> None:
    """Integers are equal, and floats are equal to twelve digits; additional metrics are allowed."""
    reference = json.loads(REFERENCE.read_text())["exact_all_traces"][name]
    actual = metrics(read(name), "nccl|rccl")
    wrong = {key: (value, actual.get(key)) for key, value in reference.items() if not same(value, actual.get(key))}
    assert not wrong


def test_all_references_are_compared() -> None:
    """Each trace that has exact values is compared."""
    reference = json.loads(REFERENCE.read_text())
    assert reference["exact_all_traces"].keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_json_types(name: str) -> None:
    """All values are plain JSON without NaN, and the parts of the span add up."""
    numbers = metrics(read(name))
    json.dumps(numbers, allow_nan=False)
    parts = ("compute_ns", "exposed_comm_ns", "exposed_memcpy_ns", "idle_ns")
    assert sum(numbers[part] for part in parts) == numbers["span_ns"]


def test_deep_ep_is_communication() -> None:
    """DeepSeek's communication kernels between experts are recognized by their operation."""
    numbers = metrics(read("deepseek_train_h800.json"))
    assert numbers["comm_ns"] == 113_030_000
    assert {row["name"].split("<")[0] for row in numbers["collective_table"]} == {
        "void dpsk::ep::internode::dispatch",
        "void dpsk::ep::internode::combine",
        "void dpsk::ep::internode::notify_dispatch",
        "void dpsk::ep::internode::cached_notify",
    }


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("deepseek")])
def test_only_nccl_is_communication(name: str) -> None:
    """In the other traces, only NCCL and RCCL kernels are communication."""
    trace = read(name)
    assert metrics(trace)["comm_ns"] == metrics(trace, "nccl|rccl")["comm_ns"]


def test_values_that_other_tools_report_wrongly() -> None:
    """Metrics that common tools report wrongly for these traces are right."""
    assert metrics(read("tl_h100_bert_small.json.gz"))["compute_ns"] == 307_197
    graph = metrics(read("tl_vllm_decode_full_cudagraph.json.gz"))
    assert graph["idle_ns"] == 25_473
    assert graph["kernel_util_span"] > 0.99
    assert metrics(read("tl_mi300_resnet_actckpt.json.gz"))["span_ns"] == 86_567_708
    assert metrics(read("param_dlrm_8rank_r0.json.gz"))["comm_ns"] == 5_798_000


def test_efficiency_on_amd() -> None:
    """In ROCm traces, blocks per multiprocessor follow from the grid, even if it counts threads."""
    numbers = metrics(read("tl_torch_compile_triton.json.gz"))
    assert 0.9 < numbers["sm_eff_span"] <= 1
    assert numbers["occ_weighted"] is None
    assert 0 < numbers["occ_limit_weighted"] <= 100


def test_matmul_of_an_mlp() -> None:
    """The bfloat16 addmm of an MLP, 5185 x 1024 by 1024 x 1024 plus a bias, has its known operations and bytes."""
    rows = metrics(read("tl_h100_owlv2.json.gz"))["matmul_table"]
    found = next(row for row in rows if (row["name"], row["m"], row["n"]) == ("aten::addmm", 5185, 1024))
    assert found["flops"] == 2 * 5185 * 1024 * 1024
    assert found["bytes"] == 2 * (1024 + 5185 * 1024 + 1024 * 1024 + 5185 * 1024)
    assert found["dtype"] == "c10::BFloat16"
    assert 1e14 < found["flops_per_s"] < 1e15
