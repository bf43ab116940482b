"""Synchronizations that windows and torch's profilers make themselves are not findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument.base.config import settings
from instrument.base.errors import SyncError
from instrument.syncs.live import detect_syncs, no_syncs
from tests.support.gpu_waits import Gpu, gpu, here, shown
from tests.windows.training import recorded

__all__ = ["gpu"]

pytestmark = pytest.mark.native

CPU = [ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def profiler_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's profiler believe that it records a GPU, so that it synchronizes at its end."""
    monkeypatch.setattr(settings, "summary", False)
    start = torch.autograd.profiler.profile._start_trace

    def start_trace(profiler: Any) -> None:
        profiler.use_device = "cuda"
        start(profiler)

    monkeypatch.setattr(torch.autograd.profiler.profile, "_start_trace", start_trace)


def run(folder: Path, body: Callable[[], object] = lambda: None, **options: Any) -> instrument.Profile:
    """Run four steps, of which the second and third are recorded."""
    plan = instrument.schedule("1-2")
    with instrument.profile(folder, schedule=plan, activities=CPU, **options) as prof:
        for _ in range(4):
            torch.ones(3).sum()
            body()
            prof.step()
    return prof


@pytest.mark.parametrize("how", ["error", "budget", "no_syncs"])
def test_end_of_a_window(gpu: Gpu, tmp_path: Path, how: str) -> None:
    """The end of a window neither raises nor uses a budget; the window is recorded, and the profiler is off."""
    arguments = {"error": {"level": "error"}, "budget": {"budget": 0}, "no_syncs": {}}[how]
    with detect_syncs(**arguments) as syncs, no_syncs() if how == "no_syncs" else instrument.allow_sync("unused"):
        prof = run(tmp_path)
        assert not torch.autograd._profiler_enabled()
    assert gpu.synchronized
    assert ["recorded"] == [window["status"] for window in prof.windows]
    assert [[1, 2]] == recorded(tmp_path)
    assert ([], []) == (syncs.findings, syncs.report.exceeded)


@pytest.mark.parametrize("how", ["error", "budget", "no_syncs"])
def test_end_of_a_torch_profiler(gpu: Gpu, how: str) -> None:
    """The user's own torch profiler ends as it does without a detector."""
    arguments = {"error": {"level": "error"}, "budget": {"budget": 0}, "no_syncs": {}}[how]
    with detect_syncs(**arguments) as syncs, no_syncs() if how == "no_syncs" else instrument.allow_sync("unused"):
        with torch.profiler.profile(activities=CPU) as prof:
            torch.ones(3).sum()
        assert not torch.autograd._profiler_enabled()
    assert 1 == gpu.synchronized
    assert ([], []) == (syncs.findings, syncs.report.exceeded)
    prof.profiler.use_device = None  # the events have no GPU
    assert "aten::sum" in {event.name for event in prof.events()}


def test_synchronizations_inside_a_window(gpu: Gpu, tmp_path: Path) -> None:
    """Synchronizations of the program stay findings, including one in its `on_trace_ready`."""

    def ready(_: object) -> None:
        torch.cuda.synchronize()

    with detect_syncs(every=1) as syncs:
        line = here() + 1
        prof = run(tmp_path, lambda: (gpu.x.item(), torch.cuda.synchronize()), on_trace_ready=ready)
    expected = [("synchronize", ready.__code__.co_firstlineno + 1, 1), ("item", line, 4), ("synchronize", line, 4)]
    assert expected == shown(syncs.findings)
    assert ["recorded"] == [window["status"] for window in prof.windows]


def test_sync_error_inside_a_window(gpu: Gpu, tmp_path: Path) -> None:
    """A `SyncError` inside a window reaches the loop, and the profiler is off."""
    with pytest.raises(SyncError, match=r"gpu\.x\.item\(\)"), detect_syncs("error"):
        run(tmp_path, lambda: gpu.x.item())
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    "name", ["torch.autograd.profiler", "torch.profiler._cupti_monitor", "instrument.record.gpu_wait"]
)
@pytest.mark.parametrize("what", ["stream", "device"])
def test_synchronizations_reported_by_torch_alone(gpu: Gpu, name: str, what: str) -> None:
    """The module of the calling frame decides if no wrapper saw the call."""
    gpu.configure(what=what)
    found = {}
    for module in (name, "torch.profilers"):
        scope: dict[str, Any] = {"__name__": module, "wait": gpu.x.item}
        exec("def stop(): wait()", scope)
        with detect_syncs() as syncs:
            scope["stop"]()
        found[module] = sum(one.count for one in syncs.findings)
    assert {name: 0, "torch.profilers": 1} == found


def test_synchronizing_function_that_is_a_region(gpu: Gpu) -> None:
    """An annotated torch function that synchronizes counts as the program's synchronization."""
    with detect_syncs() as syncs:
        line = here()
        instrument.annotate("wait")(torch.cuda.synchronize)()
        instrument.annotate("read")(gpu.x.item)()
    lines = [found.site and found.site.line for found in syncs.findings]
    assert {line + 1, line + 2} == set(lines)
