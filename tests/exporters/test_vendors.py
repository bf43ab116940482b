"""Windows recorded by vendors' tools: the calls that start and stop each tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import instrument
from instrument.record.exporters.exporter import EXPORTERS, choose
from tests.support import native

pytestmark = pytest.mark.vendor

TRAIN = """
    import sys
    from instrument import annotate, profile, schedule

    with profile(sys.argv[1], schedule=schedule(wait=1, active=2, repeat=2)) as prof:
        for step in range(7):
            with annotate("forward"):
                if step == 4 and "raise" in sys.argv:
                    raise SystemExit
            prof.step()
"""
UNDER_ROCPROF = {"ROCP_TOOL_LIBRARIES": "librocprofiler-sdk-tool.so"}
VARIABLES = {
    "nsight_systems": "NSYS_PROFILING_SESSION_ID", "nsight_compute": "NV_TPS_LAUNCH_TOKEN",
    "rocprof": "ROCP_TOOL_LIBRARIES", "vtune": "INTEL_LIBITTNOTIFY64",
}  # fmt: skip


OPENING = ("call", "push", "start")  # operations in an NVTX log


def manifest(folder: Path) -> list[tuple[Any, ...]]:
    entries = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return [(entry["exporter"], entry["status"], entry["steps"], entry["reason"]) for entry in entries]


@pytest.mark.native
@pytest.mark.parametrize("how", ["preload", "ld_library_path"])
def test_rocprofv3_is_resumed_for_each_window(tmp_path: Path, how: Any) -> None:
    """The steps of a window lie between roctxProfilerResume(0) and roctxProfilerPause(0)."""
    libraries = ["libroctx64.so.4"] if how == "preload" else ["librocprofiler-sdk-roctx.so.1", "libroctx64.so.4"]
    events = native.roctx_log(TRAIN, how=how, libraries=libraries, env=UNDER_ROCPROF, args=[str(tmp_path)])
    assert {"preload" if how == "preload" else libraries[0]} == {event["library"] for event in events}
    shown = [event.get("message") or event.get("thread", event["op"]) for event in events if event["op"] != "pop"]
    window = [0, "ProfilerStep#{}", "forward", "end", "ProfilerStep#{}", "forward", "end", 0]
    first, second = ([str(part).format(step) for part, step in zip(window, steps, strict=True)] for steps in (
        (0, 1, 0, 0, 2, 0, 0, 0), (0, 4, 0, 0, 5, 0, 0, 0)))  # fmt: skip
    assert ["forward", *first, "forward", *second, "forward"] == [str(part) for part in shown]
    assert ["resume", "pause"] * 2 == [event["op"] for event in events if "thread" in event]
    recorded = [("rocprof", "recorded", steps, None) for steps in ([1, 2], [4, 5])]
    assert recorded == manifest(tmp_path)


@pytest.mark.native
def test_an_exception_pauses_rocprofv3(tmp_path: Path) -> None:
    """After an exception rocprofv3 is paused and all ranges are closed."""
    events = native.roctx_log(TRAIN, env=UNDER_ROCPROF, args=[str(tmp_path), "raise"])
    assert ["resume", "pause"] * 2 == [event["op"] for event in events if "thread" in event]
    assert 5 + 3 == len(native.ranges(events))  # regions and steps, all closed
    assert ("rocprof", "partial") == manifest(tmp_path)[1][:2]


@pytest.mark.native
def test_a_library_that_cannot_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows are skipped with the reason; regions are still shown."""
    library = native.build("roctxlog", 'LIBRARY_NAME="old"', "NO_PROFILER")
    env = {**UNDER_ROCPROF, "LD_PRELOAD": str(library)}
    events = native.roctx_log(TRAIN, libraries=[], env=env, args=[str(tmp_path)])
    assert {"push", "pop"} == {event["op"] for event in events}
    reason = "this rocTX library lacks roctxProfilerResume: windows need the library of rocprofiler-sdk"
    assert [("rocprof", "skipped", None, reason)] * 2 == manifest(tmp_path)


@pytest.mark.native
def test_vtune_is_resumed_for_each_window(tmp_path: Path) -> None:
    """Tasks of the steps and regions of a window lie between resume and pause."""
    pytest.importorskip("ittapi")
    events = native.itt_log(TRAIN, args=[str(tmp_path)])
    chosen = ("pause", "resume", "task_begin", "overlapped_begin", "overlapped_end")
    shown = [event.get("message") or event["op"] for event in events if event["op"] in chosen]
    step = ["step", "forward", "overlapped_end"]
    window = ["resume", *step, *step, "pause"]
    assert ["forward", *window, "forward", *window, "forward"] == shown
    assert {"instrument"} == {
        event["domain"] for event in events if event.get("message") == "step" and event.get("domain")
    }
    assert [("vtune", "recorded", steps, None) for steps in ([1, 2], [4, 5])] == manifest(tmp_path)


