"""Annotated code under torch.compile: one graph, no recompilation and the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.record.regions import dispatch


@instrument.annotate("scaled")
def scaled(x: torch.Tensor, by: float = 2.0, *, shift: float = 0.0) -> torch.Tensor:
    return (x * by + shift).relu()


def calls(x: torch.Tensor) -> torch.Tensor:
    return scaled(x) + scaled(x, 3.0, shift=1.0)


def blocks(x: torch.Tensor) -> torch.Tensor:
    with instrument.annotate("outer", color="red"):
        for layer in range(2):
            with instrument.annotate(f"layer {layer}"):
                x = x * 2
    instrument.mark("middle")
    return x + 1


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    @instrument.annotate
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with instrument.annotate("linear"):
            return self.linear(x).relu()


@instrument.annotate
class Methods:
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 2

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x + 3


def members(x: torch.Tensor) -> torch.Tensor:
    return Methods.static(x) + Methods.of_class(x) + Methods().method(x)


@instrument.annotate("pieces")
def pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for i in range(3):
        yield x + i


def generator(x: torch.Tensor) -> torch.Tensor:
    total = x
    for piece in pieces(x):
        total = total + piece
    return total


def decorated_inside(x: torch.Tensor) -> torch.Tensor:
    @instrument.annotate("local")
    def local(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    return local(x)


CASES: list[tuple[Callable[..., Any], list[str]]] = [
    (scaled, ["scaled"]),
    (calls, ["scaled"]),
    (blocks, ["layer 0", "layer 1", "middle", "outer"]),
    (Block(), ["Block.forward", "linear"]),
    (torch.nn.Sequential(Block(), Block()), ["Block.forward", "linear"]),
    (members, ["Methods.method", "Methods.of_class", "Methods.static"]),
    (generator, []),
    (decorated_inside, []),
]


@pytest.mark.parametrize(("function", "hidden"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_one_graph(function: Callable[..., Any], hidden: list[str]) -> None:
    """One graph is compiled once, whether windows open or close; hidden regions are noted in the window."""
    torch._dynamo.reset()
    counter = CompileCounter()
    x = torch.randn(4, 4)
    expected = function(x)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    assert torch.equal(compiled(x), expected)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]):
            assert dispatch.recording
            assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1
    assert sorted(dispatch.compiled_away) == hidden


def test_first_compiled_in_a_window() -> None:
    """Code that is compiled while a profiler records is not compiled again when the profiler stops."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(calls, fullgraph=True, backend=counter)
    x = torch.randn(4)
    with profile(activities=[ProfilerActivity.CPU]):
        compiled(x)
    assert torch.equal(compiled(x), calls(x))
    assert counter.frame_count == 1


def test_after_a_graph_break() -> None:
    """An annotated function that Dynamo compiles as a separate frame is compiled once."""
    torch._dynamo.reset()
    counter = CompileCounter()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return scaled(y)

    compiled = torch.compile(broken, backend=counter)
    x = torch.randn(4)
    compiled(x)
    before = counter.frame_count
    with profile(activities=[ProfilerActivity.CPU]):
        assert torch.equal(compiled(x), broken(x))
    assert counter.frame_count == before


def test_inductor_training_step() -> None:
    """The default compiler gives the same loss and gradients with annotations as without."""

    def train(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        loss = torch.compile(model, fullgraph=True)(torch.linspace(-1, 1, 16).view(4, 4)).square().mean()
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    torch._dynamo.reset()
    annotated = Block()
    plain = Block()
    plain.load_state_dict(annotated.state_dict())
    plain.forward = Block.forward.__wrapped__.__get__(plain)  # type: ignore[method-assign]
    for one, other in zip(train(annotated), train(plain), strict=True):
        assert torch.equal(one, other)


def test_wrapped_annotated_function() -> None:
    """A decorator around an annotated function is not bypassed in compiled code."""
    torch._dynamo.reset()
    import functools

    @functools.wraps(scaled)
    def tenfold(x: torch.Tensor) -> torch.Tensor:
        return 10 * scaled(x)

    x = torch.ones(2)
    assert torch.equal(torch.compile(tenfold, fullgraph=True, backend="eager")(x), tenfold(x))
