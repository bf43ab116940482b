"""A model whose modules are regions keeps all its abilities: copies, tracers, checkpoints, hooks, threads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.regions import dispatch

from ..support.net import Block, Net
from .conftest import AttachEmitter, RecordingEmitter


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.a, self.b):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


A = ["a", ["a.lin"], ["a.act"]]
B = ["b", ["b.lin"], ["b.act"]]
FORWARD = ["Net", A, B]
A_BACKWARD = ["a (backward)", ["a.act (backward)"], ["a.lin (backward)"]]
B_BACKWARD = ["b (backward)", ["b.act (backward)"], ["b.lin (backward)"]]
BACKWARD = ["Net (backward)", B_BACKWARD, A_BACKWARD]
LEAVES = ["Net", "a", "a.lin", "a.act", "b", "b.lin", "b.act"]


def seeded(make: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(0)
    return make()


def batch(grad: bool = False) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_() if grad else x


def hooks(model: nn.Module) -> int:
    """Return the number of hooks and other additions on the modules."""
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + ("__getstate__" in vars(module))
        + (vars(module).get("_compiled_call_impl") is not None)
        for module in model.modules()
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def flat(tree: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield every region of a tree with the region around it."""

    def walk(node: list[Any], around: str) -> Iterator[tuple[str, str]]:
        yield node[0], around
        for inner in node[1:]:
            yield from walk(inner, node[0])

    for node in tree:
        yield from walk(node, "")


def backward_counts(tree: list[Any]) -> Counter[str]:
    """Count each module's backward regions, each of which must lie inside that of its parent."""
    found: Counter[str] = Counter()
    for name, around in flat(tree):
        if name.endswith(" (backward)"):
            name = name.removesuffix(" (backward)")
            found[name] += 1
            if "." in name:
                assert around == f"{name.rpartition('.')[0]} (backward)", tree
    return found


