"""Models and optimizers of one class are told apart by where the program holds them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import instrument
from instrument.modules.instances import loaders, optimizers
from instrument.modules.labels import Labels
from tests.modules.conftest import Listening


class Thing:
    pass


class Agent:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.actor, self.critics = make(), [make(), make()]


# pytest has functions with an assert ask for locals(), so that variables are those of functions without.


def tell_apart(*_: object) -> list[str]:
    known = Labels()
    known.tell_apart(_)
    return [known.of(thing) for thing in _]


def of_variables() -> list[list[str]]:
    first, second = Thing(), Thing()
    return [tell_apart(first, second), tell_apart(first)]


def of_attributes() -> list[str]:
    known, agent, named = Labels(), Agent(Thing), {"target": Thing()}
    known.tell_apart([agent.actor, *agent.critics, named["target"]])
    return [known.of(thing) for thing in (agent.actor, *agent.critics, named["target"])]


def test_variables() -> None:
    """A variable of a function that runs is the label; an object that is alone needs none."""
    assert of_variables() == [["first", "second"], [""]]


def test_attributes() -> None:
    """So is the way to it through attributes, lists and dictionaries."""
    assert of_attributes() == ["agent.actor", "agent.critics[0]", "agent.critics[1]", "named[target]"]


def test_attributes_of_self() -> None:
    """Attributes of `self` have a label without `self`."""

    class Trainer:
        def __init__(self) -> None:
            self.actor, self.critic = Thing(), Thing()

        def labels(self) -> list[str]:
            known = Labels()
            known.tell_apart([self.actor, self.critic])
            return [known.of(thing) for thing in (self.actor, self.critic)]

    assert Trainer().labels() == ["actor", "critic"]


def test_what_nobody_holds_is_numbered() -> None:
    """Where no variable leads to it, a number tells it from the others."""
    known, held = Labels(), iter([Slots(), Slots()])
    things = Slots()
    things.held = list(held)
    known.tell_apart(things.held)
    assert [known.of(thing) for thing in things.held] == ["0", "1"]


class Slots:
    __slots__ = ("__weakref__", "held")


def test_a_label_stays() -> None:
    """It is what it was when it was looked up, also after more have come; those get others."""

    def renamed() -> list[str]:
        known, first, second = Labels(), Thing(), Thing()
        known.tell_apart([first, second])
        third, first = first, Thing()
        known.tell_apart([third, second, first])
        return [known.of(thing) for thing in (third, second, first)]

    assert renamed() == ["first", "second", "0"]


def test_variables_are_not_kept_alive() -> None:
    """Looking at the variables of functions leaves what they drop afterwards to be freed."""

    def caller() -> bool:
        dropped = Thing()
        tell_apart(Thing(), Thing())
        gone = weakref.ref(dropped)
        del dropped
        return gone() is None

    assert caller()


def test_a_dictionary_of_variables_stays_as_it_is() -> None:
    """That which a function holds of its own is neither emptied nor brought up to date."""
    number = 1
    held = locals()
    before = dict(held)
    number += 1
    tell_apart(Thing(), Thing())
    assert held == before


def load(data: Any, evaluation: dict[str, Any]) -> None:
    for _ in range(2):
        list(data)
        list(evaluation["loader"])
    for _ in DataLoader(range(1)):  # which no variable holds
        pass


def train(agent: Any, a_optimizer: Any, c_optimizer: Any) -> None:
    x = torch.ones(1, 2)
    (agent.actor(x).sum() + agent.critics[0](x).sum()).backward()
    a_optimizer.step()
    c_optimizer.step()


def test_models(listening: Listening) -> None:
    """Two models of a class are two regions, forward and backward; what is inside keeps its name."""

    def run() -> Any:
        agent = Agent(lambda: nn.Sequential(nn.Linear(2, 2)))
        x = torch.ones(1, 2, requires_grad=True)
        actor, critic = instrument.annotate_modules(agent.actor), instrument.annotate_modules(agent.critics[0])
        with actor, critic, listening() as heard:
            agent.actor(x).sum().backward()
            agent.critics[0](x).sum().backward()
        return heard

    assert run().tree() == [
        ["Sequential[agent.actor]", ["0"]],
        ["Sequential[agent.actor] (backward)", ["0 (backward)"]],
        ["Sequential[agent.critics[0]]", ["0"]],
        ["Sequential[agent.critics[0]] (backward)", ["0 (backward)"]],
    ]


def test_a_model_that_comes_later(listening: Listening) -> None:
    """A model keeps the name that it has in a recording; from the next one on it has its label too."""

    def run() -> list[Any]:
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        x = torch.ones(1, 2)
        with instrument.annotate_modules(actor, backward=False), listening() as first:
            actor(x)
            with instrument.annotate_modules(critic, backward=False):
                critic(x)
                actor(x)
        with (
            instrument.annotate_modules(actor, backward=False),
            instrument.annotate_modules(critic, backward=False),
            listening() as second,
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


def test_parts_that_are_called_by_themselves(listening: Listening) -> None:
    """Two attributes of a class, as actor and critic, are told apart where no forward is around; not layers."""
    model = Both()
    x = torch.ones(1, 2)
    with instrument.annotate_modules(model, names="class"), listening() as heard:
        model.actor(x).sum().backward()
        model.eval().critic(x)
        model.layers[1](model.layers[0](x))
        model.train()(x)
    assert heard.tree() == [
        ["Sequential[actor]", ["Linear"]],
        ["Sequential[actor] (backward)", ["Linear (backward)"]],
        ["Sequential[critic] (eval)", ["Linear (eval)"]],
        ["ReLU (eval)"],
        ["ReLU (eval)"],
        ["Both", ["Sequential", ["Linear"]], ["Sequential", ["Linear"]]],
    ]


def test_parts_of_what_has_no_forward(listening: Listening) -> None:
    """So are those of a module that only holds them."""
    agent = nn.Module()
    agent.actor, agent.critic = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with instrument.annotate_modules(agent, names="class", backward=False), listening() as heard:
        agent.actor(x)
        agent.critic(x)
    assert heard.tree() == [["Linear[actor]"], ["Linear[critic]"]]


def test_one_model_has_no_label(listening: Listening) -> None:
    """Neither has one that is annotated twice, nor models of different classes."""
    model, other = nn.Linear(2, 2), nn.ReLU()
    handles = [instrument.annotate_modules(model) for model in (model, model, other)]
    with listening() as heard:
        other(model(torch.ones(1, 2)))
    for handle in handles:
        handle.remove()
    assert heard.tree() == [["Linear"], ["ReLU"]]


def test_optimizers(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """The ranges that torch draws around two of a class have the names of their variables, and are drawn once."""

    def run() -> list[str]:
        gc.collect()
        optimizers._complete = False
        agent = Agent(lambda: nn.Linear(2, 2))
        a_optimizer = torch.optim.Adagrad(agent.actor.parameters())
        c_optimizer = torch.optim.Adagrad(agent.critics[0].parameters())
        with instrument.annotate_step("optimizer"):
            return [event["name"] for event in recorded(lambda: train(agent, a_optimizer, c_optimizer))]

    names = run()
    assert [f"Optimizer.step#Adagrad.step[{name}]" for name in ("a_optimizer", "c_optimizer")] == names


def test_one_made_in_a_window(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """An optimizer that comes later is told from those that were there."""
    gc.collect()
    model = nn.Linear(2, 2)
    (model(torch.ones(1, 2))).sum().backward()
    early = torch.optim.Adadelta(model.parameters())

    def step() -> None:
        early.step()
        late = torch.optim.Adadelta(model.parameters())
        late.step()

    optimizers._complete = False
    with instrument.annotate_step("optimizer"):
        names = [event["name"] for event in recorded(step)]
    assert names == ["Optimizer.step#Adadelta.step", "Optimizer.step#Adadelta.step[late]"]


def test_a_step_that_makes_optimizers_searches_little(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """Those of an inner loop keep the name of their variable, and cost no search of all that the program holds."""
    held = [[Thing() for _ in range(90)] for _ in range(90)]
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    outer = torch.optim.Adadelta(model.parameters())
    calls = Counter[tuple[str, str]]()

    def step() -> None:
        outer.step()
        sys.setprofile(lambda frame, event, _: calls.update([(Path(frame.f_code.co_filename).name, event)]))
        for _ in range(20):
            inner = torch.optim.Adadelta(model.parameters())
            inner.step()
            for _ in DataLoader(range(1)):
                pass
        sys.setprofile(None)
        del held[:]

    with instrument.annotate_step("optimizer", "data"):
        names = Counter(event["name"] for event in recorded(step))
    assert names["Optimizer.step#Adadelta.step[inner]"] == 20
    assert 0 < calls["labels.py", "call"] < 40_000  # some for each value looked at: 8,100 by each search


def test_a_number_is_used_again(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """An optimizer that no variable holds takes the number of one that is gone."""

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
    """The ranges that torch draws around two loaders' batches have the names of their variables."""

    def run() -> list[str]:
        data, evaluation = DataLoader(range(4), 2), {"loader": DataLoader(range(4), 4)}
        with instrument.annotate_step("data"):
            return [event["name"] for event in recorded(lambda: load(data, evaluation))]

    gc.collect()
    loaders._complete = False
    names = Counter(run())
    batches = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert names == {f"{batches}[data]": 6, f"{batches}[evaluation[loader]]": 4, batches: 2}


