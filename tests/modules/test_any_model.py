"""Random models: the regions are the modules called, and training is unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import instrument
from tests.modules.conftest import AttachEmitter
from tests.support.calls import Calls, Trees

WIDTH = 3


@dataclass(frozen=True)
class Shape:
    """The kind of a module in a random model, and the modules inside it."""

    kind: str
    inner: tuple[Shape, ...] = field(default=())


LEAVES = ("linear", "norm", "relu", "inplace", "identity", "dropout", "frozen", "own", "two", "view")
NODES = (
    "chain",
    "residual",
    "branches",
    "before",
    "dict",
    "no_grad",
    "detached",
    "failing",
    "checkpoint",
    "reentrant",
)


class Leaf(nn.Module):
    """A module with computation of its own and no modules inside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "own":
            return (x.pow(2) + self.weight.exp()).tanh()
        if self.kind == "two":
            first, second = (x * self.weight).chunk(2, 0)
            return torch.cat([second, first])
        return (x * self.weight)[:].view(x.shape)


class Node(nn.Module):
    """A module that calls other modules."""

    def __init__(self, kind: str, inner: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.ModuleList(inner)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            found = module(x)
            x = found["out"] if isinstance(found, dict) else found  # a node of kind "dict"
        return x

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "residual":
            return x + self.chain(x.clone())
        if self.kind == "branches":
            return self.chain(x.cos()) + self.chain(x.sin())
        if self.kind == "before":
            return self.chain(x * self.scale) * self.scale
        if self.kind == "dict":
            return {"out": self.chain(x), "other": x}
        if self.kind == "no_grad":
            with torch.no_grad():
                y = self.chain(x.clone())
            return x * y
        if self.kind == "detached":
            return x * self.chain(x.detach().clone())
        if self.kind == "failing":
            with contextlib.suppress(TypeError, AttributeError):
                self.inner[0](None)
            return self.chain(x)
        if self.kind in ("checkpoint", "reentrant"):
            return checkpoint(self.chain, x.clone(), use_reentrant=self.kind == "reentrant")
        return self.chain(x)


def build(shape: Shape) -> nn.Module:
    """Build the module that ``shape`` describes."""
    if shape.kind in NODES:
        return Node(shape.kind, [build(inner) for inner in shape.inner])
    simple = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "relu": nn.ReLU,
        "inplace": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        "identity": nn.Identity,
        "dropout": lambda: nn.Dropout(0.0),
    }
    if shape.kind == "frozen":
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return simple[shape.kind]() if shape.kind in simple else Leaf(shape.kind)


leaf = st.sampled_from(LEAVES).map(Shape)
shapes = st.recursive(
    leaf,
    lambda inner: st.builds(
        lambda kind, found: Shape(kind, tuple(found)),
        st.sampled_from(NODES),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=9,
)


def model_of(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Node("chain", [build(shape)]))


def train(model: nn.Module, leaf_input: bool, call: Callable[..., Any] = lambda run: run()) -> list[Any]:
    torch.manual_seed(1)
    x = torch.randn(2, 2, WIDTH, requires_grad=leaf_input)
    loss = model(x).square().mean()
    call(loss.backward)
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def outline(tree: list[Any], level: int = 0) -> str:
    return "\n".join(
        part for name, *inner in tree for part in ("  " * level + name, outline(inner, level + 1)) if part
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint under no_grad
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, leaf_input=st.booleans())
def test_random_models(attach_emitter: AttachEmitter, shape: Shape, leaf_input: bool) -> None:
    """The regions are the tree of module calls and of their autograd nodes; gradients are bit-identical."""
    expected = train(model_of(shape), leaf_input)
    observed: list[Trees] = []
    with Calls(model := model_of(shape)) as calls:
        for _ in calls.steps([0], observed):
            train(model, leaf_input)
    model = model_of(shape)
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        found = train(model, leaf_input)
    assert same(found, expected)
    assert outline(emitter.tree()) == observed[0].regions
