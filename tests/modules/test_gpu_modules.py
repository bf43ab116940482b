"""Modules as regions on a GPU, whose backward runs on an autograd thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument

from ..support.net import Net
from .conftest import AttachEmitter, RecordingEmitter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # torch 2.14, of make_graphed_callables
]


FORWARD = ["Net", ["a", ["a.lin"], ["a.act"]], ["b", ["b.lin"], ["b.act"]]]
BACKWARD = [
    "Net (backward)",
    ["b (backward)", ["b.act (backward)"], ["b.lin (backward)"]],
    ["a (backward)", ["a.act (backward)"], ["a.lin (backward)"]],
]


def model_and_batch() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(64).cuda(), torch.randn(32, 64).cuda()


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


class ThreadRecordingEmitter(RecordingEmitter):
    """Records the thread of each event."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, set[int]] = {}

    def start(self, region: Any) -> str:
        self.threads.setdefault(region.name, set()).add(threading.get_ident())
        return self.push(region)


def test_backward_on_an_autograd_thread(attach_emitter: AttachEmitter) -> None:
    """Backward regions nest on the autograd thread that runs the GPU's nodes."""
    model, x = model_and_batch()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        threads = ThreadRecordingEmitter()
        emitter.start = threads.start  # type: ignore[method-assign]
        threads.events, threads.regions = emitter.events, emitter.regions
        for _ in range(3):
            step(model, x)
    assert emitter.tree() == [FORWARD, BACKWARD] * 3
    (thread,) = set.union(*threads.threads.values())
    assert thread != threading.get_ident()


@pytest.mark.usefixtures("gpu_values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(attach_emitter: AttachEmitter, dtype: torch.dtype) -> None:
    """Loss, gradients and weights of three steps are bit-identical, with a window on one of them."""

    def train(annotated: bool) -> list[Tensor]:
        model, x = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        handle = instrument.annotate_modules(model) if annotated else contextlib.nullcontext()
        numbers = []
        with handle:
            for number in range(3):
                with attach_emitter() if number == 1 else contextlib.nullcontext():
                    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
                        loss = model(x).float().square().mean()
                    loss.backward()
                    optimizer.step()
                numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
                numbers += [p.detach().clone() for p in model.parameters()]
                optimizer.zero_grad()
        return numbers

    without, within = train(False), train(True)
    assert all(torch.equal(one, other) for one, other in zip(without, within, strict=True))


def capture_graph(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step as a CUDA graph, after the warm-up on a side stream; return the graph and its loss."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, x)
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, x)
    return graph, loss


@pytest.mark.usefixtures("gpu_values")
def test_graph_captured_in_a_window(attach_emitter: AttachEmitter) -> None:
    """A step captured in a window replays with the same numbers as one of an unannotated model."""
    plain, x = model_and_batch()
    unseen, expected = capture_graph(plain, x)
    unseen.replay()
    model, static = model_and_batch()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        graph, loss = capture_graph(model, static)
        assert emitter.tree() == [FORWARD, BACKWARD] * 4  # three before the capture
        emitter.events.clear()
        graph.replay()
        torch.cuda.synchronize()
        assert not emitter.events
        assert torch.equal(loss, expected)
    graph.replay()  # after the window
    torch.cuda.synchronize()
    assert torch.equal(loss, expected)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.usefixtures("gpu_values")
def test_window_around_graph_replays(attach_emitter: AttachEmitter) -> None:
    """A window around replays of an earlier graph shows no regions and changes nothing."""
    model, x = model_and_batch()
    with instrument.annotate_modules(model):
        graph, loss = capture_graph(model, x)
        graph.replay()
        expected = loss.clone()
        with attach_emitter() as emitter:
            graph.replay()
        assert torch.equal(loss, expected)
        assert not emitter.events


@pytest.mark.usefixtures("gpu_values")
@pytest.mark.parametrize("owner", [torch.cuda, torch.cuda.graphs])
def test_graphed_callables_in_a_window(attach_emitter: AttachEmitter, owner: Any) -> None:
    """`make_graphed_callables` accepts an annotated model in a window, by either of its names."""
    plain, x = model_and_batch()
    expected = step(plain, x)
    model, _ = model_and_batch()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        graphed = owner.make_graphed_callables(model, (x.clone(),))
        assert not emitter.events  # hooks are removed meanwhile
        loss = step(graphed, x)
        assert emitter.tree()
    torch.testing.assert_close(loss, expected)


@pytest.mark.usefixtures("gpu_values")
def test_graphed_callables_between_windows(attach_emitter: AttachEmitter) -> None:
    """`make_graphed_callables` accepts an annotated model between windows; a window then shows its regions."""
    plain, x = model_and_batch()
    expected = step(plain, x)
    model, _ = model_and_batch()
    with instrument.annotate_modules(model):
        graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
        with attach_emitter() as emitter:
            loss = step(graphed, x)
            assert emitter.tree()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