def assert_same(expected: list[Tensor | None], found: list[Tensor | None]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


Run = Callable[[Any], list["Tensor | None"]]


@pytest.fixture
def tree_of(attach_emitter: AttachEmitter) -> Callable[..., list[Any]]:
    """Run a function on a plain model, between windows and in a window; return the regions of the last run."""

    def run(function: Run, make: Callable[[], Any] = Net) -> list[Any]:
        expected = function(seeded(make))
        model = seeded(make)
        with instrument.annotate_modules(model):
            assert_same(expected, function(model))
        model = seeded(make)
        with attach_emitter() as emitter:
            with instrument.annotate_modules(model):
                assert hooks(model)
                assert_same(expected, function(model))
            assert not hooks(model)
        return emitter.tree()

    return run


@pytest.fixture
def window(
    attach_emitter: AttachEmitter,
) -> Callable[[nn.Module], contextlib.AbstractContextManager[RecordingEmitter]]:
    """Return a context manager in which a model is annotated and an emitter attached."""

    @contextlib.contextmanager
    def open_window(model: nn.Module) -> Iterator[RecordingEmitter]:
        with attach_emitter() as emitter, instrument.annotate_modules(model):
            assert hooks(model)
            yield emitter
        assert not hooks(model)

    return open_window


Window = Callable[[nn.Module], contextlib.AbstractContextManager[RecordingEmitter]]
TreeOf = Callable[..., "list[Any]"]


# Copies and files


def test_deepcopy(window: Window) -> None:
    """A copy made in a window, of the model or a part, has no hook, computes the same and shows no regions."""
    model = seeded()
    expected = model(batch())
    with window(model) as emitter:
        before = len(emitter.events)
        for copied, result in ((copy.deepcopy(model), expected), (copy.copy(model), expected)):
            assert hooks(copied) == (0 if copied.a is not model.a else hooks(model.a) + hooks(model.b))
            assert set(vars(copied)) == set(vars(Net()))
            assert copied.a is model.a or len(emitter.events) == before
            if copied.a is not model.a:
                assert torch.equal(copied(batch()), result)
                assert len(emitter.events) == before
        part = copy.deepcopy(model.a.lin)
        assert not hooks(part)
        both = copy.deepcopy({"model": model, "again": model})
        assert both["model"] is both["again"]
    assert torch.equal(copy.deepcopy(model)(batch()), expected)


def test_deepcopy_keeps_hooks_of_others(window: Window) -> None:
    """A copy has the hooks of other tools, with their options, and none of the library's."""
    model = seeded()
    calls: list[str] = []
    model.a.register_forward_hook(lambda *_: calls.append("hook"), always_call=True)
    model.a.register_forward_pre_hook(lambda *_: calls.append("pre"), with_kwargs=True)
    with instrument.annotate_modules(model), window(seeded()):
        copied = copy.deepcopy(model)
    copied(batch())
    assert calls == ["pre", "hook"]
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
        assert len(getattr(copied.a, name)) == 1


class OwnState(nn.Linear):
    """Has its own ``__getstate__``, which marks the saved state."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "saved": True}


class TupleState(nn.Linear):
    """Returns its state as a tuple."""

    def __getstate__(self) -> tuple[dict[str, Any], int]:
        return self.__dict__, 7

    def __setstate__(self, state: tuple[dict[str, Any], int]) -> None:
        super().__setstate__(state[0])
        self.seven = state[1]


class OwnDeepcopy(nn.Linear):
    """Copies itself through its ``__dict__``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepcopy:
        copied = OwnDeepcopy.__new__(OwnDeepcopy)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


class OwnReduce(nn.Linear):
    """Has its own ``__reduce__``."""

    def __reduce__(self) -> Any:
        return rebuilt, (dict(self.__dict__),)


def rebuilt(state: dict[str, Any]) -> OwnReduce:
    module = OwnReduce.__new__(OwnReduce)
    nn.Module.__setstate__(module, state)
    return module


@pytest.mark.parametrize("kind", [OwnState, TupleState, OwnDeepcopy, OwnReduce])
def test_copy_of_a_module_with_its_own_protocol(window: Window, kind: type[nn.Linear]) -> None:
    """Modules with their own copy and pickle methods use them in a window; no copy has a hook."""
    model = nn.Sequential(kind(4, 4))
    expected = model(batch())
    plain = set(vars(copy.deepcopy(model)[0]))
    with window(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        assert type(copied[0]) is kind
        assert {name for name, value in vars(copied[0]).items() if name != "_compiled_call_impl" or value} == plain
        assert torch.equal(copied(batch()), expected)
        assert not hooks(copied)


def test_deepcopy_of_a_graph_module(window: Window) -> None:
    """A torch.fx GraphModule copies and pickles the same in a window as outside."""
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
    expected = model(batch())
    with window(model) as emitter:
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        emitter.events.clear()
        for other in (copied, pickled):
            assert not hooks(other)
            assert torch.equal(other(batch()), expected)
            assert other.code == model.code
        assert not emitter.events


LOAD = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "instrument":
            raise ImportError("no such library here")
sys.meta_path.insert(0, Blocked())
import torch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(x), expected)
assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
assert not any("__getstate__" in vars(module) for module in model.modules())
assert "instrument" not in sys.modules
"""


def test_saved_in_a_window_loads_without_the_library(window: Window, tmp_path: Path) -> None:
    """A model saved whole in a window loads without this library, with the same result and no hook."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.TransformerEncoderLayer(4, 2)
    )
    model.eval()
    expected = model(batch())
    with window(model):
        torch.save((model, batch(), expected), tmp_path / "model.pt")
        assert "instrument" not in pickle.dumps(model).decode("latin1")
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, str(tmp_path / "model.pt")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(window: Window, protocol: int) -> None:
    """A pickle made in a window equals one made outside, byte by byte."""
    model = seeded()
    expected = pickle.dumps(model, protocol)
    with window(model):
        found = pickle.dumps(model, protocol)
        loaded = pickle.loads(found)
    assert found == expected
    assert torch.equal(loaded(batch()), model(batch()))


