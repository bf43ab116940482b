"""Unusual models and code: nothing is changed, no hooks stay, and regions nest."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.record.modules import hooks
from instrument.record.modules.hooks import Hook
from tests.modules.conftest import AttachEmitter
from tests.support.cuda_graphs import emulate


def remaining_hooks(model: nn.Module) -> list[object]:
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if isinstance(hook, Hook)
    ]


class Energy(nn.Module):
    """Computes a gradient in its forward, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


def test_backward_inside_a_forward(attach_emitter: AttachEmitter) -> None:
    """A gradient computed in a module's forward shows inside that forward's region."""
    model = nn.Sequential(Energy())
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        model(torch.ones(1, 3)).sum().backward()
    forward, *_ = emitter.tree()
    assert forward == ["Sequential", ["0", ["0.net"], ["0.net (backward)"]]]


def test_clone_that_shares_its_dict(attach_emitter: AttachEmitter) -> None:
    """A module with a copy of another's `__dict__` copies and pickles as itself, in the window and after it."""
    model = nn.Linear(2, 2)
    with instrument.annotate_modules(model), attach_emitter():
        clone = object.__new__(nn.Linear)
        clone.__dict__ = model.__dict__.copy()
        clone._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in model._parameters.items()}
        during = copy.deepcopy(clone)
    for copied in (during, copy.deepcopy(clone), pickle.loads(pickle.dumps(clone))):
        assert not copied.weight.any()
        assert not remaining_hooks(copied)


def test_hooks_moved_by_quantization(attach_emitter: AttachEmitter) -> None:
    """Hooks that quantization moves to other modules do nothing, and are removed at the first call."""
    ao = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()).eval()
    x = torch.ones(1, 1, 2, 2)
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        ao.fuse_modules(model, [["0", "1", "2"]], inplace=True)
        model(x)
        emitter.tree()
    model(x)
    assert not remaining_hooks(model)
    with attach_emitter() as emitter:
        model(x)
    assert emitter.events == []


class Closing(nn.Linear):
    """Closes the window in its forward and raises KeyboardInterrupt."""

    close: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.close is not None:
            self.close()
            raise KeyboardInterrupt
        return super().forward(x)


def test_window_ends_in_an_interrupted_forward(attach_emitter: AttachEmitter) -> None:
    """Hooks that an interrupted forward kept are removed with the handle."""
    model = nn.Sequential(Closing(2, 2))
    handle = instrument.annotate_modules(model)
    window = attach_emitter()
    window.__enter__()
    model[0].close = lambda: window.__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2))
    model[0].close = None
    handle.remove()
    assert not remaining_hooks(model)


class OldSignature(nn.Linear):
    """Overrides hook registration with torch's old signature."""

    def register_forward_hook(self, hook: Any) -> Any:  # type: ignore[override]
        return super().register_forward_hook(hook)


def test_old_signature(attach_emitter: AttachEmitter) -> None:
    """A class that overrides hook registration with an old signature is a region like others."""
    model = nn.Sequential(nn.Linear(2, 2), OldSignature(2, 2), nn.Linear(2, 2))
    with instrument.annotate_modules(model), attach_emitter() as emitter, torch.no_grad():
        model(torch.ones(1, 2))
    assert emitter.tree() == [["Sequential", ["0"], ["1"], ["2"]]]


@dataclass
class Tree:
    value: torch.Tensor
    parent: Tree | None = None
    children: list[Tree] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    first: torch.Tensor
    second: torch.Tensor


class Lazy(dict[str, torch.Tensor]):
    """Computes its values on access."""

    def values(self) -> Any:
        raise SystemExit("accessed")


def test_search_of_outputs() -> None:
    """Each object in an output is visited once, up to a limit, without calling its methods."""
    root = Tree(torch.ones(1))
    root.children = [Tree(torch.ones(1), root) for _ in range(200)]
    assert len(list(hooks.tensors(root))) == 201
    loop: list[Any] = [torch.ones(1)]
    loop += [loop] * 6
    assert len(list(hooks.tensors(loop))) == 1
    assert len(list(hooks.tensors((torch.ones(1), list(range(1_000_000)))))) == 1
    assert len(list(hooks.tensors(Lazy(a=torch.ones(1))))) == 1
    assert len(list(hooks.tensors(Slotted(torch.ones(1), torch.ones(1))))) == 2


