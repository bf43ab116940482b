"""The manifest counts what a trace holds, says which kernels were lost, and what the window cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.finish.main import FinishingJobs
from instrument.record.handover.manifest import Manifest

from ..support.shared_traces import shared
from .training import content, manifest, traces, train


def launches(trace: dict[str, Any]) -> list[int]:
    """Return the correlations of the launches in a trace, in order of time."""
    found = [event for event in trace["traceEvents"] if "LaunchKernel" in event["name"]]
    return [event["args"]["correlation"] for event in sorted(found, key=lambda event: float(event["ts"]))]


def finished(folder: Path, trace: dict[str, Any], *, read: bool) -> dict[str, Any]:
    """Return the line of a window whose trace is ``trace``, as the finishing process writes it."""
    raw = folder / "rank0.1.pt.trace.json"
    raw.write_text(json.dumps(trace, indent=1))
    entry = Manifest(folder).entry(
        rank=0, window=1, opened_by=[], status="recorded", planned_steps=(1, 1), exporter="torch_profiler"
    )
    jobs = FinishingJobs()
    window = {
        "kind": "window",
        "job": 1,
        "entry": entry,
        "folder": str(folder),
        "raw": str(raw),
        "beside": [],
        "read": read,
        "ranks": [],
    }
    window["diagnose"] = False
    assert not jobs.do(window)["errors"]
    answer = jobs.do({"kind": "timed", "job": 2, "window": 1, "timing": None})
    assert not answer["errors"]
    return dict(answer["entry"])


@pytest.mark.parametrize("read", [True, False])
def test_an_intact_trace_of_a_gpu(tmp_path: Path, read: bool) -> None:
    """Each launch has its kernel, and the line has no reason."""
    trace = content(shared("tl_h100_bert_small.json.gz"))
    entry = finished(tmp_path, trace, read=read)
    assert len(launches(trace)) == entry["trace"]["kernels_launched"] == entry["trace"]["kernels_recorded"]
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == entry["trace"]["events"]
    assert entry["reason"] is None


@pytest.mark.parametrize("read", [True, False])
def test_kernels_that_are_lost_at_the_head(tmp_path: Path, read: bool) -> None:
    """The reason says how many of the first launches have no kernel, on every rank."""
    trace = content(shared("tl_h100_bert_small.json.gz"))
    lost = launches(trace)[:3]
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") != "kernel" or event["args"]["correlation"] not in lost
    ]
    entry = finished(tmp_path, trace, read=read)
    assert 3 == entry["trace"]["kernels_launched"] - entry["trace"]["kernels_recorded"]
    assert "lost the kernels of the first 3 launches" in entry["reason"]
    assert "recorded" == entry["status"]


def test_kernels_that_are_missing_elsewhere(tmp_path: Path) -> None:
    """Kernels that were still running at the end are no loss at the head."""
    trace = content(shared("tl_h100_bert_small.json.gz"))
    last = launches(trace)[-1]
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") != "kernel" or event["args"]["correlation"] != last
    ]
    assert finished(tmp_path, trace, read=False)["reason"] is None


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaGraphLaunch"])
def test_a_window_without_a_record_of_a_kernel(tmp_path: Path, call: str, read: bool) -> None:
    """It is partial, and the reason says so, also where all kernels are those of graphs."""
    called = {"ph": "X", "pid": 1, "tid": 1, "ts": 10.0, "dur": 2.0, "args": {"correlation": 7}}
    trace = {
        "schemaVersion": 1,
        "traceEvents": [
            called | {"cat": "cuda_runtime", "name": call},
            called | {"cat": "cpu_op", "name": "aten::add"},
        ],
    }
    entry = finished(tmp_path, trace, read=read)
    assert entry["status"] == "partial"
    assert entry["reason"] == "the GPU's profiling interface gave no record of a kernel"


def test_the_counts_of_a_window(out: Path) -> None:
    """The counts are those of the trace, and of its size before compression."""
    with instrument.profile(out, schedule="2") as prof:
        train(4, prof.step)
    (entry,) = manifest(out)
    events = [event for event in content(traces(out)[0])["traceEvents"] if event["ph"] == "X"]
    assert len(events) == entry["trace"]["events"]
    assert 0 == entry["trace"]["kernels_launched"] == entry["trace"]["kernels_recorded"]
    assert entry["files"][0]["bytes"] < entry["trace"]["bytes"]


def test_the_cost_of_a_window(out: Path) -> None:
    """The stall is part of the time of the steps at which the window opens and closes, and memory is measured."""
    took = 0.0

    def step(call: Callable[[], None]) -> None:
        nonlocal took
        began = time.perf_counter()
        call()
        took += time.perf_counter() - began

    with instrument.profile(out, schedule=instrument.schedule(at=2, warmup=1)) as prof:
        train(4, lambda: step(prof.step))
    cost = manifest(out)[0]["cost"]
    assert 0 < cost["stall_s"] < took
    assert min(cost["rss_before_bytes"], cost["rss_after_bytes"]) > torch.ones(1 << 20).nbytes


def test_a_window_that_never_opened_has_no_cost(out: Path) -> None:
    """Without a recording, there is nothing to count."""
    with instrument.profile(out, schedule="9") as prof:
        train(2, prof.step)
    (entry,) = manifest(out)
    assert [None, None] == [entry["cost"], entry["trace"]]
