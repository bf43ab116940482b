"""Checkpointing, and hooks of others, work as without the library's hooks."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument

from ..support.net import Net
from .conftest import AttachEmitter, RecordingEmitter, TreeOf, Window
from .net_runs import (
    A_BACKWARD,
    B_BACKWARD,
    BACKWARD,
    FORWARD,
    LEAVES,
    A,
    B,
    backward_counts,
    batch,
    flat,
    gradients,
    hooks,
    seeded,
)


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_reentrant_checkpoint(tree_of: TreeOf) -> None:
    """With reentrant checkpointing each block is recomputed just before its backward."""

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch(grad=True)).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, lambda: Checkpointed(True))
    assert tree == [
        ["Checkpointed", A, B],
        ["Checkpointed (backward)", B, B_BACKWARD, A, A_BACKWARD],
    ]


@pytest.mark.parametrize("early", [True, False])
def test_non_reentrant_checkpoint(tree_of: TreeOf, early: bool) -> None:
    """With non-reentrant checkpointing a block is recomputed inside its backward, with or without early stop."""

    def run(model: Any) -> list[Tensor | None]:
        with torch.utils.checkpoint.set_checkpoint_early_stop(early):
            loss = model(batch(grad=True)).square().sum()
            loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, lambda: Checkpointed(False))
    assert tree == [
        ["Checkpointed", A, B],
        [
            "Checkpointed (backward)",
            ["b (backward)", ["b.act (backward)", B], ["b.lin (backward)"]],
            ["a (backward)", ["a.act (backward)", A], ["a.lin (backward)"]],
        ],
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints(tree_of: TreeOf, reentrant: bool) -> None:
    """Nested checkpoints leave balanced regions and the same gradients."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(reentrant)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant) * 2

    def run(model: Any) -> list[Tensor | None]:
        x = batch(grad=True)
        loss = model(x).square().sum()
        loss.backward()
        return [loss, x.grad, *gradients(model)]

    tree = tree_of(run, Outer)
    found = Counter(name for name, _ in flat(tree))
    assert found["Outer (backward)"] == 1
    assert found["inner.a.lin"] == 3
    assert found["inner.a.lin (backward)"] == found["inner.b.lin (backward)"] == 1


class CallRecorder:
    """Another tool's hooks on a module, which record their calls."""

    def __init__(self, module: nn.Module, name: str, notes: list[str], full: bool = True) -> None:
        self.handles = [
            module.register_forward_pre_hook(lambda *_: notes.append(f"{name} pre")),
            module.register_forward_pre_hook(lambda *_: notes.append(f"{name} first"), prepend=True),
            module.register_forward_hook(lambda *_: notes.append(f"{name} post")),
        ]
        if full:
            self.handles += [
                module.register_full_backward_pre_hook(lambda *_: notes.append(f"{name} backward pre")),
                module.register_full_backward_hook(lambda *_: notes.append(f"{name} backward")),
            ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def test_hooks_of_others(attach_emitter: AttachEmitter) -> None:
    """Hooks of others, added before and during a window, run in their order and are removed independently."""

    def steps(on: Callable[[], None], off: Callable[[], None]) -> list[str]:
        notes: list[str] = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = CallRecorder(model[0], "before", notes)
        on()
        during = CallRecorder(model[0], "during", notes)
        model(batch(grad=True)).sum().backward()
        notes.append("-")
        before.remove()
        model(batch(grad=True)).sum().backward()
        notes.append("-")
        off()
        model(batch(grad=True)).sum().backward()
        during.remove()
        assert not hooks(model)
        return notes

    expected = steps(lambda: None, lambda: None)
    assert len(expected) == 22
    stack = contextlib.ExitStack()
    found: list[RecordingEmitter] = []

    def on() -> None:
        model = next(
            thing
            for thing in gc.get_objects()
            if type(thing) is nn.Sequential and len(thing[0]._forward_hooks) == 1
        )
        stack.enter_context(instrument.annotate_modules(model))
        found.append(stack.enter_context(attach_emitter()))

    assert steps(on, stack.close) == expected
    assert backward_counts(found[0].tree()) == Counter({"Sequential": 2, "0": 2, "1": 2})


def test_hooks_that_replace_values(tree_of: TreeOf) -> None:
    """Inputs and outputs that hooks of others return are used as without annotation."""

    def run(model: Any) -> list[Tensor | None]:
        model.a.lin.register_forward_hook(lambda module, args, out: out * 2)
        model.a.lin.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.b.register_forward_hook(lambda module, args, out: (out.detach(), out))
        x = batch(grad=True)
        detached, out = model(x)
        loss = out.square().sum()
        loss.backward()
        handles = [detached, loss, x.grad, *gradients(model)]
        for module in (model.a.lin, model.b):
            for key in [key for key, hook in module._forward_hooks.items() if "lambda" in repr(hook)]:
                del module._forward_hooks[key]
        for key in [key for key, hook in model.a.lin._forward_pre_hooks.items() if "lambda" in repr(hook)]:
            del model.a.lin._forward_pre_hooks[key]
        return handles

    tree = tree_of(run)
    assert tree[0] == FORWARD
    assert backward_counts(tree) == Counter(LEAVES)


class FailingModule(nn.Module):
    """Raises an error in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("late")


@pytest.mark.parametrize("prepended", [False, True])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_failing_pre_hook(window: Window, prepended: bool, kind: type[BaseException]) -> None:
    """A pre-hook of another tool that raises, before or after the library's, leaves balanced regions."""
    model = seeded()

    def fail(*_: object) -> None:
        raise kind("stop")

    with window(model) as emitter:
        handle = model.b.act.register_forward_pre_hook(fail, prepend=prepended)
        with pytest.raises(kind, match="stop"):
            model(batch())
        handle.remove()
        model(batch()).sum().backward()
        first, *rest = emitter.tree()
    assert rest == [FORWARD, BACKWARD]
    inside = [] if prepended else [["b.act"]]
    assert first == ["Net", A, ["b", ["b.lin"], *inside]]
