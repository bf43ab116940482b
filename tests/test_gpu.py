"""What only a GPU can show; traces recorded here are kept with ``INSTRUMENT_KEEP_TRACES=tests/data``."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.traces.add_lanes import CATEGORY, add_gpu_lanes
from instrument.traces.kineto import read_kineto
from instrument.traces.summary import Summary, summarize

DATA = Path(__file__).parent / "data"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]


def gpu_ns(events: list[dict[str, Any]]) -> int:
    return sum(round(event["dur"] * 1000) for event in events if event.get("cat") in GPU_WORK)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The trace of two steps of a small network that is trained on the GPU."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(64, 256) for _ in range(5)]
    for batch in instrument.steps(data, tmp_path, wait=1, warmup=1, active=2, repeat=1):
        with instrument.annotate("copy"):
            batch = batch.cuda()
        with instrument.annotate("forward"):
            loss = model(batch).square().mean()
        with instrument.annotate("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (trace,) = tmp_path.rglob("*.pt.trace.json.gz")
    if keep := os.environ.get("INSTRUMENT_KEEP_TRACES"):
        shutil.copy(trace, Path(keep) / "gpu_trained.json.gz")
    return trace


def gpu_by_region(summary: Summary) -> dict[str, int]:
    return {"/".join(region.path): region.gpu_ns or 0 for region in summary.regions}


@pytest.mark.gpu
def test_region_on_the_gpu_lane(trained: Path) -> None:
    """Each region is on the GPU's lane as well, once for each time it ran."""
    lane = [event["name"] for event in events_of(trained) if event.get("cat") == "gpu_user_annotation"]
    assert {name: lane.count(name) for name in ("copy", "forward")} == {"copy": 2, "forward": 2}


@pytest.mark.gpu
def test_gpu_time_of_the_summary(trained: Path) -> None:
    """The summary's GPU time is that of the trace's kernels, copies and fills; backward has its share."""
    summary = summarize(read_kineto(trained))
    assert summary.gpu_total_ns == gpu_ns(events_of(trained))
    outermost = sum(region.gpu_ns or 0 for region in summary.regions if len(region.path) == 1)
    assert outermost + (summary.gpu_unattributed_ns or 0) == summary.gpu_total_ns
    by_region = gpu_by_region(summary)
    assert min(by_region[name] for name in ("copy", "forward", "backward")) > 0


def trained_on(device: str, folder: Path) -> Path:
    """The trace of two steps of modules with regions, and a region around forward and backward."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    model = torch.nn.Sequential(block, torch.nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(64, 256, device=device) for _ in range(5)]
    with instrument.annotate_modules(model):
        for batch in instrument.steps(data, folder, wait=1, warmup=1, active=2, repeat=1):
            with instrument.annotate("forward"):
                loss = model(batch).square().mean()
            with instrument.annotate("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (trace,) = folder.rglob("*.pt.trace.json.gz")
    return trace


def launched_in(events: list[dict[str, Any]], region: str) -> Iterator[dict[str, Any]]:
    """The GPU work whose call lies in a region of that name, on whatever thread."""
    ranges = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == region
    ]
    calls = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    for event in events:
        at = calls.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in GPU_WORK and at is not None and any(start <= at < end for start, end in ranges):
            yield event


@pytest.mark.gpu
def test_backward_is_one_tree(tmp_path: Path) -> None:
    """Regions of the backward pass, which has a thread of its own here, are where they are on a CPU."""
    path = trained_on("cuda", tmp_path / "gpu")
    if keep := os.environ.get("INSTRUMENT_KEEP_TRACES"):
        shutil.copy(path, Path(keep) / "gpu_modules.json.gz")
    trace, events = read_kineto(path), events_of(path)
    assert [thread.autograd for thread in trace.threads].count(True) == 1
    summary = summarize(trace)
    cpu = summarize(read_kineto(trained_on("cpu", tmp_path / "cpu")))
    assert {row.path: row.calls for row in summary.regions} == {row.path: row.calls for row in cpu.regions}
    assert ("backward", "Sequential (backward)", "1 (backward)") in gpu_paths(summary)

    outermost = [row for row in summary.regions if len(row.path) == 1]
    assert sum(row.cpu_ns for row in outermost) <= summary.step_ns
    assert all(0 <= row.self_ns <= row.cpu_ns for row in summary.regions)
    work = list(launched_in(events, "backward"))
    assert gpu_by_region(summary)["backward"] == gpu_ns(work) > 0
    assert summary.unplaced == 0

    out = tmp_path / "lanes.json.gz"
    add_gpu_lanes(trace, out)
    ours = [event for event in events_of(out) if event.get("cat") == CATEGORY]
    shown = [event for event in ours if event["name"] == "backward"]
    assert sum(event["args"]["operations"] for event in shown) == len(work)
    lanes = {(event["pid"], event["tid"]) for event in ours}
    assert [event for event in events_of(out) if (event.get("pid"), event.get("tid")) not in lanes] == events
    named = [event for event in events if event.get("name") == "backward"]
    theirs = [event for event in named if event.get("cat") == "gpu_user_annotation"]
    assert sum(event["dur"] for event in theirs) < sum(event["dur"] for event in shown)


def gpu_paths(summary: Summary) -> set[tuple[str, ...]]:
    """The paths of regions that GPU work was launched in."""
    return {region.path for region in summary.regions if region.gpu_ns}


@pytest.mark.gpu
def test_capture_is_marked_for_cuda_tools(tmp_path: Path) -> None:
    """Marking windows for Nsight Systems calls cudaProfilerStart and Stop without harm when no tool is there."""
    torch.ones(1).cuda()
    with instrument.profile(tmp_path, schedule=instrument.schedule(at=1), exporter="nsight_systems") as prof:
        for _ in range(3):
            prof.step()
    assert [entry["status"] for entry in prof.windows] == ["recorded"]


@pytest.mark.parametrize("path", sorted(DATA.glob("gpu_*.json.gz")), ids=lambda path: path.name)
def test_kept_traces(path: Path) -> None:
    """Traces that were recorded on a GPU give the same sums on a machine without one."""
    summary = summarize(read_kineto(path))
    assert summary.gpu_total_ns == gpu_ns(events_of(path))
    assert gpu_by_region(summary)["backward"] > 0
