"""Labels distinguish models and optimizers of one class by the variables that hold them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import instrument
from instrument.record.modules import labels
from instrument.record.modules.labels import Labels
from tests.modules.conftest import AttachEmitter


class Thing:
    pass


class Agent:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.actor, self.critics = make(), [make(), make()]


# pytest calls locals() in functions with an assert, so the variables are in functions without one.


def labels_of(*_: object) -> list[str]:
    labels = Labels()
    labels.label_all(_)
    return [labels.of(thing) for thing in _]


def labels_of_variables() -> list[list[str]]:
    first, second = Thing(), Thing()
    return [labels_of(first, second), labels_of(first)]


def labels_of_attributes() -> list[str]:
    labels, agent, named = Labels(), Agent(Thing), {"target": Thing()}
    labels.label_all([agent.actor, *agent.critics, named["target"]])
    return [labels.of(thing) for thing in (agent.actor, *agent.critics, named["target"])]


def test_label_of_a_variable() -> None:
    """A local variable is the label; a single object has none."""
    assert labels_of_variables() == [["first", "second"], [""]]


def test_label_follows_attributes() -> None:
    """A label follows attributes, lists and dictionaries."""
    assert labels_of_attributes() == ["agent.actor", "agent.critics[0]", "agent.critics[1]", "named[target]"]


def test_attributes_of_self() -> None:
    """Attributes of `self` have a label without `self`."""

    class Trainer:
        def __init__(self) -> None:
            self.actor, self.critic = Thing(), Thing()

        def labels(self) -> list[str]:
            known = Labels()
            known.label_all([self.actor, self.critic])
            return [known.of(thing) for thing in (self.actor, self.critic)]

    assert Trainer().labels() == ["actor", "critic"]


def test_objects_without_a_variable_are_numbered() -> None:
    """An object that no variable leads to has a number as its label."""
    labels, held = Labels(), iter([Slots(), Slots()])
    things = Slots()
    things.held = list(held)
    labels.label_all(things.held)
    assert [labels.of(thing) for thing in things.held] == ["0", "1"]


class Slots:
    __slots__ = ("__weakref__", "held")


def test_label_is_stable() -> None:
    """A label stays the same when more objects are labelled; the new ones get other labels."""

    def renamed() -> list[str]:
        labels, first, second = Labels(), Thing(), Thing()
        labels.label_all([first, second])
        third, first = first, Thing()
        labels.label_all([third, second, first])
        return [labels.of(thing) for thing in (third, second, first)]

    assert renamed() == ["first", "second", "0"]


def test_variables_are_not_kept_alive() -> None:
    """Searching the variables of functions does not keep their objects alive."""

    def caller() -> bool:
        dropped = Thing()
        labels_of(Thing(), Thing())
        gone = weakref.ref(dropped)
        del dropped
        return gone() is None

    assert caller()


def test_locals_of_the_caller_are_unchanged() -> None:
    """A `locals()` dictionary that a function holds is neither emptied nor updated."""
    number = 1
    held = locals()
    before = dict(held)
    number += 1
    labels_of(Thing(), Thing())
    assert held == before


def load(data: Any, evaluation: dict[str, Any]) -> None:
    for _ in range(2):
        list(data)
        list(evaluation["loader"])
    for _ in DataLoader(range(1)):  # held by no variable
        pass


def train(agent: Any, a_optimizer: Any, c_optimizer: Any) -> None:
    x = torch.ones(1, 2)
    (agent.actor(x).sum() + agent.critics[0](x).sum()).backward()
    a_optimizer.step()
    c_optimizer.step()


def test_models_of_one_class(attach_emitter: AttachEmitter) -> None:
    """Two models of one class are two regions, forward and backward; the modules inside keep their names."""

    def run() -> Any:
        agent = Agent(lambda: nn.Sequential(nn.Linear(2, 2)))
        x = torch.ones(1, 2, requires_grad=True)
        actor, critic = instrument.annotate_modules(agent.actor), instrument.annotate_modules(agent.critics[0])
        with actor, critic, attach_emitter() as emitter:
            agent.actor(x).sum().backward()
            agent.critics[0](x).sum().backward()
        return emitter

    assert run().tree() == [
        ["Sequential[agent.actor]", ["0"]],
        ["Sequential[agent.actor] (backward)", ["0 (backward)"]],
        ["Sequential[agent.critics[0]]", ["0"]],
        ["Sequential[agent.critics[0]] (backward)", ["0 (backward)"]],
    ]


def test_model_annotated_later(attach_emitter: AttachEmitter) -> None:
    """A model keeps its name during a recording and has its label from the next one on."""

    def run() -> list[Any]:
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        x = torch.ones(1, 2)
        with instrument.annotate_modules(actor, backward=False), attach_emitter() as first:
            actor(x)
            with instrument.annotate_modules(critic, backward=False):
                critic(x)
                actor(x)
        with (
            instrument.annotate_modules(actor, backward=False),
            instrument.annotate_modules(critic, backward=False),
            attach_emitter() as second,
        ):
            critic(x)
            actor(x)
        return [first.tree(), second.tree()]

    assert run() == [[["Linear"], ["Linear[critic]"], ["Linear"]], [["Linear[critic]"], ["Linear[actor]"]]]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
        self.layers = nn.ModuleList([nn.ReLU(), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.actor(x) + self.critic(x)


def test_attributes_called_directly(attach_emitter: AttachEmitter) -> None:
    """Modules of one class called outside a forward, such as actor and critic, are labelled; layers are not."""
    model = Both()
    x = torch.ones(1, 2)
    with instrument.annotate_modules(model, names="class"), attach_emitter() as emitter:
        model.actor(x).sum().backward()
        model.eval().critic(x)
        model.layers[1](model.layers[0](x))
        model.train()(x)
    assert emitter.tree() == [
        ["Sequential[actor]", ["Linear"]],
        ["Sequential[actor] (backward)", ["Linear (backward)"]],
        ["Sequential[critic] (eval)", ["Linear (eval)"]],
        ["ReLU (eval)"],
        ["ReLU (eval)"],
        ["Both", ["Sequential", ["Linear"]], ["Sequential", ["Linear"]]],
    ]


def test_attributes_of_a_module_without_forward(attach_emitter: AttachEmitter) -> None:
    """Modules inside a container without a forward are labelled by attribute."""
    agent = nn.Module()
    agent.actor, agent.critic = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with instrument.annotate_modules(agent, names="class", backward=False), attach_emitter() as emitter:
        agent.actor(x)
        agent.critic(x)
    assert emitter.tree() == [["Linear[actor]"], ["Linear[critic]"]]


def test_single_model_has_no_label(attach_emitter: AttachEmitter) -> None:
    """A model annotated twice, and models of different classes, have no labels."""
    model, other = nn.Linear(2, 2), nn.ReLU()
    handles = [instrument.annotate_modules(model) for model in (model, model, other)]
    with attach_emitter() as emitter:
        other(model(torch.ones(1, 2)))
    for handle in handles:
        handle.remove()
    assert emitter.tree() == [["Linear"], ["ReLU"]]


def test_optimizers_of_one_class(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Torch's ranges of two optimizers of one class have the names of their variables, once each."""

    def run() -> list[str]:
        gc.collect()
        agent = Agent(lambda: nn.Linear(2, 2))
        a_optimizer = torch.optim.Adagrad(agent.actor.parameters())
        c_optimizer = torch.optim.Adagrad(agent.critics[0].parameters())
        with instrument.annotate_step("optimizer"):
            return [event["name"] for event in recorded(lambda: train(agent, a_optimizer, c_optimizer))]

    names = run()
    assert [f"Optimizer.step#Adagrad.step[{name}]" for name in ("a_optimizer", "c_optimizer")] == names