def test_state_dict(window: Window) -> None:
    """Names and values of a state_dict are unchanged in a window, and it loads there."""
    model, other = seeded(), Net()
    expected = model.state_dict()
    with window(model), window(other):
        found = model.state_dict()
        other.load_state_dict(found)
        assert list(found) == list(expected)
        assert [name for name, _ in model.named_modules()] == [name for name, _ in Net().named_modules()]
        assert repr(model) == repr(Net())
    assert_same(list(expected.values()), list(found.values()))
    assert torch.equal(other(batch()), model(batch()))


# Tracers


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_export(window: Window, strict: bool, backward: bool) -> None:
    """torch.export gives the same graph in a window as outside, and the hooks stay."""
    expected = torch.export.export(seeded(), (batch(),), strict=strict)
    model = seeded()
    with window(model) as emitter:
        before = hooks(model)
        exported = torch.export.export(model, (batch(backward),), strict=strict)
        assert hooks(model) == before
        del emitter.events[:]
        model(batch())
        assert emitter.tree() == [FORWARD]
    assert exported.graph_module.code == expected.graph_module.code
    assert list(exported.state_dict) == list(expected.state_dict)
    assert torch.equal(exported.module()(batch()), model(batch()))


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_jit(window: Window, kind: str) -> None:
    """Scripting and tracing in a window give the same code as outside, and the hooks return."""

    def compiled(model: nn.Module) -> Any:
        return torch.jit.script(model) if kind == "script" else torch.jit.trace(model, (batch(),))

    expected = compiled(seeded())
    model = seeded()
    with window(model) as emitter:
        before = hooks(model)
        found = compiled(model)
        assert hooks(model) == before
        assert not hooks(found)
        del emitter.events[:]
        model(batch())
        assert emitter.tree() == [FORWARD]
        del emitter.events[:]
        result = found(batch())
        assert not emitter.events
    assert (found.code, found.a.code, found.a.lin.code) == (expected.code, expected.a.code, expected.a.lin.code)
    assert torch.equal(result, expected(batch()))
    saved = io.BytesIO()
    torch.jit.save(found, saved)
    saved.seek(0)
    assert torch.equal(torch.jit.load(saved)(batch()), expected(batch()))


