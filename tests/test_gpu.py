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
