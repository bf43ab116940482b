"""Tests that need a GPU; ``INSTRUMENT_KEEP_TRACES=tests/data`` keeps the traces they record."""

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
from instrument.read.kineto.insert_events import CATEGORY, add_gpu_lanes
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.summary import Summary, summarize
from tests.support.net import Net

DATA = Path(__file__).parent / "data"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]


def gpu_ns(events: list[dict[str, Any]]) -> int:
    return sum(round(event["dur"] * 1000) for event in events if event.get("cat") in GPU_WORK)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Record the trace of three training steps of a small network on the GPU."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(64, 256) for _ in range(6)]
    for batch in instrument.steps(data, tmp_path, wait=1, warmup=1, active=3, repeat=1):
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
    """Regions that launch GPU work themselves also show on the GPU's lane.

    The first kernels and copies of a recording may be missing.
    """
    lane = [event["name"] for event in events_of(trained) if event.get("cat") == "gpu_user_annotation"]
    assert all(lane.count(name) >= 2 for name in ("copy", "forward")), lane


@pytest.mark.gpu
def test_region_on_the_lane_of_the_second_backend(tmp_path: Path) -> None:
    """What `record_function` tells torch's second backend, regions do as well."""
    pytest.importorskip("cupti")
    tensor = torch.ones(8, device="cuda")
    config = {"backend": "cupti_monitor"}
    with instrument.profile(tmp_path, custom_profiler_config=config) as prof, instrument.annotate("add"):
        tensor.add_(1)
    (window,) = prof.windows
    if (window["reason"] or "").startswith("the GPU is missing: torch's second backend"):
        pytest.skip(window["reason"])
    assert window["status"] == "recorded", window
    (trace,) = tmp_path.glob("*/*.pt.trace.json.gz")
    assert [event["name"] for event in events_of(trace) if event.get("cat") == "gpu_user_annotation"] == ["add"]


@pytest.mark.gpu
def test_gpu_time_of_the_summary(trained: Path) -> None:
    """The summary's GPU time equals the trace's kernels, memcpys and memsets; backward has its share."""
    summary = summarize(read_kineto(trained))
    assert (summary.gpu_total_ns or 0) + summary.outside_gpu_ns == gpu_ns(events_of(trained))
    outermost_ns = sum(region.gpu_ns or 0 for region in summary.regions if len(region.path) == 1)
    assert outermost_ns + (summary.gpu_unattributed_ns or 0) == summary.gpu_total_ns
    by_region = gpu_by_region(summary)
    assert min(by_region[name] for name in ("copy", "forward", "backward")) > 0


def train_on(device: str, folder: Path) -> Path:
    """Record two steps of annotated modules, with a region around forward and backward."""
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
    """Return the GPU work whose launch lies in a region of that name, on any thread."""
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
    """Regions of the backward pass, which runs on its own thread on a GPU, nest as on a CPU."""
    path = train_on("cuda", tmp_path / "gpu")
    if keep := os.environ.get("INSTRUMENT_KEEP_TRACES"):
        shutil.copy(path, Path(keep) / "gpu_modules.json.gz")
    trace, events = read_kineto(path), events_of(path)
    assert [thread.autograd for thread in trace.threads].count(True) == 1
    summary = summarize(trace)
    cpu = summarize(read_kineto(train_on("cpu", tmp_path / "cpu")))
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
    added = [event for event in events_of(out) if event.get("cat") == CATEGORY]
    shown = [event for event in added if event["name"] == "backward"]
    assert sum(event["args"]["operations"] for event in shown) == len(work)
    lanes = {(event["pid"], event["tid"]) for event in added}
    assert [event for event in events_of(out) if (event.get("pid"), event.get("tid")) not in lanes] == events
    named = [event for event in events if event.get("name") == "backward"]
    original = [event for event in named if event.get("cat") == "gpu_user_annotation"]
    assert sum(event["dur"] for event in original) < sum(event["dur"] for event in shown)


def gpu_paths(summary: Summary) -> set[tuple[str, ...]]:
    """Return the paths of the regions in which GPU work was launched."""
    return {region.path for region in summary.regions if region.gpu_ns}


@pytest.mark.gpu
def test_regions_on_the_thread_that_launches_backward(tmp_path: Path) -> None:
    """In a window, the backward of each module is on autograd's device thread, around the kernels it launches."""
    model = Net(64).cuda()
    with instrument.annotate_modules(model):
        for _ in instrument.steps(range(5), tmp_path, wait=1, warmup=1, active=2, repeat=1):
            loss = model(torch.ones(32, 64, device="cuda")).square().mean()
            with instrument.annotate("around"):
                loss.backward()
    (path,) = tmp_path.rglob("*.pt.trace.json.gz")
    trace = read_kineto(path)
    names, threads = trace.regions.text("name"), trace.regions.thread.tolist()
    backward = [
        (name, thread) for name, thread in zip(names, threads, strict=True) if name.endswith(" (backward)")
    ]
    modules = ["Net", "a", "a.lin", "a.act", "b", "b.lin", "b.act"]
    assert sorted(f"{name} (backward)" for name in modules * 2) == sorted(name for name, _ in backward)
    (device,) = {thread for _, thread in backward}
    (main,) = {thread for name, thread in zip(names, threads, strict=True) if name == "around"}
    assert device != main
    launching = {names[region] for region in trace.kernels.region.tolist() if region >= 0}
    assert {f"{name} (backward)" for name in ("a.lin", "a.act", "b.lin", "b.act")} <= launching


@pytest.mark.parametrize("path", sorted(DATA.glob("gpu_*.json.gz")), ids=lambda path: path.name)
def test_kept_traces(path: Path) -> None:
    """Traces recorded on a GPU give the same sums on a machine without one."""
    summary = summarize(read_kineto(path))
    assert (summary.gpu_total_ns or 0) + summary.outside_gpu_ns == gpu_ns(events_of(path))
    assert gpu_by_region(summary)["backward"] > 0