def test_failing_script(window: Window) -> None:
    """The hooks return even if a model cannot be scripted."""

    class Unscriptable(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if [*globals()] else x

    model = Unscriptable()
    with window(model):
        before = hooks(model)
        with pytest.raises(Exception, match=r".") as failure:
            torch.jit.script(model)
        assert "instrument" not in str(failure.value)
        assert hooks(model) == before


def scripted() -> Any:
    return torch.jit.script(seeded())


def traced() -> Any:
    return torch.jit.trace(seeded(), (batch(),))


def loaded() -> Any:
    saved = io.BytesIO()
    torch.jit.save(scripted(), saved)
    saved.seek(0)
    return torch.jit.load(saved)


@pytest.mark.parametrize("make", [scripted, traced, loaded])
def test_script_module(window: Window, make: Callable[[], Any]) -> None:
    """The call of a ScriptModule is one region without others inside; the module is unchanged afterwards."""
    model = make()
    expected, code = model(batch()), model.code
    with window(model) as emitter:
        result = model(batch())
    assert torch.equal(result, expected)
    assert model.code == code
    names = [name for name, _ in flat(emitter.tree())]
    assert len(names) == 1
    result.sum().backward()


@pytest.mark.parametrize("make", [scripted, traced, loaded])
def test_script_module_inside(window: Window, tree_of: TreeOf, make: Callable[[], Any]) -> None:
    """A ScriptModule inside a model is a region without others inside, next to its siblings."""

    def run(model: Any) -> list[Tensor | None]:
        loss = model(batch()).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    tree = tree_of(run, lambda: nn.Sequential(nn.Linear(4, 4), make()))
    assert tree == [
        ["Sequential", ["0"], ["1"]],
        ["Sequential (backward)", ["1 (backward)"], ["0 (backward)"]],
    ]


def test_symbolic_trace(window: Window) -> None:
    """torch.fx traces an annotated model to the same graph."""
    expected = torch.fx.symbolic_trace(seeded())
    model = seeded()
    with window(model):
        traced = torch.fx.symbolic_trace(model)
    assert traced.code == expected.code
    assert torch.equal(traced(batch()), expected(batch()))


def test_torch_func(window: Window) -> None:
    """torch.func's transforms of an annotated model give the same numbers and leave balanced regions."""
    expected_model = seeded()
    names = [name for name, _ in expected_model.named_parameters()]

    def results(model: nn.Module) -> list[Tensor | None]:
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
        gradient = torch.func.grad(loss)(parameters, batch())
        sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch())
        value, tangent = torch.func.jvp(lambda p: loss(p, batch()), (parameters,), (tangents,))
        _, pull = torch.func.vjp(lambda p: loss(p, batch()), parameters)
        pulled = pull(torch.ones(()))[0]
        jacobian = torch.func.jacrev(lambda x: torch.func.functional_call(model, parameters, (x,)))(batch())
        forward = torch.func.jacfwd(lambda x: torch.func.functional_call(model, parameters, (x,)))(batch())
        hessian = torch.func.hessian(lambda x: loss(parameters, x))(batch())
        each = [gradient[name] for name in names] + [sample[name] for name in names]
        return [*each, *(pulled[name] for name in names), value, tangent, jacobian, forward, hessian]

    class OutOfPlace(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a.act, self.b.act = nn.ReLU(), nn.ReLU()

    expected = results(seeded(OutOfPlace))
    model = seeded(OutOfPlace)
    with window(model) as emitter:
        assert_same(expected, results(model))
    backward_counts(emitter.tree())
    assert emitter.events.count("+OutOfPlace") == 7


def test_meta_device(tree_of: TreeOf) -> None:
    """A model on the meta device has the usual regions, and is materialised as without annotation."""
    shapes: list[Any] = []

    def run(model: nn.Module) -> list[Tensor | None]:
        out = model(torch.empty(3, 4, device="meta"))
        out.sum().backward()
        shapes.append(out.shape)
        return []

    def make() -> nn.Module:
        with torch.device("meta"):
            return Net()

    assert tree_of(run, make) == [FORWARD, BACKWARD]
    assert shapes == [(3, 4)] * 3


def test_materialised_in_a_window(window: Window) -> None:
    """`to_empty`, `to` and `apply` work in a window, and the model keeps its regions."""
    with torch.device("meta"):
        model = Net()
    with window(model) as emitter:
        model.to_empty(device="cpu").apply(lambda module: None).to(torch.float64)
        assert model(batch().double()).dtype is torch.float64
        model.half().float().share_memory()
    assert emitter.tree() == [FORWARD]


def test_lazy_modules(tree_of: TreeOf) -> None:
    """A lazy module, which changes its class at the first call, keeps its region and leaves no hook."""

    def run(model: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(2)
        out = model(batch()).sum()
        out.backward()
        assert type(model[0]) is nn.Linear
        return [out, *gradients(model)]

    tree = tree_of(run, lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU()))
    assert backward_counts(tree) == Counter({"Sequential": 1, "0": 1, "1": 1})


# Checkpoints


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


# Hooks of others


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


# Freed models


def test_model_is_freed(attach_emitter: AttachEmitter) -> None:
    """An annotated model is freed with its last reference, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with attach_emitter():
            model = seeded()
            handle = instrument.annotate_modules(model)
            out = model(batch())
            out.sum().backward()
            dead = [weakref.ref(thing) for thing in (model, model.a.lin, model.a.lin.weight, out)]
            del model, out
            assert [ref() for ref in dead] == [None] * 4
            handle.remove()
    finally:
        gc.enable()


def test_activations_are_freed(attach_emitter: AttachEmitter) -> None:
    """A module's saved activations are freed with the output, also after a forward without a backward."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            kept = x + 1
            context.save_for_backward(kept)
            alive.append(weakref.ref(context))
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Keeping.apply(x)

    alive: list[weakref.ref[Any]] = []
    model = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 4), Layer())
    gc.collect()
    gc.disable()
    try:
        with instrument.annotate_modules(model), attach_emitter():
            x = batch()
            here = weakref.ref(x)
            out = model(x)
            del x, out
            assert here() is None
            assert [ref() for ref in alive] == [None, None]
            out = model(batch())
            out.sum().backward()
            del out
            assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_activations_are_freed_after_an_error(window: Window) -> None:
    """A failed forward keeps no inputs alive; an interrupted one none after the next call."""

    class Stop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise kind

    model = nn.Sequential(nn.Linear(4, 4), Stop())
    gc.collect()
    gc.disable()
    try:
        for kind in (ValueError, KeyboardInterrupt):
            with window(model):
                x = batch()
                alive = weakref.ref(x)
                with contextlib.suppress(kind):
                    model(x)
                del x
                if kind is KeyboardInterrupt:  # noticed at the next call only
                    model[0](batch())
                assert alive() is None, kind
    finally:
        gc.enable()


