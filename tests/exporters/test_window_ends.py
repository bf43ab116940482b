"""The end of a window waits for the GPU's work; errors there do not keep the window open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument.record.exporters.torch_profiler import TorchProfilerExporter
from instrument.record.exporters.vendor_tools import NsightSystemsCapture, RocprofCapture

from ..windows.training import recorded

EXPORTERS = ["torch_profiler", "nsight_systems", "rocprof"]
FAILED = "the GPU could not be synchronized when the window ended, so kernels may be missing: "


class LoggedGpu:
    """Emulates `torch.cuda` and a tool, and logs the synchronizations and the tool's starts and stops in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.error: BaseException | None = None
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "_initialized", True)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True, raising=False)
        monkeypatch.setattr(cuda.profiler, "start", lambda: self.log.append("begin"))
        monkeypatch.setattr(cuda.profiler, "stop", lambda: self.log.append("end"))
        profile = torch.autograd.profiler.profile
        start, disable = profile._start_trace, torch.autograd.profiler._disable_profiler

        def start_trace(profiler: Any) -> None:
            profiler.use_device = "cuda"
            start(profiler)
            self.log.append("begin")

        monkeypatch.setattr(profile, "_start_trace", start_trace)
        monkeypatch.setattr(
            torch.autograd.profiler, "_disable_profiler", lambda: self.log.append("end") or disable()
        )

    def _synchronize(self, device: object = None) -> None:
        self.log.append("synchronize")
        if self.error is not None:
            raise self.error

    def exporter(self, name: str) -> Any:
        """Return the exporter ``name``, with a tool that writes to ``log``."""
        if name == "torch_profiler":
            return TorchProfilerExporter({"activities": [ProfilerActivity.CPU]})
        tool: Any = SimpleNamespace(
            start=lambda region: region.name, end=lambda range: None, mark=lambda region: None
        )
        if name == "nsight_systems":
            tool.end = lambda range: self.log.append("closed") if range == "capture" else None
            return exporter_of(name, lambda: NsightSystemsCapture(tool))
        calls = {word: lambda thread, word=word: self.log.append(word) for word in ("begin", "end")}
        return exporter_of(name, lambda: RocprofCapture(self._ranges(), calls["begin"], calls["end"]))

    def _ranges(self) -> Any:
        """Return an emitter that logs the end of the capture range."""

        def end(name: str) -> None:
            if name == "capture":
                self.log.append("closed")

        return SimpleNamespace(start=lambda region: region.name, end=end, mark=lambda region: None)


def exporter_of(name: str, capture: Callable[[], Any]) -> Any:
    return SimpleNamespace(name=name, hint="", prepare=lambda: None, capture=capture)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LoggedGpu:
    return LoggedGpu(monkeypatch)


def run(folder: Path, exporter: Any) -> list[tuple[str, str | None]]:
    """Run four steps and record the second and the third; return the status and reason of each window."""
    with instrument.profile(folder, schedule=instrument.schedule("1-2"), exporter=exporter) as prof:
        for _ in range(4):
            torch.ones(3).sum()
            prof.step()
    return [(window["status"], window["reason"]) for window in prof.windows]


def without_repetitions(log: list[str]) -> list[str]:
    """Remove the second synchronization, made by torch's profiler itself, and the end of nsys' capture range."""
    return [word for at, word in enumerate(log) if word != "closed" and log[at - 1 : at] != [word]]


@pytest.mark.parametrize("name", EXPORTERS)
def test_the_gpu_is_synchronized_before_the_tool_stops(gpu: LoggedGpu, tmp_path: Path, name: str) -> None:
    """The window contains kernels that were still running at its end."""
    assert [("recorded", None)] == run(tmp_path, gpu.exporter(name))
    assert ["begin", "synchronize", "end"] == without_repetitions(gpu.log)


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_error_of_the_gpu(gpu: LoggedGpu, tmp_path: Path, name: str) -> None:
    """The error is the reason why the window may lack kernels, and is not raised in the program."""
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")
    reason = f"{FAILED}RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [("partial", reason)] == run(tmp_path, gpu.exporter(name))
    assert ["begin", "synchronize", "end"] == without_repetitions(gpu.log)
    assert not torch.autograd._profiler_enabled()
    if name == "torch_profiler":
        assert [[1, 2]] == recorded(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", EXPORTERS)
def test_an_interrupt_at_the_end(gpu: LoggedGpu, tmp_path: Path, name: str, error: type[BaseException]) -> None:
    """An interrupt reaches the program with no profiler left active; the next window is recorded."""
    gpu.error = error()
    with pytest.raises(error):
        run(tmp_path / "first", gpu.exporter(name))
    assert "end" in gpu.log
    assert name != "nsight_systems" or 1 == gpu.log.count("closed")
    assert not torch.autograd._profiler_enabled()
    gpu.error = None
    assert [("recorded", None)] == run(tmp_path / "second", gpu.exporter(name))


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_gpu_that_is_not_in_use(
    gpu: LoggedGpu, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unused GPU is not synchronized, since that would initialize it."""
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    assert [("recorded", None)] == run(tmp_path, gpu.exporter(name))
    assert "synchronize" not in gpu.log


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_graph_capture_at_the_end(
    gpu: LoggedGpu, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a graph capture, which a synchronization would invalidate, the window ends with a reason instead."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    exporter = gpu.exporter(name)
    capture = exporter.capture()
    capture.start()
    capture.step(1)
    capture.step(None)
    capture.stop()
    assert "synchronize" not in gpu.log
    reason = "a CUDA graph was captured when the window ended: kernels that still ran may be missing"
    assert [reason] == capture.incomplete


def test_an_interrupt_while_torchs_profiler_stops(
    gpu: LoggedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while the GPU is waited for leaves no profiler active."""

    def synchronize(device: object = None) -> None:
        gpu.log.append("synchronize")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, gpu.exporter("torch_profiler"))
    assert ["begin", "synchronize", "end"] == gpu.log
    assert not torch.autograd._profiler_enabled()


@pytest.mark.gpu
def test_kernels_that_still_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is complete when cudaProfilerStop is called, although the loop runs ahead of the GPU."""
    done: list[tuple[bool, bool]] = []
    ahead: list[bool] = []
    stop = torch.cuda.profiler.stop

    def check_and_stop() -> None:
        done.append((ahead[-1], torch.cuda.current_stream().query()))
        stop()

    monkeypatch.setattr(torch.cuda.profiler, "stop", check_and_stop)
    torch.ones(1).cuda()
    no_tool: Any = SimpleNamespace(start=lambda region: 1, end=lambda range: None, mark=lambda region: None)
    nsys = exporter_of(
        "nsight_systems", lambda: NsightSystemsCapture(no_tool)
    )  # the exporter by name needs a running tool
    with instrument.profile(tmp_path, schedule=instrument.schedule(at=1), exporter=nsys) as prof:
        for _ in range(3):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            ahead.append(not torch.cuda.current_stream().query())
            prof.step()
    assert [(True, True)] == done
    assert ["recorded"] == [window["status"] for window in prof.windows]
