"""The selection of modules that become regions, and their names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from tests.modules.conftest import AttachEmitter


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) * self.key(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def names(attach_emitter: AttachEmitter, model: nn.Module, **arguments: Any) -> list[str]:
    """Return the regions of a forward in order of their start."""
    with instrument.annotate_modules(model, **arguments), attach_emitter() as emitter, torch.no_grad():
        model(torch.ones(2, 4))
    emitter.tree()
    return [event[1:] for event in emitter.events if event.startswith("+")]


BLOCK = ["", ".attention", ".attention.query", ".attention.key", ".mlp", ".mlp.0", ".mlp.1"]
ALL = ["Model", "embed", *[f"layers.{i}{name}" for i in range(2) for name in BLOCK]]


def test_every_module(attach_emitter: AttachEmitter) -> None:
    """Each called module has its qualified name, and the model its class name."""
    assert names(attach_emitter, Model()) == ALL


class Wrapper(nn.Module):
    """Holds nothing but a model, as PEFT and DDP do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model(x)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("wrapped", [False, True])
def test_depth(attach_emitter: AttachEmitter, depth: int, wrapped: bool) -> None:
    """`depth` is the number of levels below the model; lists of modules and wrappers of the model are none."""
    within = [name for name in ALL[1:] if name.replace("layers.", "").count(".") < depth]
    found = names(attach_emitter, Wrapper(Wrapper(Model())) if wrapped else Model(), depth=depth)
    inner = "base_model.base_model"
    expected = ["Wrapper", "base_model", inner, *[f"{inner}.{name}" for name in within]]
    assert found == (expected if wrapped else ["Model", *within])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"include": "layers.1"}, ["layers.1"]),
        ({"include": "layers.*.query"}, [name for name in ALL if name.endswith(".query")]),
        ({"include": ["embed", "layers.?"]}, ["embed", "layers.0", "layers.1"]),
        ({"include": re.compile(r"mlp\.\d$")}, [name for name in ALL if ".mlp." in name]),
        ({"include": Attention}, ["layers.0.attention", "layers.1.attention"]),
        ({"include": (nn.Linear, nn.ReLU), "depth": 1}, ["embed"]),
        ({"include": lambda name, module: hasattr(module, "mlp") and "1" in name}, ["layers.1"]),
        ({"exclude": "layers.*"}, ["Model", "embed"]),
        ({"exclude": [nn.Linear, nn.ReLU, nn.Sequential]},
         ["Model", "layers.0", "layers.0.attention", "layers.1", "layers.1.attention"]),
        ({"include": "layers.0*", "exclude": nn.Linear, "skip_containers": True},
         ["layers.0", "layers.0.attention", "layers.0.mlp.1"]),
    ],
)  # fmt: skip
def test_include_and_exclude(
    attach_emitter: AttachEmitter, arguments: dict[str, Any], expected: list[str]
) -> None:
    """Patterns, regular expressions, classes and functions select modules, alone or combined."""
    assert names(attach_emitter, Model(), **arguments) == expected


def test_skip_containers(attach_emitter: AttachEmitter) -> None:
    """Skipped containers have no region; modules inside keep their names."""
    assert names(attach_emitter, Model(), skip_containers=True) == [
        name for name in ALL if not name.endswith(".mlp")
    ]