def test_model_is_freed_after_an_interrupt(attach_emitter: AttachEmitter) -> None:
    """A model interrupted in its forward is freed with its last reference, or when the window closes."""

    class Stop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    gc.collect()
    gc.disable()
    try:
        with attach_emitter():
            model = nn.Sequential(nn.Linear(4, 4), Stop())
            instrument.annotate_modules(model)
            with contextlib.suppress(KeyboardInterrupt):
                model(batch())
            dead = weakref.ref(model)
            del model
        assert dead() is None
    finally:
        gc.enable()


# Graphs and windows


def test_graph_kept_from_a_window(attach_emitter: AttachEmitter) -> None:
    """An autograd graph from a window runs without regions after it, and with regions in the next one."""
    model, expected = seeded(), seeded()
    expected(batch()).sum().backward()
    with instrument.annotate_modules(model):
        with attach_emitter() as first:
            loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        assert first.tree() == [FORWARD]
        assert_same(gradients(expected), gradients(model))
        with attach_emitter() as second:
            loss.backward(retain_graph=True)
        assert second.tree() == [BACKWARD]
    with attach_emitter() as third:
        model.zero_grad()
        loss.backward()
    third.tree()
    assert_same(gradients(expected), gradients(model))


def test_graph_from_before_a_window(attach_emitter: AttachEmitter) -> None:
    """The backward of a forward before the window has no regions, and none stays open."""
    model = seeded()
    with instrument.annotate_modules(model):
        loss = model(batch()).sum()
        with attach_emitter() as emitter:
            (loss + model(batch()).sum()).backward()
    assert emitter.tree() == [FORWARD, BACKWARD]


def test_window_that_ends_in_a_backward(attach_emitter: AttachEmitter) -> None:
    """A window that ends, or begins, in a backward has balanced regions."""
    model = seeded()
    with instrument.annotate_modules(model):
        stack = contextlib.ExitStack()
        emitters = [stack.enter_context(attach_emitter())]
        middle = model.a(batch())
        middle.register_hook(lambda _: stack.close())
        model.b(middle).sum().backward()
        assert not dispatch.recording
        assert emitters[0].tree()[:3] == [A, B, B_BACKWARD]
        with attach_emitter():
            middle = model.a(batch())
            loss = model.b(middle).sum()
        middle.register_hook(lambda _: emitters.append(stack.enter_context(attach_emitter())))
        loss.backward()
        stack.close()
    assert emitters[1].tree() == [A_BACKWARD]


