"""Modules as regions on a GPU, whose backward runs on a thread of the engine's own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument

from ..support.net import Net
from .conftest import Heard, Listening

pytestmark = pytest.mark.gpu


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


class Threads(Heard):
    """Notes the thread of each event."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, set[int]] = {}

    def start(self, region: Any) -> str:
        self.threads.setdefault(region.name, set()).add(threading.get_ident())
        return self.push(region)


def test_backward_on_the_engines_thread(listening: Listening) -> None:
    """The regions of a backward nest on the thread that the engine runs the GPU's nodes on."""
    model, x = model_and_batch()
    with instrument.annotate_modules(model), listening() as heard:
        threads = Threads()
        heard.start = threads.start  # type: ignore[method-assign]
        threads.events, threads.regions = heard.events, heard.regions
        for _ in range(3):
            step(model, x)
    assert heard.tree() == [FORWARD, BACKWARD] * 3
    (thread,) = set.union(*threads.threads.values())
    assert thread != threading.get_ident()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(listening: Listening, dtype: torch.dtype) -> None:
    """Loss, gradients and weights are bit-identical to those without us, over three steps with a window on one."""

    def train(annotated: bool) -> list[Tensor]:
        model, x = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        handle = instrument.annotate_modules(model) if annotated else contextlib.nullcontext()
        numbers = []
        with handle:
            for number in range(3):
                with listening() if number == 1 else contextlib.nullcontext():
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


def captured(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, with its loss, after the steps on a stream beside that torch asks for."""
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


def test_graph_captured_in_a_window(listening: Listening) -> None:
    """A step of an annotated model is captured in a window, and replays with the numbers it has without us."""
    plain, x = model_and_batch()
    unseen, expected = captured(plain, x)
    unseen.replay()
    model, static = model_and_batch()
    with instrument.annotate_modules(model), listening() as heard:
        graph, loss = captured(model, static)
        assert heard.tree() == [FORWARD, BACKWARD] * 4  # three before the capture
        heard.events.clear()
        graph.replay()
        torch.cuda.synchronize()
        assert not heard.events
        assert torch.equal(loss, expected)
    graph.replay()  # after the window
    torch.cuda.synchronize()
    assert torch.equal(loss, expected)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_window_on_a_captured_graph(listening: Listening) -> None:
    """A window around replays of a graph from before it hears nothing and changes nothing."""
    model, x = model_and_batch()
    with instrument.annotate_modules(model):
        graph, loss = captured(model, x)
        graph.replay()
        expected = loss.clone()
        with listening() as heard:
            graph.replay()
        assert torch.equal(loss, expected)
        assert not heard.events


@pytest.mark.parametrize("owner", [torch.cuda, torch.cuda.graphs])
def test_graphed_callables_in_a_window(listening: Listening, owner: Any) -> None:
    """`make_graphed_callables` accepts an annotated model in a window, under both of its names."""
    plain, x = model_and_batch()
    expected = step(plain, x)
    model, _ = model_and_batch()
    with instrument.annotate_modules(model), listening() as heard:
        graphed = owner.make_graphed_callables(model, (x.clone(),))
        assert not heard.events  # there are no hooks meanwhile
        loss = step(graphed, x)
        assert heard.tree()
    torch.testing.assert_close(loss, expected)


def test_graphed_callables(listening: Listening) -> None:
    """`make_graphed_callables` accepts an annotated model between windows, which then runs in one."""
    plain, x = model_and_batch()
    expected = step(plain, x)
    model, _ = model_and_batch()
    with instrument.annotate_modules(model):
        graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
        with listening() as heard:
            loss = step(graphed, x)
            assert heard.tree()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
