"""A model with hooks can be copied, pickled, exported, scripted, traced and built as without them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

import instrument

from ..support.net import Net
from .conftest import TreeOf, Window
from .net_runs import BACKWARD, FORWARD, assert_same, backward_counts, batch, flat, gradients, hooks, seeded

pytestmark = pytest.mark.corpus


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