class FakeCuda:
    """Replaces `torch.cuda` and records the calls of its profiler functions."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.used = False
        self.profiler = SimpleNamespace(
            start=lambda: self.calls.append("start"), stop=lambda: self.calls.append("stop")
        )

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used


def test_ncu_measures_between_start_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window before the first use of CUDA is skipped with the reason: the call would choose a device."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    with instrument.profile(
        tmp_path, schedule=instrument.schedule(at=[0, 2, 4]), exporter="nsight_compute"
    ) as prof:
        for step in range(5):
            cuda.used = step >= 1
            cuda.calls.append(str(step))
            prof.step()
    assert ["0", "1", "start", "2", "stop", "3", "start", "4", "stop"] == cuda.calls
    reason = "CUDA was not used before the window: leave a step before it (wait, warmup)"
    assert [
        ("nsight_compute", "skipped", None, reason),
        ("nsight_compute", "recorded", [2, 2], None),
        ("nsight_compute", "recorded", [4, 4], None),
    ] == manifest(tmp_path)


CUDA = """
    import sys
    import torch
    from instrument import annotate, profile, schedule

    weight = torch.ones(1, device="cuda")
    with profile(sys.argv[1], schedule=schedule(at=1), exporter=sys.argv[2]) as prof:
        for _ in range(3):
            with annotate("forward"):
                weight.add_(1)
            prof.step()
"""


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize(("name", "window"), [
    ("nsight_compute", ["cudaProfilerStart", "forward", "cudaProfilerStop"]),
    ("nsight_systems", ["capture", "cudaProfilerStart", "step", "forward", "cudaProfilerStop"]),
])  # fmt: skip
def test_the_calls_to_the_cuda_runtime_around_a_window(tmp_path: Path, name: str, window: list[str]) -> None:
    """Torch calls cudaProfilerStart and cudaProfilerStop of the runtime exactly around the recorded step."""
    env = {"LD_PRELOAD": str(native.build("cudaprofilerlog"))}
    events = native.nvtx_log(CUDA, env=env, args=[str(tmp_path), name])
    shown = [event.get("function") or event["message"] for event in events if event["op"] in OPENING]
    assert ["forward", *window, "forward"] == [text for text in shown if text in {*window, "forward"}]
    assert [(name, "recorded", [1, 1], None)] == manifest(tmp_path)


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NV_COMPUTE_PROFILER_PERFWORKS_DIR")
    for variable in (*VARIABLES.values(), *others, "ROCPROF_OUTPUT_PATH"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("without_tools")
def test_the_exporter_is_chosen_by_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` chooses by the environment variables of the tools; by name, each exporter is available anywhere."""
    monkeypatch.setitem(sys.modules, "ittapi", SimpleNamespace())
    monkeypatch.setattr("instrument.record.exporters.vendor_tools.RoctxEmitter", SimpleNamespace)
    monkeypatch.setattr("instrument.record.exporters.vendor_tools.load_roctx", lambda: None)
    assert {"torch_profiler", "none", *VARIABLES} == set(EXPORTERS)
    assert "torch_profiler" == choose("auto", {}).name
    for name, variable in VARIABLES.items():
        assert name == choose(name, {}).name
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert name == choose("auto", {}).name


@pytest.mark.usefixtures("without_tools")
def test_a_missing_package_of_a_tool(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A missing package is an error for an exporter by name; `auto` logs it and uses torch.profiler."""
    monkeypatch.setitem(sys.modules, "ittapi", None)
    with pytest.raises(ImportError, match="ittapi is missing: pip install ittapi"):
        choose("vtune", {})
    monkeypatch.setenv("INTEL_LIBITTNOTIFY64", "collector.so")
    assert "torch_profiler" == choose("auto", {}).name
    assert "windows are recorded by torch.profiler: ittapi is missing" in caplog.text


def test_unknown_exporters() -> None:
    """The error lists the accepted values."""
    with pytest.raises(
        ValueError, match='"exporter" must be "auto", one of torch_profiler, nsight_systems, nsight'
    ):
        choose("perf", {})
    with pytest.raises(TypeError, match='"exporter" must be a name or an object with a method "capture": 3'):
        choose(3, {})  # type: ignore[arg-type]
