"""Fixtures for every test: internal errors are raised, and nothing of ours stays live after a test."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instrument.base.config import settings
from instrument.record.exporters.sessions import sessions
from instrument.record.handover.finishing_process import FinishingProcess
from instrument.record.regions import annotation, dispatch
from instrument.record.windows.schedule_follower import running_profiles
from tests.support.browser import browser, open_page
from tests.support.finishing import started, unfinished
from tests.support.simulated_gpu import gpu_values, only_values_that_are_computed

__all__ = ["browser", "gpu_values", "only_values_that_are_computed", "open_page"]

# DeepSpeed, which other packages import, chooses once for the process and takes "cuda" for its default.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# The models of the tests are small, and several workers share the cores: more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# A job in the background ignores these, and programs inherit that; tests send them.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

# The same examples in every run, so that a failure is of the change and not of the day. To look for new ones:
# pytest --hypothesis-profile=default
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="module")
def frozen() -> set[str]:
    """Keep what is imported so far, up to a million objects, out of collections and searches for objects."""
    gc.collect()
    gc.freeze()
    return {*sys.modules}


@pytest.fixture(autouse=True)
def frozen_imports(frozen: set[str]) -> None:
    """Do so again after a test that imported a large package: with that, each dry run searches for 0.2 s more."""
    if len(sys.modules) > len(frozen) + 100:
        gc.collect()
        gc.freeze()
        frozen.update(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, which takes two seconds and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure() -> None:
    """Let the processes of each worker of pytest-xdist share a simulated GPU, and not those of all workers."""
    worker, shared = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("SIMGPU_SHARED")
    if worker and shared and (simulated := sys.modules.get("simgpu_boot")):
        os.environ["SIMGPU_SHARED"] = f"{shared}.{worker}"
        simulated.renew()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that open pages, and skip what needs a GPU if there is none."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU that torch can use"))


@pytest.fixture(scope="session", autouse=True)
def noted_processes() -> Iterator[None]:
    """Note each finishing process, also that of a fixture of a module, for `strict`."""
    begin = FinishingProcess.__init__

    def noted(process: FinishingProcess, folder: Path, *arguments: Any) -> None:
        begin(process, folder, *arguments)
        started[process] = folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinishingProcess, "__init__", noted)
        yield


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise internal errors, and fail a test that leaves a profiler, an emitter or a finishing process live."""
    assert annotation.annotate  # follows torch's profilers from here on
    monkeypatch.setattr(settings, "strict", True)
    dispatch.compiled_away.clear()
    dispatch._logged.clear()
    yield
    for running in list(running_profiles):  # loops of `steps` that may go on until the process ends
        running.abandon("the test is over")
    finishing = unfinished()
    unclosed = [left for left in finishing if left.takes_jobs]
    for left in finishing:
        left.end(30)
    assert not unclosed
    ends = [str(left.ended) for left in finishing]
    assert not [end for end in ends if end.startswith(("None", "was abandoned", "was killed"))]
    assert not torch.autograd._profiler_enabled()
    assert sessions.capture is None
    assert not dispatch.recording
    assert dispatch.active.warm_up_count == 0


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contain internal errors, as for users."""
    monkeypatch.setattr(settings, "strict", False)


Events = list[dict[str, Any]]


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Events]:
    """Run a function under torch.profiler and return its user annotations, in order of their start."""

    def run(function: Callable[[], object], category: str = "user_annotation") -> Events:
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            function()
        path = tmp_path / "trace.json"
        prof.export_chrome_trace(str(path))
        return annotations(path, category)

    return run


def annotations(path: Path, category: str = "user_annotation") -> Events:
    """Return the complete events of ``category`` in a trace, in order of their start."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    chosen = [event for event in events if event.get("cat") == category and event["ph"] == "X"]
    return sorted(chosen, key=lambda event: (event["ts"], -event["dur"]))