def test_one_data_loader(recorded: Callable[..., list[dict[str, Any]]]) -> None:
    """A loader that is alone, with another one that was left over, keeps torch's name."""
    gc.collect()
    kept = DataLoader(range(4), 4)
    vars(kept)["attribute"] = kept
    del kept
    loaders._complete = False
    loader = DataLoader(range(4), 2)
    with instrument.annotate_step("data"):
        names = {event["name"] for event in recorded(lambda: list(loader))}
    assert names == {"enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"}


@pytest.mark.parametrize("modes", [True, False])
def test_evaluation_mode(listening: Listening, modes: bool) -> None:
    """A forward in evaluation mode says so, module by module, as the mode is when it is called."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    with instrument.annotate_modules(model, backward=False, shapes=True, modes=modes), listening() as heard:
        model(x)
        model.eval()
        model(x)
        model.train()
        model[1].eval()
        model(x)
    mark = " (eval)" if modes else ""
    assert heard.tree() == [
        ["Sequential", ["0"], ["1"]],
        [f"Sequential{mark}", [f"0{mark}"], [f"1{mark}"]],
        ["Sequential", ["0"], [f"1{mark}"]],
    ]


def test_evaluation_mode_of_compiled_models(listening: Listening) -> None:
    """Also of what has no hooks, without another compilation for it."""
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    made: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(x)
    compiled.eval()
    compiled(x)
    before = len(made)
    with instrument.annotate_modules(compiled), listening() as heard:
        compiled(x)
        compiled.train()
        compiled(x)
    assert [name for name, *_ in heard.tree()] == ["Linear (eval)", "Linear"]
    assert len(made) == before
    torch._dynamo.reset()