class CallsInForward(nn.Module):
    """Calls a function in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.call: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        self.call()
        return x


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = CallsInForward()
        self.b = CallsInForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def other_thread(function: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    return run


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("where", ["pre-hook", "forward", "hook"])
def test_removed_in_a_forward(attach_emitter: AttachEmitter, where: str, threaded: bool) -> None:
    """A handle removed in a forward closes the open regions at their ends and adds no more."""
    expected, model = seeded(TwoCalls), seeded(TwoCalls)
    expected(batch()).sum().backward()
    with attach_emitter() as emitter:
        handle = instrument.annotate_modules(model)
        remove = other_thread(handle.remove) if threaded else handle.remove
        if where == "forward":
            model.a.call = remove
            other = None
        else:
            register = getattr(model.a.lin, f"register_forward_{where.replace('-', '_')}")
            other = register(lambda *_: remove())
        model(batch()).sum().backward()
        if other is not None:
            other.remove()
        assert not hooks(model)
        assert emitter.tree()[0] == ["TwoCalls", ["a", ["a.lin"]]]
        assert all(not name.startswith("b") for name, _ in flat(emitter.tree()))
        assert_same(gradients(expected), gradients(model))
        emitter.events.clear()
        model.a.call = lambda: None
        handle.remove()
        model(batch())
        assert not emitter.events


@pytest.mark.parametrize("threaded", [False, True])
def test_removed_in_a_backward(attach_emitter: AttachEmitter, threaded: bool) -> None:
    """A handle removed in a backward leaves balanced regions and no hook."""
    expected, model = seeded(), seeded()
    expected(batch()).sum().backward()
    with attach_emitter() as emitter:
        handle = instrument.annotate_modules(model)
        remove = other_thread(handle.remove) if threaded else handle.remove
        middle = model.a(batch())
        middle.register_hook(lambda _: remove())
        model.b(middle).sum().backward()
        assert not hooks(model)
        assert emitter.tree()[:3] == [A, B, B_BACKWARD]
        assert_same(gradients(expected), gradients(model))


def test_handle_removed_again() -> None:
    """Removing a handle again has no effect, even after its model is freed."""
    model = seeded()
    handle = instrument.annotate_modules(model)
    other = instrument.annotate_modules(model)
    for _ in range(3):
        handle.remove()
    del model
    handle.remove()
    other.remove()
    with other:
        pass


def test_handle_removed_again_leaves_the_next(attach_emitter: AttachEmitter) -> None:
    """Removing a handle again does not affect a later handle of the same model."""
    model = seeded()
    old = instrument.annotate_modules(model)
    old.remove()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        old.remove()
        model(batch())
    assert emitter.tree() == [FORWARD]


def test_profiler_within_a_forward(tmp_path: Path) -> None:
    """A profiler that starts and stops within a forward shows the regions in between, as complete ranges."""
    model = seeded(TwoCalls)
    expected = model(batch())
    with instrument.annotate_modules(model):
        for _ in range(2):
            prof = profile(activities=[ProfilerActivity.CPU])
            model.a.call, model.b.call = prof.start, prof.stop
            assert torch.equal(model(batch()), expected)
            assert not hooks(model)
            assert regions_of(prof, tmp_path) == ["b", "b.lin"]
        model.a.call = model.b.call = lambda: None
        first, second = (profile(activities=[ProfilerActivity.CPU]) for _ in range(2))

        def swap() -> None:
            first.stop()
            second.start()

        model.a.call = swap
        first.start()
        model(batch())
        second.stop()
        assert not hooks(model)
        assert regions_of(first, tmp_path) == ["TwoCalls", "a", "a.lin"]
        assert regions_of(second, tmp_path) == ["b", "b.lin"]


def regions_of(prof: Any, folder: Path) -> list[str]:
    prof.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    assert all(event["ph"] == "X" for event in found)
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


# Failures


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("direct", [False, True])
def test_interrupt_in_a_forward(window: Window, kind: type[BaseException], direct: bool) -> None:
    """After an interrupt in a forward the next call closes the open regions and is not nested in them."""
    model = seeded(TwoCalls)

    def fail() -> None:
        raise kind("stop")

    with window(model) as emitter:
        model.a.call = fail
        with pytest.raises(kind, match="stop"):
            model(batch())
        model.a.call = lambda: None
        if direct:  # a part of the interrupted model
            model.a.lin(batch())
            assert emitter.tree()[1:] == [["a.lin"]]
        model(batch()).sum().backward()
    tree = emitter.tree()
    assert tree[0] == ["TwoCalls", ["a", ["a.lin"]]]
    assert tree[-2:] == [
        ["TwoCalls", ["a", ["a.lin"]], ["b", ["b.lin"]]],
        ["TwoCalls (backward)", ["b (backward)", ["b.lin (backward)"]], ["a (backward)", ["a.lin (backward)"]]],
    ]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_failure_in_a_backward(window: Window, kind: type[BaseException]) -> None:
    """After a backward that failed its regions are closed, and later steps have complete ones."""
    expected, model = seeded(), seeded()

    def fail(_: object) -> None:
        raise kind("stop")

    for each in (expected, model):
        context = window(model) if each is model else contextlib.nullcontext(RecordingEmitter())
        with context as emitter:
            handle = each.a.lin.register_forward_hook(lambda module, args, out: void(out.register_hook(fail)))
            loss = each(batch()).sum()
            with pytest.raises(kind, match="stop"):
                loss.backward()
            handle.remove()
            if each is model:
                assert emitter.events.count("+Net (backward)") == emitter.events.count("-Net (backward)") == 1
                emitter.tree()
                emitter.events.clear()
            each.zero_grad()
            each(batch()).sum().backward()
            if each is model:
                assert emitter.tree() == [FORWARD, BACKWARD]
    assert_same(gradients(expected), gradients(model))


def void(_: object) -> None:
    """Return None."""


def test_failed_backward_is_repeated(window: Window) -> None:
    """The same graph can run again after its backward failed."""
    model = seeded()
    failing = [True]

    def fail(_: object) -> None:
        if failing.pop():
            failing.append(False)
            raise ValueError("stop")
        failing.append(False)

    with window(model) as emitter:
        middle = model.a(batch())
        middle.register_hook(fail)
        loss = model.b(middle).sum()
        with pytest.raises(ValueError, match="stop"):
            loss.backward(retain_graph=True)
        emitter.events.clear()
        loss.backward()
    assert emitter.tree() == [B_BACKWARD, A_BACKWARD]


# Threads, recursion, modes


class EventsByThread:
    """Events by thread, in place of the emitter's list."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}

    def append(self, event: str) -> None:
        self.of.setdefault(threading.get_ident(), []).append(event)

    def trees(self) -> list[list[Any]]:
        trees = []
        for events in self.of.values():
            emitter = RecordingEmitter()
            emitter.events = events
            trees.append(emitter.tree())
        return trees


