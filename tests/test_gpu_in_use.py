"""Tests of `instrument.base.compat.gpu`: detection, synchronization and capture state of the GPU in use."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from instrument.base.compat import gpu
from instrument.record import gpu_wait


def test_no_gpu_is_in_use_before_its_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query initializes nothing, and imports no torch."""

    def fail() -> None:
        raise AssertionError("initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    assert gpu.in_use() is None
    assert not gpu.current_stream_capturing()
    monkeypatch.delitem(sys.modules, "torch")
    assert gpu.in_use() is None


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_an_initialized_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The torch module of the device is returned, also for a vendor's extension."""
    module = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: kind == "cuda")
    monkeypatch.setattr(torch, kind, module, raising=False)
    assert gpu.in_use() is module
    assert gpu.current_stream_capturing() == (kind == "cuda")


def test_only_the_gpu_in_use_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the GPU in use is synchronized; an error gives a one-line reason, and an interrupt passes."""
    calls: list[str] = []
    module = SimpleNamespace(is_initialized=lambda: False, synchronize=lambda: calls.append("xpu"))
    monkeypatch.setattr(torch, "xpu", module, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("cuda"))
    assert ([], []) == (gpu_wait.synchronize(), calls)
    module.is_initialized = lambda: True
    assert ([], ["xpu"]) == (gpu_wait.synchronize(), calls)
    module.is_current_stream_capturing = lambda: True
    (reason,) = gpu_wait.synchronize()
    assert reason.startswith("a CUDA graph was captured")
    assert ["xpu"] == calls

    def fail(error: BaseException) -> None:
        raise error

    module.is_current_stream_capturing = lambda: fail(RuntimeError("an error of the GPU"))  # nothing is captured
    assert ([], ["xpu"] * 2) == (gpu_wait.synchronize(), calls)
    module.synchronize = lambda: fail(RuntimeError("one\ntwo"))
    (reason,) = gpu_wait.synchronize()
    assert reason.endswith(": RuntimeError: one")
    module.is_current_stream_capturing = lambda: fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        gpu_wait.synchronize()


def test_a_wait_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at exit since Python 3.12: the GPU is waited for unless an error ended the program."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    calls: list[str] = []
    module = SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: calls.append("xpu"))
    monkeypatch.setattr(torch, "xpu", module, raising=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert ([], ["xpu"]) == (gpu_wait.synchronize(), calls)
    monkeypatch.setattr(sys, "last_value", ValueError("mine"), raising=False)
    (reason,) = gpu_wait.synchronize()
    assert reason.startswith("the GPU was not waited for, as the program ended with an error")
    assert ["xpu"] == calls


def test_kinds_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries for CUDA give nothing for another kind of GPU or a build for another kind."""
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_initialized=lambda: True), raising=False)
    for platform in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, platform, None, raising=False)
    assert (gpu.initialized("xpu"), gpu.initialized("cuda"), gpu.initialized("npu")) == (torch.xpu, None, None)
    assert (gpu.built_for_cuda(), gpu.supported()) == (False, False)
    monkeypatch.setattr(torch.version, "xpu", "20250201")
    assert (gpu.built_for_cuda(), gpu.supported()) == (False, True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu.built_for_cuda()


@pytest.mark.gpu
def test_a_capture_on_a_gpu() -> None:
    """A graph capture is detected only inside it."""
    weight = torch.ones(1, device="cuda")
    assert gpu.in_use() is torch.cuda
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)  # torch warns about empty graphs
        inside = gpu.current_stream_capturing()
    assert (inside, gpu.current_stream_capturing()) == (True, False)


@pytest.mark.gpu
def test_a_capture_is_not_synchronized_on_a_gpu(gpu_values: None) -> None:
    """`synchronize` leaves a capture intact, and the graph can be replayed."""
    x = torch.ones(8, device="cuda")
    y = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        (reason,) = gpu_wait.synchronize()
    graph.replay()
    assert reason.startswith("a CUDA graph was captured")
    assert [] == gpu_wait.synchronize()
    assert [2.0] * 8 == y.tolist()
