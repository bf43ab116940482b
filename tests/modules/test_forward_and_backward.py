"""Regions of unusual forwards and backwards, with the same outputs and gradients."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from ..support.net import Block, Net
from .conftest import TreeOf, Window
from .net_runs import B_BACKWARD, FORWARD, LEAVES, A, B, Run, backward_counts, batch, flat, gradients, seeded

pytestmark = pytest.mark.corpus


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.lin(x)
        return self(x, times - 1) if times else x


def test_recursive_module(tree_of: TreeOf) -> None:
    """A module that calls itself has nested regions, one per call, forward and backward."""

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    forward, backward = tree_of(run, Recursive)
    lin, back = ["lin"], ["lin (backward)"]
    name = "Recursive"
    assert forward == [name, lin, [name, lin, [name, lin]]]
    name = "Recursive (backward)"
    assert backward == [name, [name, [name, back], back], back]


def test_module_that_holds_itself(window: Window) -> None:
    """A model that holds itself as a module is annotated once."""
    model = seeded(Recursive)
    model.me = model
    with window(model) as emitter:
        model(batch(), 0)
    assert emitter.tree() == [["Recursive", ["lin"]]]
    del model.me


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(tree_of: TreeOf, mode: Any) -> None:
    """Without gradients there are forward regions only."""

    def run(model: Any) -> list[Tensor | None]:
        with mode():
            return [model(batch())]

    assert tree_of(run) == [FORWARD]


def test_modes_within_a_model(tree_of: TreeOf) -> None:
    """A part of a model that runs without gradients has no backward region; the rest has."""

    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.a(x)
            return self.b(x)

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).sum()
        loss.backward()
        return [loss, *gradients(model)]

    assert tree_of(run, Half) == [["Half", A, B], ["Half (backward)", B_BACKWARD]]


def test_autocast(tree_of: TreeOf) -> None:
    """Regions nest under autocast, which shares cast weights between calls."""

    def run(model: Any) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(model(batch())).float().square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run)
    assert tree[:2] == [FORWARD, FORWARD]
    assert backward_counts(tree) == Counter(dict.fromkeys(LEAVES, 2))


def test_data_parallel(tree_of: TreeOf) -> None:
    """`torch.nn.DataParallel` without a GPU calls the model, which has its regions."""

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, lambda: nn.DataParallel(Net()))
    assert [name for name, _ in flat(tree)][:3] == ["DataParallel", "module", "module.a"]
    assert sum(backward_counts(tree).values()) == 8


@dataclasses.dataclass
class Data:
    first: Tensor
    second: Tensor | None = None


Named = namedtuple("Named", "first second")


class Branches(nn.Module):
    """Returns two outputs in a container."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        return self.pack(self.left(x), self.right(x))


PACKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, [b]], lambda out: (out[0], out[1][0])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: (out["a"], out["b"])),
    "dataclass": (Data, lambda out: (out.first, out.second)),
    "namedtuple": (Named, lambda out: (out.first, out.second)),
    "nested": (
        lambda a, b: {"x": [Data(a), None, "text", (3, b)]},
        lambda out: (out["x"][0].first, out["x"][3][1]),
    ),
}


@pytest.mark.parametrize("use", ["both", "left", "right"])
@pytest.mark.parametrize("kind", PACKS)
def test_outputs(tree_of: TreeOf, kind: str, use: str) -> None:
    """Outputs are unchanged; the parts whose output is used have a backward region."""
    pack, unpack = PACKS[kind]

    def run(model: Any) -> list[Tensor | None]:
        out = model(batch())
        assert type(out) is type(pack(batch(), batch()))
        left, right = unpack(out)
        loss = {"both": lambda: left * right, "left": lambda: left, "right": lambda: right}[use]().square().sum()
        loss.backward()
        return [left, right, loss, *gradients(model)]

    tree = tree_of(run, lambda: Branches(pack))
    parts = {"both": ["left", "right"], "left": ["left"], "right": ["right"]}[use]
    assert backward_counts(tree) == dict.fromkeys(["Branches", "trunk", *parts], 1)
    for name, around in flat(tree):
        if name.endswith("(backward)"):
            assert around == ("" if name.startswith("Branches") else "Branches (backward)")


