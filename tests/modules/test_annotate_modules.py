"""`annotate_modules`: when hooks are installed, which regions they show, and how they are removed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.read.measures.summary import summarize
from instrument.record.regions import dispatch
from tests.modules.conftest import AttachEmitter
from tests.support import warm
from tests.support.native import nvtx_log, ranges
from tests.support.ranges import outline


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.act(self.linear(self.norm(x)))


def forward(name: str) -> list[Any]:
    return [name, [f"{name}.norm"], [f"{name}.linear"], [f"{name}.act"]]


def backward(name: str) -> list[Any]:
    inside = [[f"{name}.{part} (backward)"] for part in ("act", "linear", "norm")]
    return [f"{name} (backward)", *inside]


TREE = [
    ["Sequential", forward("0"), forward("1")],
    ["Sequential (backward)", backward("1"), backward("0")],
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(model: nn.Module) -> list[torch.Tensor]:
    """Run one forward and backward; return the loss and all gradients."""
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def state(model: nn.Module) -> list[dict[str, Any]]:
    """Return each module's `__dict__`, with hooks copied and tensors by identity."""
    plain = []
    for module in model.modules():
        held = {name: dict(value) if hasattr(value, "keys") else value for name, value in vars(module).items()}
        plain.append(held)
    return plain


def test_no_hooks_between_windows(attach_emitter: AttachEmitter) -> None:
    """Between windows modules have neither hooks nor new attributes."""
    layers = model()
    before = state(layers)
    handle = instrument.annotate_modules(layers)
    assert state(layers) == before
    step(layers)
    for _ in range(2):
        with attach_emitter():
            assert all(module._forward_hooks and module._forward_pre_hooks for module in layers.modules())
            step(layers)
        assert all(after == held | {} for after, held in zip(state(layers), before, strict=True))
    with attach_emitter():
        handle.remove()
        assert state(layers) == before


def test_regions_and_values(attach_emitter: AttachEmitter) -> None:
    """Forward and backward regions nest as the modules do; loss and gradients are bit-identical."""
    layers = model()
    expected = step(layers)
    with instrument.annotate_modules(layers), attach_emitter() as emitter:
        found = step(layers)
    assert emitter.tree() == TREE
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_forward_only(attach_emitter: AttachEmitter) -> None:
    """With `backward=False` only forward regions are shown."""
    layers = model()
    with instrument.annotate_modules(layers, backward=False), attach_emitter() as emitter:
        step(layers)
    assert emitter.tree() == TREE[:1]


def test_window(tmp_path: Path) -> None:
    """A window's summary has the layers as regions, and its trace shows them in the right steps."""
    layers = model()
    with (
        instrument.annotate_modules(layers, depth=1),
        instrument.profile(tmp_path, schedule=instrument.schedule("1")) as prof,
    ):
        for number in range(3):
            assert bool(layers._forward_hooks) == (number == 1)
            step(layers)
            prof.step()
    assert [entry["status"] for entry in prof.windows] == ["recorded"]
    assert not layers._forward_hooks


@pytest.mark.parametrize("warmup", [0, 1])
def test_forward_before_the_window(tmp_path: Path, warmup: int) -> None:
    """The backward of an earlier forward is a region in the first recorded step only after a warm-up."""
    layers = model()
    plan = instrument.schedule(at=3, active=2, warmup=warmup)
    with instrument.annotate_modules(layers, depth=0), instrument.profile(tmp_path, schedule=plan) as prof:
        output = layers(torch.ones(3, 4))
        for number in range(6):
            assert bool(layers._forward_hooks) == (3 - warmup <= number <= 4)
            before, output = output, layers(torch.ones(3, 4))
            before.sum().backward()
            prof.step()
    assert not layers._forward_hooks
    (path,) = tmp_path.glob("window-*/*")
    trace = instrument.read_trace(path)
    backward = [name for name in trace.regions.text("name") if name == "Sequential (backward)"]
    assert len(backward) == 1 + warmup
    partial = {stat.path[-1] for stat in summarize(trace).regions if stat.partial}
    assert partial == ({"Sequential (backward)"} if not warmup else set())


def test_warmup_without_a_recorded_step(tmp_path: Path) -> None:
    """Hooks of a warm-up are removed even if no step is recorded after it."""
    layers = model()
    plan = instrument.schedule(at=9, warmup=5)
    with instrument.annotate_modules(layers), instrument.profile(tmp_path, schedule=plan) as prof:
        for _ in range(6):
            step(layers)
            prof.step()
        assert layers._forward_hooks
    assert not layers._forward_hooks
    assert dispatch.active.warm_up_count == 0


