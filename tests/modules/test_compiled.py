"""Annotated models under torch.compile: the same number of graphs, and one region around each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.record.regions import dispatch
from tests.modules.conftest import AttachEmitter
from tests.support.native import nvtx_log, ranges

INSIDE = ["norm", "linear", "act"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def as_whole(model: nn.Module, counter: CompileCounter) -> Call:
    return torch.compile(model, fullgraph=True, backend=counter)


def in_place(model: nn.Module, counter: CompileCounter) -> Call:
    model.compile(fullgraph=True, backend=counter)
    return model


def layers_in_place(model: nn.Module, counter: CompileCounter) -> Call:
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=counter)
    return model


def layers_replaced(model: nn.Module, counter: CompileCounter) -> Call:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, fullgraph=True, backend=counter)
    return model


def in_a_function(model: nn.Module, counter: CompileCounter) -> Call:
    return torch.compile(lambda x: model(x) * 2, fullgraph=True, backend=counter)


HEAD = [["head"]]
LAYERS = [["layers.0"], ["layers.1"]]
BACK = [["layers.1 (backward)"], ["layers.0 (backward)"]]
EACH = [["Model", *LAYERS, *HEAD], ["Model (backward)", ["head (backward)"], *BACK]]
WHOLE = [["Model"], ["Model (backward)"]]
IN_LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in INSIDE]
EVERYTHING = ["head", "layers.0", "layers.1", *IN_LAYERS]
CASES = [
    (as_whole, WHOLE, EVERYTHING),
    (in_place, WHOLE, EVERYTHING),
    (layers_in_place, EACH, IN_LAYERS),
    (layers_replaced, EACH, IN_LAYERS),
    (in_a_function, [], ["Model", *EVERYTHING]),
]


def train(call: Call) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    loss = call(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad]


@pytest.mark.parametrize("compiled_in", ["before", "between", "during"])
@pytest.mark.parametrize(
    ("compile", "expected", "hidden"), CASES, ids=lambda case: getattr(case, "__name__", None)
)
def test_compiled_model_is_one_region(
    attach_emitter: AttachEmitter,
    compile: Callable[[nn.Module, CompileCounter], Call],
    expected: list[object],
    hidden: list[str],
    compiled_in: str,
) -> None:
    """A compiled model is one region and is compiled once, whether before, after or during annotation."""
    model, counter = Model(), CompileCounter()
    values = train(model)
    call: Call = compile(model, counter) if compiled_in == "before" else model
    if compiled_in == "between":
        handle = instrument.annotate_modules(model)
        call = compile(model, counter)
        train(call)
    else:
        handle = instrument.annotate_modules(call if isinstance(call, nn.Module) else model)
    for window in range(2):
        with attach_emitter() as emitter:
            if compiled_in == "during" and window == 0:
                call = compile(model, counter)
                train(call)
                emitter.events.clear()
            found = train(call)
        if compile is not in_a_function:  # that case doubles the output
            assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))
        assert emitter.tree() == expected
        train(call)
    assert counter.frame_count == 1
    assert sorted(dispatch.compiled_away) == sorted(hidden)
    handle.remove()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_compiled_sequential(attach_emitter: AttachEmitter) -> None:
    """A compiled Sequential, which torch.compile calls from inside, has its region outside the graph."""
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        call = torch.compile(model, fullgraph=True, backend=counter)
        train(call)
        train(call)
    train(call)
    assert emitter.tree() == [["Sequential"], ["Sequential (backward)"]] * 2
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it
def test_modules_between_graphs(attach_emitter: AttachEmitter) -> None:
    """Modules that run between compiled graphs have regions; nothing is compiled twice."""
    counter = CompileCounter()

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model = Broken()
    call = torch.compile(model, backend=counter)
    train(call)
    frames = counter.frame_count
    with instrument.annotate_modules(model):
        for _ in range(2):
            with attach_emitter() as emitter:
                train(call)
            assert emitter.tree() == [["Broken"], ["Broken (backward)"]]
            train(call)
    assert counter.frame_count == frames


def test_inductor(attach_emitter: AttachEmitter) -> None:
    """With Inductor, loss and gradients equal those of an unannotated model."""
    model = Model()
    call = torch.compile(model, fullgraph=True)
    values = train(call)
    with instrument.annotate_modules(call), attach_emitter() as emitter:
        assert all(torch.equal(one, other) for one, other in zip(train(call), values, strict=True))
    assert emitter.tree() == WHOLE


def test_hidden_modules_are_logged_once(
    attach_emitter: AttachEmitter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The modules inside compiled code are logged once, and listed in each window's manifest."""
    caplog.set_level(logging.INFO, "instrument")
    call = as_whole(Model(), CompileCounter())
    with (
        instrument.annotate_modules(call),
        instrument.profile(tmp_path, schedule=instrument.schedule("0,2")) as prof,
    ):
        for _ in range(4):
            train(call)
            prof.step()
    messages = [record.getMessage() for record in caplog.records if "inside compiled code" in record.getMessage()]
    assert len(messages) == 1
    assert "layers.0.norm" in messages[0]
    assert [entry["hidden_regions"] for entry in prof.windows] == [sorted(EVERYTHING)] * 2


def test_compiled_model_under_torch_profiler(recorded: Callable[..., list[dict[str, object]]]) -> None:
    """The region of a compiled model holds its graph in a trace of torch's profiler."""
    call = as_whole(Model(), CompileCounter())
    train(call)
    with instrument.annotate_modules(call):
        names = [event["name"] for event in recorded(lambda: train(call))]
    assert names == ["Model", "Model (backward)"]


def test_compiled_step(attach_emitter: AttachEmitter) -> None:
    """A compiled step that calls the model is compiled once."""
    counter = CompileCounter()
    model = Model()

    @torch.compile(backend=counter)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.ones(3, 4)
    step(x).backward()
    frames = counter.frame_count
    with instrument.annotate_modules(model):
        for _ in range(2):
            with attach_emitter(), profile(activities=[ProfilerActivity.CPU]):
                step(x).backward()
            step(x).backward()
    assert counter.frame_count == frames


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_autograd(attach_emitter: AttachEmitter) -> None:
    """Under compiled autograd the gradients are unchanged and no region is left open."""
    model = Model()
    values = train(model)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        model.zero_grad()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            result = train(model)
    emitter.tree()
    assert all(torch.equal(a, b) for a, b in zip(result, values, strict=True))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


ATTACHED = """
import json, sys, torch, instrument
from torch import nn

assert "torch._dynamo" not in sys.modules
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
handle = instrument.annotate_modules(model), instrument.annotate_step()
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
compiled = torch.compile(model, backend=counter, fullgraph=True)
step = torch.compile(lambda x: torch.Tensor.to(model(x), "meta"), backend=counter)
for _ in range(2):
    compiled(torch.ones(2, 4)).sum().backward()
    step(torch.ones(2, 4))
for each in handle:
    each.remove()
frames = counter.frame_count
compiled(torch.ones(2, 4)).sum().backward()
step(torch.ones(2, 4))
print(frames, counter.frame_count)
assert frames == counter.frame_count == 2
"""


@pytest.mark.native
def test_compiler_imported_last() -> None:
    """Compiled code has no hooks in it, even if a tool is attached before the compiler is imported."""
    found = ranges(nvtx_log(ATTACHED))
    names = [r.name for r in found if r.name and r.name.startswith("Sequential")]
    assert names == ["Sequential", "Sequential (backward)"] * 2