def accumulated(model: Any) -> list[Tensor | None]:
    for shift in (0, 1):
        (model(batch() + shift).square().sum() / 2).backward()
    return gradients(model)


def together(model: Any) -> list[Tensor | None]:
    loss = sum(model(batch() + shift).square().sum() for shift in (0, 1))
    loss.backward()
    return gradients(model)


def retained(model: Any) -> list[Tensor | None]:
    loss = model(batch()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def leaf_input(model: Any) -> list[Tensor | None]:
    x = batch(grad=True)
    model(x).square().sum().backward()
    return [x.grad, *gradients(model)]


def changed_in_place(model: Any) -> list[Tensor | None]:
    x = model.a(batch()).mul_(2).relu_()
    out = model.b(x)
    out += 1
    out[0].zero_()
    out.sum().backward()
    return gradients(model)


def frozen_start(model: Any) -> list[Tensor | None]:
    model.a.requires_grad_(False)
    model(batch()).square().sum().backward()
    return gradients(model)


def frozen_end(model: Any) -> list[Tensor | None]:
    model.b.requires_grad_(False)
    model(batch()).square().sum().backward()
    return gradients(model)


def gradient_of_input(model: Any) -> list[Tensor | None]:
    x = batch(grad=True)
    return [*torch.autograd.grad(model(x).square().sum(), x)]


def gradient_of_last_weight(model: Any) -> list[Tensor | None]:
    return [*torch.autograd.grad(model(batch()).square().sum(), [model.b.lin.weight])]


def backward_inputs(model: Any) -> list[Tensor | None]:
    model(batch()).square().sum().backward(inputs=[model.a.lin.bias])
    return gradients(model)


def unused_output(model: Any) -> list[Tensor | None]:
    model.a(batch())
    model(batch()).sum().backward()
    return gradients(model)


def penalty(model: Any) -> list[Tensor | None]:
    x = batch(grad=True)
    model.a.act = model.b.act = nn.Tanh()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [x.grad, *gradients(model)]


def on_views(model: Any) -> list[Tensor | None]:
    x = batch()[None].requires_grad_()  # the output of Linear is a view then, which ReLU changes in place
    model(x).square().sum().backward()
    return [x.grad, *gradients(model)]


def several_roots(model: Any) -> list[Tensor | None]:
    middle = model.a(batch())
    torch.autograd.backward([model.b(middle).sum(), middle.square().sum()])
    return gradients(model)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (accumulated, dict.fromkeys(LEAVES, 2)),
        (together, dict.fromkeys(LEAVES, 2)),
        (retained, dict.fromkeys(LEAVES, 2)),
        (leaf_input, dict.fromkeys(LEAVES, 1)),
        (on_views, dict.fromkeys(LEAVES, 1)),
        (changed_in_place, dict.fromkeys(LEAVES[1:], 1)),
        (frozen_start, dict.fromkeys(["Net", "b", "b.lin", "b.act"], 1)),
        (frozen_end, dict.fromkeys(LEAVES, 1)),
        (gradient_of_input, dict.fromkeys(LEAVES, 1)),
        (gradient_of_last_weight, dict.fromkeys(["Net", "b", "b.lin", "b.act"], 1)),
        (backward_inputs, dict.fromkeys(LEAVES, 1)),
        (unused_output, dict.fromkeys(LEAVES, 1)),
        (several_roots, dict.fromkeys(LEAVES[1:], 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_backward(tree_of: TreeOf, run: Run, expected: dict[str, int]) -> None:
    """Each module that takes part in a backward pass has one region in it, inside its parent's."""
    assert backward_counts(tree_of(run)) == Counter(expected)


def test_double_backward(tree_of: TreeOf) -> None:
    """A double backward is bit-identical, and both passes have balanced regions."""
    tree = tree_of(penalty)
    found = backward_counts(tree)
    assert min(found[name] for name in ("Net", "a", "b", "a.lin", "b.lin")) == 2


class Skips(nn.Module):
    """A model with a frozen first and middle module, whose input also goes to the last module."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.drop = nn.Identity()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.stem(x)
        for layer in self.layers:
            y = torch.relu_(self.drop(layer(y)))
        return self.head(torch.cat([x, y], 1))


def test_frozen_in_the_middle(tree_of: TreeOf) -> None:
    """A frozen module has a backward region only if a gradient passes through it."""

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, Skips)
    assert {name for name, _ in flat(tree) if name.endswith("(backward)")} == {
        f"{name} (backward)" for name in ("Skips", "layers.0", "layers.1", "layers.2", "head")
    }
    assert [inner[0] for inner in tree[1][1:]] == [
        f"{name} (backward)" for name in ("head", "layers.2", "layers.1", "layers.0")
    ]


class AuxiliaryLoss(nn.Module):
    """Keeps a loss that its output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.gate(x).square().mean()
        return self.lin(x).relu()


@pytest.mark.parametrize("only", [False, True])
def test_auxiliary_loss(tree_of: TreeOf, only: bool) -> None:
    """An auxiliary loss, such as a router's, has a backward region and leaves the others balanced."""

    def run(model: Any) -> list[Tensor | None]:
        out = model(batch()).square().sum()
        losses = [layer.loss for layer in model]
        loss = sum(losses) if only else out + sum(losses)
        loss.backward()
        for layer in model:
            layer.loss = None
        return [loss, *gradients(model)]

    tree = tree_of(run, lambda: nn.Sequential(AuxiliaryLoss(), AuxiliaryLoss()))
    found = Counter(name for name, _ in flat(tree) if name.endswith("(backward)"))
    assert {"0.gate (backward)", "1.gate (backward)", "0.lin (backward)"} <= set(found)
    assert set(found.values()) == {1}


def test_tied_weights(tree_of: TreeOf) -> None:
    """A weight shared by the first and last module has one gradient, and regions nest."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.body = Block()
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x)))

    def run(model: Any) -> list[Tensor | None]:
        loss = model(torch.tensor([[1, 2], [3, 1]])).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, Tied)
    assert backward_counts(tree) == Counter(["Tied", "embedding", "body", "body.lin", "body.act", "head"])
    assert [inner[0] for inner in tree[1][1:]] == [f"{name} (backward)" for name in ("head", "body", "embedding")]


class BackwardInBackward(torch.autograd.Function):
    """Runs a backward inside its backward, as reentrant checkpoints do."""

    @staticmethod
    def forward(context: Any, x: Tensor, module: nn.Module) -> Tensor:
        context.save_for_backward(x)
        context.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (x,) = context.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(context.module(x), gradient)
        return x.grad, None


def test_backward_inside_a_backward(tree_of: TreeOf) -> None:
    """A backward inside a backward leaves all regions balanced."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = Block()
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(BackwardInBackward.apply(self.first(x), self.inner))

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, Model)
    found = Counter(name for name, _ in flat(tree))
    assert found["inner.lin"] == 2
    for name in ("Model", "first", "last", "inner", "inner.lin", "inner.act"):
        assert found[f"{name} (backward)"] == 1


EXIT = """
import sys, threading, weakref, torch, instrument
from instrument.record.regions import dispatch
class Tool:
    name = "tool"
    def push(self, region): return 1
    def pop(self, handle): pass
    start, end, mark = push, pop, push
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
handle = instrument.annotate_modules(model)
instrument.annotate_modules(torch.nn.Linear(2, 2))
dispatch.active._attached.append(Tool())
dispatch.active._refresh()
assert model[0]._forward_hooks
class Late:
    def __del__(self):  # as late as possible
        assert not model_hooks()
kept = model(torch.ones(1, 4))
hooks = model[0]._forward_hooks
model_hooks = lambda: [*hooks]
if sys.argv[1] == "interrupt":
    model[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try: model(torch.ones(1, 4))
    except KeyboardInterrupt: pass
if sys.argv[1] == "backward":
    kept.register_hook(lambda _: sys.exit(0))
    kept.sum().backward()
if sys.argv[1] == "thread":
    threading.Thread(target=lambda: [model(torch.ones(1, 4)).sum().backward() for _ in range(50)]).start()
late = Late()
"""


@pytest.mark.parametrize("how", ["plain", "interrupt", "backward", "thread"])
def test_exit(tmp_path: Path, how: str) -> None:
    """A process that ends with hooks, an attached tool and a live graph exits cleanly without output."""
    script = tmp_path / "script.py"
    script.write_text(EXIT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), how],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "INSTRUMENT_STRICT": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
