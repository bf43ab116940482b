"""What the program did with its GPU so far."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from instrument import gpu


def test_nothing_is_in_use_before_the_program_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask does not initialize; nor does it without torch."""

    def fail() -> None:
        raise AssertionError("initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    assert gpu.in_use() is None
    assert not gpu.capturing()
    monkeypatch.delitem(sys.modules, "torch")
    assert gpu.in_use() is None


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_what_was_initialized_is_in_use(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The module itself is returned, also that of a vendor's extension."""
    module = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: kind == "cuda")
    monkeypatch.setattr(torch, kind, module, raising=False)
    assert gpu.in_use() is module
    assert gpu.capturing() == (kind == "cuda")


@pytest.mark.gpu
def test_a_capture_on_a_gpu() -> None:
    """A graph's capture is seen from inside of it alone."""
    weight = torch.ones(1, device="cuda")
    assert gpu.in_use() is torch.cuda
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)  # torch warns of a graph that is empty
        inside = gpu.capturing()
    assert (inside, gpu.capturing()) == (True, False)
