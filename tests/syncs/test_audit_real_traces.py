"""`audit_syncs` on real traces, compared with a reading of their events."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from instrument.explain.waits.audit import audit_syncs
from instrument.read.jobs.read import read_trace
from instrument.read.measures.synchronizations import find_synchronizations
from instrument.read.tables.trace import Trace
from tests.support.shared_traces import shared

_WAITS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^hipMemcpyWithStream$")


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode()
    events = json.loads(text, parse_float=Decimal)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def ns(value: Decimal | int) -> int:
    return int((Decimal(value) * 1000).to_integral_value())


def expected_synchronizations(path: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the durations of all synchronizations and the starts of device synchronizations, from the JSON."""
    events = events_of(path)
    copies = {
        event["args"].get("correlation"): event
        for event in events
        if str(event.get("cat")).lower() in ("gpu_memcpy", "memcpy") and "Pageable" in event["name"]
    }
    durations, devices = [], []
    for event in events:
        if str(event.get("cat")).lower() not in ("cuda_runtime", "runtime"):
            continue
        copied = copies.get(event["args"].get("correlation"))
        begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event.get("dur", 0))
        if _WAITS.match(event["name"]):
            durations.append(end - begin)
            if "Device" in event["name"]:
                devices.append((begin, end - begin))
        elif copied is not None and event["name"] == "cudaMemcpyAsync":
            first, last = ns(copied["ts"]), ns(copied["ts"]) + ns(copied.get("dur", 0))
            shared_ns = min(end, last) - max(begin, first)
            if shared_ns >= 0 and 2 * shared_ns >= last - first:
                durations.append(end - begin)
    return durations, devices


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("tl_h100_owlv2", 1), ("tl_h100_bert_small", 1), ("tl_h100_qwen05b", 1), ("tl_mi300_bert_small", 1),
        ("tl_mi300_resnet_actckpt", 1), ("tl_torch_compile_triton", 1), ("tl_vllm_decode_full_cudagraph", 0),
        ("hta_alexnet_cudasync", 1), ("hta_event_sync_multistream", 1), ("hta_gpu_user_annotation", 0),
        ("hta_nccl_data", 1), ("hta_ns_resolution", 1), ("hta_tracediff_control", 1), ("deepseek_train_h800", 1),
        ("kineto_tb_resnet50_nw0_v100", 1), ("param_resnet_kineto", 1), ("param_dlrm_8rank_r1", 1),
    ],
)  # fmt: skip
def test_total_blocked_time_of_real_traces(name: str, own: int) -> None:
    """The findings cover the whole time in blocking calls, except the profiler's own last synchronization."""
    path = shared(f"{name}.json.gz")
    durations, devices = expected_synchronizations(path)
    trace = read_trace(path)
    assert isinstance(trace, Trace)
    assert sorted(wait.blocked_ns for wait in find_synchronizations(trace)) == sorted(durations)
    report = audit_syncs(trace)
    left_out = max(devices)[1] if own else 0
    assert sum(found.blocked_ns or 0 for found in report.findings) == sum(durations) - left_out
    assert own == sum("Left out: 1 " in sentence for sentence in report.coverage)
    assert report.steps == len(trace.steps)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "tl_h100_owlv2",
            {("to", "H2D"): (25, 30_897_080), ("to", "D2H"): (55, 146_418_600), ("synchronize", None): (1, None)},
        ),
        ("tl_h100_bert_small", {("bool", "D2H"): (1, 1), ("synchronize", None): (1, None)}),
        ("tl_mi300_bert_small", {("bool", "D2H"): (1, 1), ("synchronize", None): (1, None)}),
        ("hta_nccl_data", {("synchronize", None): (24, None)}),
        ("kineto_tb_resnet50_nw0_v100", {("to", "H2D"): (12, 115_607_040)}),
    ],
)
def test_real_traces_by_operation(name: str, expected: dict[Any, Any]) -> None:
    """Counts and bytes by operation match known values for NVIDIA and AMD traces from 2021 until today."""
    found = {
        (each.op, each.direction): (each.count, each.bytes)
        for each in audit_syncs(shared(f"{name}.json.gz")).findings
    }
    assert expected == found


def test_functions_of_a_real_trace() -> None:
    """Python stacks give the functions of the user and the library, even for files that do not exist."""
    report = audit_syncs(shared("tl_h100_bert_small.json.gz"))
    (found,) = [each for each in report.findings if each.op == "bool"]
    assert found.site and found.site.file.startswith("moca/")
    assert found.via and found.via.file == "transformers/modeling_attn_mask_utils.py"
    assert (found.via.function, found.via.line) == ("_prepare_4d_attention_mask_for_sdpa", 0)
    assert (found.blocked_ns, found.steps) == (7640, {6: 1})


def test_backward_of_a_real_trace() -> None:
    """A synchronization on the autograd thread has its node and the region of the backward pass."""
    report = audit_syncs(shared("param_dlrm_8rank_r1.json.gz"))
    (found,) = [each for each in report.findings if each.backward]
    assert (found.op, found.backward, found.region) == ("setitem", "IndexBackward0", ("## backward ##",))
    assert (found.count, found.blocked_ns, found.bytes) == (1, 15_000, 5616)


@pytest.mark.gpu
def test_known_synchronizations_on_a_gpu(tmp_path: Path) -> None:
    """Each synchronizing idiom is found under its name, once per step."""
    x = torch.randn(256, 256, device="cuda")

    def train() -> None:
        with record_function("train"):
            float((x @ x).sum().item())
            (x > 0).nonzero()
            x.cpu()
            torch.cuda.synchronize()

    train()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=True) as recorded:
        for _ in range(3):
            train()
            recorded.step()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    found = {each.op: each.count for each in audit_syncs(path).findings if each.region == ("train",)}
    assert {"item": 3, "nonzero": 3, "to": 3, "synchronize": 3} == found
