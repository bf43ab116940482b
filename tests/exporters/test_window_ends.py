"""A window ends once the GPU has done what was launched in it; nothing that fails there keeps it open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import instrument
from instrument.exporters.nsight_systems import NsightSystemsCapture
from instrument.exporters.torch_profiler import TorchProfilerExporter
from instrument.exporters.vendor_tools import RocprofCapture

from ..windows.training import recorded

EXPORTERS = ["torch_profiler", "nsight_systems", "rocprof"]
FAILED = "the GPU could not be synchronized where the window ended, so kernels may be missing: "


class Gpu:
    """What `torch.cuda` is asked at the end of a window, and what the tool is told there, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.error: BaseException | None = None
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "_initialized", True)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(cuda.profiler, "start", lambda: self.told.append("begin"))
        monkeypatch.setattr(cuda.profiler, "stop", lambda: self.told.append("end"))
        profile = torch.autograd.profiler.profile
        start, disable = profile._start_trace, torch.autograd.profiler._disable_profiler

        def start_trace(profiler: Any) -> None:
            profiler.use_device = "cuda"
            start(profiler)
            self.told.append("begin")

        monkeypatch.setattr(profile, "_start_trace", start_trace)
        monkeypatch.setattr(
            torch.autograd.profiler, "_disable_profiler", lambda: self.told.append("end") or disable()
        )

    def _synchronize(self, device: object = None) -> None:
        self.told.append("synchronize")
        if self.error is not None:
            raise self.error

    def exporter(self, name: str) -> Any:
        """The exporter ``name``, which tells ``told`` in place of a tool."""
        if name == "torch_profiler":
            return TorchProfilerExporter({"activities": [ProfilerActivity.CPU]})
        tool: Any = SimpleNamespace(
            start=lambda region: region.name, end=lambda range: None, mark=lambda region: None
        )
        if name == "nsight_systems":
            tool.end = lambda range: self.told.append("closed") if range == "capture" else None
            return made(name, lambda: NsightSystemsCapture(tool))
        calls = {word: lambda thread, word=word: self.told.append(word) for word in ("begin", "end")}
        return made(name, lambda: RocprofCapture(self._ranges(), calls["begin"], calls["end"]))

    def _ranges(self) -> Any:
        """An emitter of which the end of the capture range is listed."""

        def end(name: str) -> None:
            if name == "capture":
                self.told.append("closed")

        return SimpleNamespace(start=lambda region: region.name, end=end, mark=lambda region: None)


def made(name: str, capture: Callable[[], Any]) -> Any:
    return SimpleNamespace(name=name, hint="", prepare=lambda: None, capture=capture)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def run(folder: Path, exporter: Any) -> list[tuple[str, str | None]]:
    """Four steps, of which the second and the third are recorded; the status and reason of each window."""
    with instrument.profile(folder, schedule=instrument.schedule("1-2"), exporter=exporter) as prof:
        for _ in range(4):
            torch.ones(3).sum()
            prof.step()
    return [(window["status"], window["reason"]) for window in prof.windows]


def until_end(told: list[str]) -> list[str]:
    """Without the second synchronization, of torch's profiler itself, and what nsys is told besides."""
    return [word for at, word in enumerate(told) if word != "closed" and told[at - 1 : at] != [word]]


@pytest.mark.parametrize("name", EXPORTERS)
def test_the_gpu_is_synchronized_before_the_tool_is_told(gpu: Gpu, tmp_path: Path, name: str) -> None:
    """Kernels that still run are in the window."""
    assert [("recorded", None)] == run(tmp_path, gpu.exporter(name))
    assert ["begin", "synchronize", "end"] == until_end(gpu.told)


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_error_of_the_gpu(gpu: Gpu, tmp_path: Path, name: str) -> None:
    """It is the reason why the window may lack kernels, and reaches the program at its own next call alone."""
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")
    reason = f"{FAILED}RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [("partial", reason)] == run(tmp_path, gpu.exporter(name))
    assert ["begin", "synchronize", "end"] == until_end(gpu.told)
    assert not torch.autograd._profiler_enabled()
    if name == "torch_profiler":
        assert [[1, 2]] == recorded(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", EXPORTERS)
def test_an_interrupt_at_the_end(gpu: Gpu, tmp_path: Path, name: str, error: type[BaseException]) -> None:
    """It reaches the program, with nothing left on; the next window is recorded."""
    gpu.error = error()
    with pytest.raises(error):
        run(tmp_path / "first", gpu.exporter(name))
    assert "end" in gpu.told
    assert name != "nsight_systems" or 1 == gpu.told.count("closed")
    assert not torch.autograd._profiler_enabled()
    gpu.error = None
    assert [("recorded", None)] == run(tmp_path / "second", gpu.exporter(name))


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_gpu_that_is_not_in_use(gpu: Gpu, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not synchronized, which would initialize it."""
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    assert [("recorded", None)] == run(tmp_path, gpu.exporter(name))
    assert "synchronize" not in gpu.told


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_capture_of_a_graph(gpu: Gpu, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be invalidated, so the GPU is not synchronized, which the window says."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    exporter = gpu.exporter(name)
    capture = exporter.capture()
    capture.start()
    capture.step(1)
    capture.step(None)
    capture.stop()
    assert "synchronize" not in gpu.told
    why = "a CUDA graph was captured where the window ended: kernels that still ran may be missing"
    assert [why] == capture.incomplete


def test_torchs_profiler_is_off_whatever_stopping_it_raises(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is its own synchronization that fails."""

    def synchronize(device: object = None) -> None:
        gpu.told.append("synchronize")
        if gpu.told.count("synchronize") > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, gpu.exporter("torch_profiler"))
    assert ["begin", "synchronize", "synchronize", "end"] == gpu.told
    assert not torch.autograd._profiler_enabled()


@pytest.mark.gpu
def test_kernels_that_still_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is done where cudaProfilerStop is called; a loop that does not synchronize runs ahead before."""
    done: list[tuple[bool, bool]] = []
    ahead: list[bool] = []
    stop = torch.cuda.profiler.stop

    def stopping() -> None:
        done.append((ahead[-1], torch.cuda.current_stream().query()))
        stop()

    monkeypatch.setattr(torch.cuda.profiler, "stop", stopping)
    torch.ones(1).cuda()
    no_tool: Any = SimpleNamespace(start=lambda region: 1, end=lambda range: None, mark=lambda region: None)
    nsys = made(
        "nsight_systems", lambda: NsightSystemsCapture(no_tool)
    )  # by name it would need a tool that listens
    with instrument.profile(tmp_path, schedule=instrument.schedule(at=1), exporter=nsys) as prof:
        for _ in range(3):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            ahead.append(not torch.cuda.current_stream().query())
            prof.step()
    assert [(True, True)] == done
    assert ["recorded"] == [window["status"] for window in prof.windows]