def test_optimizer_created_in_a_window(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """An optimizer created in a window has another label than earlier ones."""
    gc.collect()
    model = nn.Linear(2, 2)
    (model(torch.ones(1, 2))).sum().backward()
    early = torch.optim.Adadelta(model.parameters())

    def step() -> None:
        early.step()
        late = torch.optim.Adadelta(model.parameters())
        late.step()

    with instrument.annotate_step("optimizer"):
        names = [event["name"] for event in recorded(step)]
    assert names == ["Optimizer.step#Adadelta.step", "Optimizer.step#Adadelta.step[late]"]


def test_optimizers_of_an_inner_loop(
    recorded: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers of an inner loop keep their variable's name and cause few searches of the program's objects."""
    held = [[Thing() for _ in range(90)] for _ in range(90)]
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    outer = torch.optim.Adadelta(model.parameters())
    visited: list[str] = []
    children = labels.children
    monkeypatch.setattr(labels, "children", lambda path, value: visited.append(path) or children(path, value))

    def step() -> None:
        outer.step()
        visited.clear()
        for _ in range(20):
            inner = torch.optim.Adadelta(model.parameters())
            inner.step()
            for _ in DataLoader(range(1)):
                pass
        del held[:]

    with instrument.annotate_step("optimizer", "data"):
        names = Counter(event["name"] for event in recorded(step))
    assert names["Optimizer.step#Adadelta.step[inner]"] == 20
    assert 0 < len(visited) < 1_000  # without a limit 2,200


def test_number_is_reused(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """An optimizer that no variable holds takes the number of a freed one."""

    def step() -> None:
        kept = Slots()
        kept.held = torch.optim.Rprop([torch.ones(1)])
        kept.held.step()
        for _ in range(3):
            gc.collect()
            torch.optim.Rprop([torch.ones(1)]).step()

    with instrument.annotate_step("optimizer"):
        names = Counter(event["name"] for event in recorded(step))
    assert names == {"Optimizer.step#Rprop.step": 1, "Optimizer.step#Rprop.step[1]": 3}


def test_data_loaders(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Torch's ranges of two loaders' batches have the names of their variables."""

    def run() -> list[str]:
        data, evaluation = DataLoader(range(4), 2), {"loader": DataLoader(range(4), 4)}
        with instrument.annotate_step("data"):
            return [event["name"] for event in recorded(lambda: load(data, evaluation))]

    gc.collect()
    names = Counter(run())
    batches = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert names == {f"{batches}[data]": 6, f"{batches}[evaluation[loader]]": 4, batches: 2}


def test_single_data_loader(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """A single live loader keeps torch's name, although an unreachable one still exists."""
    gc.collect()
    kept = DataLoader(range(4), 4)
    vars(kept)["attribute"] = kept
    del kept
    loader = DataLoader(range(4), 2)
    with instrument.annotate_step("data"):
        names = {event["name"] for event in recorded(lambda: list(loader))}
    assert names == {"enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"}


@pytest.mark.parametrize("modes", [True, False])
def test_evaluation_mode(attach_emitter: AttachEmitter, modes: bool) -> None:
    """A forward in evaluation mode is marked as such, for each module by its mode at the call."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    with instrument.annotate_modules(model, backward=False, shapes=True, modes=modes), attach_emitter() as emitter:
        model(x)
        model.eval()
        model(x)
        model.train()
        model[1].eval()
        model(x)
    mark = " (eval)" if modes else ""
    assert emitter.tree() == [
        ["Sequential", ["0"], ["1"]],
        [f"Sequential{mark}", [f"0{mark}"], [f"1{mark}"]],
        ["Sequential", ["0"], [f"1{mark}"]],
    ]


def test_evaluation_mode_of_compiled_models(attach_emitter: AttachEmitter) -> None:
    """A compiled model, which has no hooks, is marked without another compilation."""
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    compilations: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(x)
    compiled.eval()
    compiled(x)
    before = len(compilations)
    with instrument.annotate_modules(compiled), attach_emitter() as emitter:
        compiled(x)
        compiled.train()
        compiled(x)
    assert [name for name, *_ in emitter.tree()] == ["Linear (eval)", "Linear"]
    assert len(compilations) == before
    torch._dynamo.reset()