def test_threads(window: Window) -> None:
    """Two threads that run one model concurrently have a complete tree each."""
    model = seeded()
    expected = model(batch())
    results: list[Tensor] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(3)

    def work() -> None:
        try:
            barrier.wait(20)
            for _ in range(30):
                out = model(batch())
                torch.autograd.grad(out.sum(), model.a.lin.weight)
            results.append(out)
        except BaseException as error:
            errors.append(error)

    with window(model) as emitter:
        by_thread: Any = EventsByThread()
        emitter.events = by_thread
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trees = by_thread.trees()
        emitter.events = []
    assert not errors
    assert len(trees) == 3
    for tree in trees:
        assert [node for node in tree if node[0] == "Net"] == [FORWARD] * 30
        assert backward_counts(tree)["a.lin"] == 30
    assert all(torch.equal(result, expected) for result in results)


def test_windows_while_another_thread_trains(attach_emitter: AttachEmitter) -> None:
    """Windows that open and close while another thread trains have balanced regions."""
    model = seeded()
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                model(batch()).sum().backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    heards = []
    with instrument.annotate_modules(model):
        thread.start()
        for _ in range(30):
            with attach_emitter() as emitter:
                stop.wait(0.005)
            heards.append(emitter)
        stop.set()
        thread.join()
        assert not errors
        assert not hooks(model)
    for emitter in heards:
        emitter.tree()


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


# Kinds of backward


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


# Exit of the process

EXIT = """
import sys, threading, weakref, torch, instrument
from instrument.regions import dispatch
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