def test_successive_profilers(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Each torch profiler installs the hooks anew, for the model's modules at that time."""
    layers = model()
    with instrument.annotate_modules(layers):
        first = [event["name"] for event in recorded(lambda: step(layers))]
        layers[1] = nn.Linear(4, 2)
        second = [event["name"] for event in recorded(lambda: step(layers))]
    assert first == [name for root in TREE for name in names(root)]
    assert second[-1] == "0.norm (backward)"
    assert [name for name in second if name.startswith("1")] == ["1", "1 (backward)"]


def names(node: list[Any]) -> list[str]:
    return [node[0], *(name for inner in node[1:] for name in names(inner))]


CHANGED = """
import sys, torch, instrument
from torch import nn
model = nn.Sequential(nn.Linear(4, 4))
handle = instrument.annotate_modules(model)
model.append(nn.Linear(4, 2))
with instrument.profile(sys.argv[1]) as prof:
    model(torch.ones(1, 4))
"""


@pytest.mark.native
def test_model_changed_under_an_attached_tool(tmp_path: Path) -> None:
    """A window reads the model's modules again, although an attached tool keeps its hooks installed."""
    assert [r.name for r in ranges(nvtx_log(CHANGED, args=[str(tmp_path)], start=warm.run))] == [
        "Sequential",
        "0",
        "1",
    ]


def test_annotated_twice(attach_emitter: AttachEmitter) -> None:
    """A model annotated twice shows each region once; the second handle takes over from the first."""
    layers = model()
    first = instrument.annotate_modules(layers)
    second = instrument.annotate_modules(layers, names="both")
    inner = instrument.annotate_modules(layers[0])
    with attach_emitter() as emitter:
        step(layers)
        assert emitter.tree() == TREE
        emitter.events.clear()
        first.remove()
        step(layers)
        assert emitter.events[:2] == ["+Sequential", "+0: Block"]
        emitter.events.clear()
        second.remove()
        step(layers)
        assert emitter.events[:2] == ["+Block", "+norm"]
        inner.remove()
        emitter.events.clear()
        step(layers)
    assert emitter.events == []


def test_removed_twice(attach_emitter: AttachEmitter) -> None:
    """Removing a removed handle has no effect, even inside its own block."""
    layers = model()
    with attach_emitter(), instrument.annotate_modules(layers) as handle:
        handle.remove()
        handle.remove()
        assert not layers._forward_hooks
    handle.remove()


def test_arguments_are_unchanged(attach_emitter: AttachEmitter) -> None:
    """Arguments, keyword arguments and outputs are the same objects."""

    class Echo(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> tuple[object, object]:
            return args, kwargs

    echo, x, y = Echo(), torch.ones(1, requires_grad=True), object()
    with instrument.annotate_modules(echo, shapes=True), attach_emitter():
        args, kwargs = echo(x, y, z=x)
    assert args[0] is x
    assert args[1] is y
    assert kwargs["z"] is x


def test_shapes_in_a_trace(tmp_path: Path) -> None:
    """With `shapes=True` a region shows the shapes of all inputs if the profiler records shapes."""
    layers = model()
    with (
        instrument.annotate_modules(layers, include="0", shapes=True),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof,
    ):
        layers[0](torch.ones(3, 4), scale=torch.ones(()))
        layers[0](torch.ones(2, 4))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [event["args"]["Concrete Inputs"] for event in events if event.get("cat") == "user_annotation"]
    assert shown[:2] == [["[3, 4]", ""], ["[2, 4]"]]


SHAPES = """
import torch, instrument
from torch import nn
model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
with instrument.annotate_modules(model, shapes=True):
    for rows in (3, 5, 3):
        model(torch.ones(rows, 4)).sum().backward()
"""


@pytest.mark.native
def test_shapes_in_nvtx() -> None:
    """An NVTX range has the first input's shape as payload; backward ranges are of the start/end kind."""
    found = ranges(nvtx_log(SHAPES, start=warm.run))
    assert outline(r for r in found if r.kind == "push_pop").split() == ["Sequential", "0", "1"] * 3
    assert [r.name for r in found if r.kind == "start_end"][:3] == [
        "Sequential (backward)", "1 (backward)", "0 (backward)",
    ]  # fmt: skip
    payloads = {r.payload for r in found if r.name == "0"}
    assert len(payloads) == 2


def test_no_shapes_by_default(attach_emitter: AttachEmitter) -> None:
    """Without `shapes` regions have no payload, and each call reuses the same region object."""
    layers = model()
    with instrument.annotate_modules(layers), attach_emitter() as emitter:
        step(layers)
        layers(torch.ones(1, 4))
    assert len({id(region) for region in emitter.regions}) == 18
    assert {region.payload for region in emitter.regions} == {None}


def test_fused_path_is_kept(attach_emitter: AttachEmitter) -> None:
    """A TransformerEncoderLayer keeps its fused path, which it leaves for modules with hooks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 3, 8)
    encoder.eval()
    with torch.no_grad():
        expected = encoder(x)
    with instrument.annotate_modules(encoder), attach_emitter() as emitter:
        with torch.no_grad():
            assert torch.equal(encoder(x), expected)
        assert emitter.tree() == [["TransformerEncoder (eval)", ["layers.0 (eval)"], ["layers.1 (eval)"]]]
        emitter.events.clear()
        encoder.train()
        encoder(x).sum().backward()
        assert "+layers.0.self_attn" in emitter.events
        assert "+layers.0.linear1 (backward)" in emitter.events
        emitter.tree()
    assert not any("_compiled_call_impl" in vars(module) for module in encoder.modules())


def test_instrument_0() -> None:
    """Under ``INSTRUMENT=0`` arguments are checked, and nothing is installed."""
    code = """
import torch, instrument
model = torch.nn.Linear(2, 2)
handle = instrument.annotate_modules(model)
with torch.profiler.profile():
    assert not model._forward_hooks
    model(torch.ones(1, 2))
handle.remove()
try:
    instrument.annotate_modules(model, include="no")
except ValueError:
    print("checked")
"""
    env = {"INSTRUMENT": "0", "PYTHONPATH": str(Path(instrument.__file__).parents[1])}
    done = warm.run([sys.executable, "-c", code], env, check=True)
    assert done.stdout == "checked\n"


def test_failing_emitter(lenient: None, attach_emitter: AttachEmitter) -> None:
    """A failing emitter is detached; the step continues with the same gradients."""
    layers = model()
    expected = step(layers)
    with instrument.annotate_modules(layers), attach_emitter() as emitter:
        emitter.push = emitter.start = None  # type: ignore[assignment]
        assert all(torch.equal(a, b) for a, b in zip(step(layers), expected, strict=True))
        assert not dispatch.recording
        assert not layers._forward_hooks