def test_modules_shared_at_every_level(attach_emitter: AttachEmitter) -> None:
    """Modules that hold each other along many paths have a bounded number of names."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(30):
        outer = nn.Sequential()
        outer.a = outer.b = model
        model = outer
    peers = [nn.Sequential() for _ in range(10)]
    for i, one in enumerate(peers):
        for j, other in enumerate(peers):
            one.add_module(f"p{i}{j}", other)
    with attach_emitter():
        for tangle in (model, peers[0]):
            with instrument.annotate_modules(tangle):
                assert len(remaining_hooks(tangle)) == 2 * len(list(tangle.modules()))


def test_shapes_in_an_export(attach_emitter: AttachEmitter) -> None:
    """Dynamic shapes of an export stay dynamic."""
    model = nn.Sequential(nn.Linear(2, 2))
    batch = torch.export.Dim("batch", min=2, max=64)
    with instrument.annotate_modules(model, shapes=True), attach_emitter():
        exported = torch.export.export(
            model, (torch.ones(4, 2),), dynamic_shapes={"input": {0: batch}}, strict=False
        )
    assert exported.module()(torch.ones(7, 2)).shape == (7, 2)


def test_torch_function_modes(attach_emitter: AttachEmitter) -> None:
    """A torch function mode sees the same functions with annotation as without."""

    class Mode(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.functions: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.functions.append(getattr(function, "__qualname__", repr(function)))
            return function(*args, **(kwargs or {}))

    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    with Mode() as plain:
        model(x)
    with instrument.annotate_modules(model, shapes=True), attach_emitter(), Mode() as annotated:
        model(x)
    assert annotated.functions == plain.functions


def test_interrupted_recomputation(attach_emitter: AttachEmitter) -> None:
    """A KeyboardInterrupt in a checkpoint's recomputation leaves nested ranges."""
    calls = iter([None, KeyboardInterrupt])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.l(x)
            error = next(calls)
            if error is not None:
                raise error
            return x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.b, x, use_reentrant=False)

    model = Model()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    emitter.tree()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_the_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child removes its handle although another thread of the parent held the lock."""
    from instrument.record.modules.installer import installer

    handle = instrument.annotate_modules(nn.Linear(2, 2))
    held, done = threading.Event(), threading.Event()
    apply = installer.apply

    def hold(on: bool) -> None:
        if not held.is_set():
            held.set()
            done.wait(20)
        apply(on)

    monkeypatch.setattr(installer, "apply", hold)
    thread = threading.Thread(target=installer.refresh)
    thread.start()
    held.wait(20)
    child = os.fork()
    if child == 0:
        handle.remove()
        os._exit(0)
    try:
        assert _ends(child)
    finally:
        done.set()
        thread.join()
    handle.remove()


def _ends(child: int) -> bool:
    import signal
    import time

    for _ in range(100):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize(
    "name", ["torch.cuda", "torch.cuda.graphs", "transformer_engine.pytorch", "transformer_engine.pytorch.graph"]
)
def test_graph_capture_finds_no_hooks(
    attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`make_graphed_callables`, which refuses modules with hooks, finds none in a window, by any of its names."""
    model, found = nn.Linear(2, 2), []
    owner: Any = sys.modules.get(name) or types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, owner)
    monkeypatch.setattr(
        owner, "make_graphed_callables", lambda module, *_: found.append(remaining_hooks(module)), raising=False
    )
    before = owner.make_graphed_callables
    with instrument.annotate_modules(model), attach_emitter():
        owner.make_graphed_callables(model, ())
        assert remaining_hooks(model)
    assert found == [[]]
    assert owner.make_graphed_callables is before


def test_graphed_model_in_a_window(attach_emitter: AttachEmitter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's `make_graphed_callables` accepts the model in a window, and its calls have regions."""
    emulate(monkeypatch)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        torch.cuda.make_graphed_callables(model, (x.clone(),))
        assert not emitter.events
        model(x)
        assert emitter.tree() == [["Linear"]]
