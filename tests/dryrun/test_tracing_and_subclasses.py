"""Dry runs of traced and scripted code, tensor subclasses and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .reports import alone, both, finished, gpu, listed, notes, ops

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


# --------------------------------------------------------------------------- what is traced, scripted, whole


def test_export() -> None:
    """torch.export uses shapes only: the step continues, and the report says so."""

    def step() -> None:
        torch.export.export(nn.Linear(3, 3, device="cuda"), (gpu(2, 3),), strict=False)
        gpu(2).sum().item()

    report = finished(step)
    assert 1 == ops(report)["item"]
    assert "code under FakeTensorMode, such as torch.export, was not checked" in notes(report)


ABORTING = """
import copy, json
import torch
from torch import nn
import instrument

def exports():
    torch.ones(3, device="cuda").sum().item()
    torch.export.export(nn.Linear(3, 3, device="cuda"), (torch.ones(2, 3, device="cuda"),), strict=False)

def copies():
    model = nn.Linear(3, 3, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    for _ in range(50):
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["step"].item() == 1, state
        torch.ones(30000)
    weight = copy.deepcopy(model.weight)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_cuda
    assert copy.deepcopy(model).weight.is_cuda
    pair = copy.deepcopy([weight, weight])
    assert pair[0] is pair[1] is not weight

told = []
for step in (exports, copies):
    report = instrument.dry_run(step, fake=True)
    told.append([type(report.error).__name__, [one.op for one in report.syncs]])
print(json.dumps(told))
"""


def test_without_data_nothing_ends_the_process() -> None:
    """Where tensors have no data, torch.export ends the step, and copies of state behave like others."""
    assert [["RuntimeError", ["item"]], ["NoneType", []]] == alone(ABORTING)


def test_scripting() -> None:
    """TorchScript compiles during a run, and afterwards."""

    def step() -> None:
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))).cuda()
        scripted(gpu(2, 3)).sum().item()

    report = finished(step)
    assert 1 == ops(report)["item"]
    assert "the devices in a scripted function were not checked" in notes(report)
    again = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    assert (2, 3) == again(torch.ones(2, 3)).shape


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value.cpu() * 2


def test_a_scripted_function() -> None:
    """The report says that devices inside a scripted function are not watched."""
    function = torch.jit.script(doubled)
    report = finished(lambda: function(gpu(2)))
    assert ["the devices in a scripted function were not checked"] == notes(report)


@both
@pytest.mark.filterwarnings("ignore:.*flex_attention")
def test_higher_order_operators(fake: bool) -> None:
    """flex_attention and torch.cond run, and reading their results synchronizes."""
    from torch.nn.attention.flex_attention import flex_attention

    def step() -> None:
        query = gpu(1, 1, 16, 16)
        attended = flex_attention(query, query, query)
        chosen = torch.cond(query.sum() > 0, torch.neg, torch.abs, (query,))
        assert attended.is_cuda
        assert chosen.is_cuda
        attended.sum().item()
        chosen.sum().tolist()

    report = finished(step, fake=fake)
    # Those inside flex_attention depend on the version of torch
    assert {"item": 1, "tolist": 1} == {found.op: found.count for found in report.syncs if found.via is None}
    for name in ("flex_attention", "cond"):
        assert f"the inside the operator {name} was not checked" in notes(report)


# -------------------------------------------------------------------------------- subclasses, patches, modes


class Scaled(torch.Tensor):
    """A tensor that wraps another, as DTensor and quantized tensors do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Scaled:
        return Scaled(inner["inner"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, value)

        if func is torch.ops.aten.abs.default:
            args[0].inner.nonzero()
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


@both
def test_wrappers_of_tensors(fake: bool) -> None:
    """Wrapped tensors and their results are on the GPU; calls inside the wrapper's class are watched."""

    def step() -> None:
        value = Scaled(gpu(3))
        assert value.is_cuda
        out = value * 2
        assert isinstance(out, Scaled)
        assert out.is_cuda
        assert out.inner.is_cuda
        value.abs()
        out.sum().item()

    report = finished(step, fake=fake)
    assert [("abs", 1, "value.abs()"), ("item", 1, "out.sum().item()")] == listed(report)


class Passing(TorchFunctionMode):
    """Passes every call on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """Passes every call on, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_functions_passed_on() -> None:
    """The site of a synchronization is never the line that passes a call on."""

    def step() -> None:
        value = gpu(3)
        with Passing():
            value.sum().item()
            value.tolist()
        value.as_subclass(Own).mean().item()

    expected = [
        ("item", 1, "value.sum().item()"), ("tolist", 1, "value.tolist()"),
        ("item", 1, "value.as_subclass(Own).mean().item()"),
    ]  # fmt: skip
    assert expected == listed(finished(step))


@both
def test_patched_methods(fake: bool) -> None:
    """A method that the program replaces works as before."""
    held = {name: getattr(torch.Tensor, name) for name in ("to", "item")}

    def step() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, method in held.items():
                patch.setattr(torch.Tensor, name, lambda self, *a, m=method, **k: m(self, *a, **k))
            value = torch.ones(2).to("cuda")
            assert value.is_cuda
            value.sum().item()

    assert {"to": 1, "item": 1} == ops(finished(step, fake=fake))