def test_names(attach_emitter: AttachEmitter) -> None:
    """Regions can be named by class, or by both name and class."""
    model = Model()
    assert names(attach_emitter, model, names="class", depth=1) == ["Model", "Linear", "Block", "Block"]
    names_of_both = names(attach_emitter, model, names="both", include="layers.1*")
    assert names_of_both[:2] == ["layers.1: Block", "layers.1.attention: Attention"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"include": "layer.0"},
            ValueError,
            r'"include" matches no module: .layer.0.; the nearest are layers.0',
        ),
        ({"exclude": "atention"}, ValueError, r'"exclude" matches no module: .atention.; the nearest are '),
        ({"include": re.compile("embedd")}, ValueError, r"matches no module: .*the nearest are embed"),
        (
            {"include": nn.Conv2d},
            ValueError,
            r'"include" matches no module: .*Conv2d.*; it has Attention, Block, ',
        ),
        ({"include": lambda name, module: False}, ValueError, '"include" matches no module'),
        ({"include": ["embed", "nowhere"]}, ValueError, "\"include\" matches no module: 'nowhere'"),
        ({"include": "embed", "exclude": nn.Linear}, ValueError, "together leave no module"),
        ({"include": 3}, TypeError, '"include" must be a pattern.*: 3'),
        ({"exclude": nn.ReLU()}, TypeError, r'"exclude" must be a pattern.*: ReLU\(\)'),
        ({"depth": -1}, ValueError, '"depth" must be an integer >= 0, or None: -1'),
        ({"depth": "2"}, ValueError, "\"depth\" must be an integer >= 0, or None: '2'"),
        ({"names": "full"}, ValueError, "\"names\" must be one of path, class, both: 'full'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """Wrong arguments raise an error at once, with the nearest names for a pattern without a match."""
    with pytest.raises(error, match=text):
        instrument.annotate_modules(Model(), **arguments)


@pytest.mark.parametrize("model", [None, "model", nn.Module, [nn.ReLU()], lambda x: x])
def test_not_a_module(model: Any) -> None:
    """Anything but a module is refused."""
    with pytest.raises(TypeError, match=r'"model" must be a torch\.nn\.Module'):
        instrument.annotate_modules(model)


def test_model_without_modules(attach_emitter: AttachEmitter) -> None:
    """A module without modules inside is one region, and a pattern raises an error that says so."""
    assert names(attach_emitter, nn.ReLU()) == ["ReLU"]
    with pytest.raises(ValueError, match="the model has no modules inside"):
        instrument.annotate_modules(nn.ReLU(), include="layers.*")


class Tied(nn.Module):
    """One module at two places, with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        shared = nn.Sequential(nn.Linear(4, 4))
        self.encoder = Holder(shared)
        self.decoder = Holder(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class Holder(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x)


def test_shared_modules(attach_emitter: AttachEmitter) -> None:
    """A module at several places, and the modules inside, are named by the place of the call."""
    paths = ["", ".shared", ".shared.0"]
    expected = ["Tied", *[f"encoder{path}" for path in paths], *[f"decoder{path}" for path in paths]]
    assert names(attach_emitter, Tied()) == expected


def test_shared_modules_selected_alone(attach_emitter: AttachEmitter) -> None:
    """Shared modules have separate names even if the modules that call them are not regions."""
    assert names(attach_emitter, Tied(), include="*.shared") == ["encoder.shared", "decoder.shared"]


def test_module_shared_within_one_parent(attach_emitter: AttachEmitter) -> None:
    """A module that one parent calls several times has one name."""
    layer = nn.Linear(4, 4)
    assert names(attach_emitter, nn.Sequential(layer, layer)) == ["Sequential", "0", "0"]


def test_cyclic_modules(attach_emitter: AttachEmitter) -> None:
    """A cycle of modules is followed once."""
    model = Model()
    model.layers[0].attention.add_module("model", model)
    assert names(attach_emitter, model) == ALL


def test_unusual_names(attach_emitter: AttachEmitter) -> None:
    """Names of any characters, and modules in lists, keep their names."""
    model = nn.Sequential()
    for name in ("größe", 'a "b"', "naïve\n"):
        model.add_module(name, nn.Identity())
    assert names(attach_emitter, model) == ["Sequential", "größe", 'a "b"', "naïve\n"]


def test_failing_selection_function() -> None:
    """An error of a selection function is raised by `annotate_modules`, with the module's name."""

    def rule(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    with pytest.raises(ValueError, match=r"rule .*, which selects modules, failed for '': KeyError\(''\)"):
        instrument.annotate_modules(nn.Linear(2, 2), include=rule)
