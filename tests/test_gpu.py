"""What only a GPU can show; traces recorded here are kept with ``INSTRUMENT_KEEP_TRACES=tests/data``."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.traces.kineto import read_kineto
from instrument.traces.summary import Summary, summarize
from tests.support.net import Net

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
    """Regions that launch GPU work themselves are on the GPU's lane as well, whenever they ran."""
    lane = [event["name"] for event in events_of(trained) if event.get("cat") == "gpu_user_annotation"]
    assert all(lane.count(name) >= 2 for name in ("copy", "forward")), lane


@pytest.mark.gpu
def test_gpu_time_of_the_summary(trained: Path) -> None:
    """The summary's GPU time is that of the trace's kernels, copies and fills; backward has its share."""
    summary = summarize(read_kineto(trained))
    assert (summary.gpu_total_ns or 0) + summary.outside_gpu_ns == gpu_ns(events_of(trained))
    outermost = sum(region.gpu_ns or 0 for region in summary.regions if len(region.path) == 1)
    assert outermost + (summary.gpu_unattributed_ns or 0) == summary.gpu_total_ns
    by_region = gpu_by_region(summary)
    assert min(by_region[name] for name in ("copy", "forward", "backward")) > 0


@pytest.mark.gpu
def test_regions_on_the_thread_that_launches_backward(tmp_path: Path) -> None:
    """In a window the backward of each module is on autograd's device thread, around the kernels it launches."""
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
    """Traces that were recorded on a GPU give the same sums on a machine without one."""
    summary = summarize(read_kineto(path))
    assert (summary.gpu_total_ns or 0) + summary.outside_gpu_ns == gpu_ns(events_of(path))
    assert gpu_by_region(summary)["backward"] > 0
