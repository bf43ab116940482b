"""A detector around windows and torch's own profilers: what these synchronize for themselves is no finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument.config import settings
from instrument.errors import SyncError
from instrument.syncs.live import detect_syncs, no_syncs
from tests.support.gpu_waits import Gpu, gpu, here, shown
from tests.windows.training import recorded

__all__ = ["gpu"]

pytestmark = pytest.mark.native

CPU = [ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's profiler take the GPU for recorded, so that it synchronizes at its end."""
    monkeypatch.setattr(settings, "summary", False)
    start = torch.autograd.profiler.profile._start_trace

    def start_trace(profiler: Any) -> None:
        profiler.use_device = "cuda"
        start(profiler)

    monkeypatch.setattr(torch.autograd.profiler.profile, "_start_trace", start_trace)


def run(folder: Path, body: Callable[[], object] = lambda: None, **options: Any) -> instrument.Profile:
    """Four steps, of which the second and the third are recorded."""
    plan = instrument.schedule("1-2")
    with instrument.profile(folder, schedule=plan, activities=CPU, **options) as prof:
        for _ in range(4):
            torch.ones(3).sum()
            body()
            prof.step()
    return prof


@pytest.mark.parametrize("how", ["error", "budget", "no_syncs"])
def test_the_end_of_a_window(gpu: Gpu, tmp_path: Path, how: str) -> None:
    """It neither raises nor counts in a budget; the window is recorded, and the profiler is off."""
    arguments = {"error": {"level": "error"}, "budget": {"budget": 0}, "no_syncs": {}}[how]
    with detect_syncs(**arguments) as syncs, no_syncs() if how == "no_syncs" else instrument.allow_sync("unused"):
        prof = run(tmp_path)
        assert not torch.autograd._profiler_enabled()
    assert gpu.synchronized
    assert ["recorded"] == [window["status"] for window in prof.windows]
    assert [[1, 2]] == recorded(tmp_path)
    assert ([], []) == (syncs.findings, syncs.report.exceeded)


@pytest.mark.parametrize("how", ["error", "budget", "no_syncs"])
def test_the_end_of_a_profiler_of_torchs(gpu: Gpu, how: str) -> None:
    """A block of the user's own ends as without a detector."""
    arguments = {"error": {"level": "error"}, "budget": {"budget": 0}, "no_syncs": {}}[how]
    with detect_syncs(**arguments) as syncs, no_syncs() if how == "no_syncs" else instrument.allow_sync("unused"):
        with torch.profiler.profile(activities=CPU) as prof:
            torch.ones(3).sum()
        assert not torch.autograd._profiler_enabled()
    assert 1 == gpu.synchronized
    assert ([], []) == (syncs.findings, syncs.report.exceeded)
    prof.profiler.use_device = None  # there is no GPU in the events
    assert "aten::sum" in {event.name for event in prof.events()}


def test_waits_inside_a_window_are_found(gpu: Gpu, tmp_path: Path) -> None:
    """Those of the program stay findings, also the synchronization of its `on_trace_ready`."""

    def ready(_: object) -> None:
        torch.cuda.synchronize()

    with detect_syncs(every=1) as syncs:
        line = here() + 1
        prof = run(tmp_path, lambda: (gpu.x.item(), torch.cuda.synchronize()), on_trace_ready=ready)
    expected = [("synchronize", ready.__code__.co_firstlineno + 1, 1), ("item", line, 4), ("synchronize", line, 4)]
    assert expected == shown(syncs.findings)
    assert ["recorded"] == [window["status"] for window in prof.windows]


def test_an_error_for_a_wait_inside_a_window(gpu: Gpu, tmp_path: Path) -> None:
    """It reaches the loop, and the profiler is off."""
    with pytest.raises(SyncError, match=r"gpu\.x\.item\(\)"), detect_syncs("error"):
        run(tmp_path, lambda: gpu.x.item())
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("name", ["torch.autograd.profiler", "torch.profiler._cupti_monitor", "instrument.gpu"])
@pytest.mark.parametrize("what", ["stream", "device"])
def test_waits_that_only_torch_tells_of(gpu: Gpu, name: str, what: str) -> None:
    """Where no wrapper saw the call, the module of its frame decides."""
    gpu.configure(what=what)
    found = {}
    for module in (name, "torch.profilers"):
        scope: dict[str, Any] = {"__name__": module, "wait": gpu.x.item}
        exec("def stop(): wait()", scope)
        with detect_syncs() as syncs:
            scope["stop"]()
        found[module] = sum(one.count for one in syncs.findings)
    assert {name: 0, "torch.profilers": 1} == found


def test_a_wait_in_a_region_of_its_own(gpu: Gpu) -> None:
    """A function of torch's that is annotated itself waits for the program, not for this library."""
    with detect_syncs() as syncs:
        line = here()
        instrument.annotate("wait")(torch.cuda.synchronize)()
        instrument.annotate("read")(gpu.x.item)()
    lines = [found.site and found.site.line for found in syncs.findings]
    assert {line + 1, line + 2} == set(lines)
