"""Callables made by `make_graphed_callables`: each call is one step, as without graphs."""

from __future__ import annotations

import contextlib
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import make_graphed_callables as imported_before

import instrument
from instrument.record.stepping.follower import StepFollower

from ..support.cuda_graphs import Device, Replays, emulate

X = torch.ones(1, 2)
SIGNS = ["forward", "backward", "optimizer", None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return emulate(monkeypatch)


@contextlib.contextmanager
def count_steps(step_on: str | None) -> Iterator[list[int]]:
    """Count the steps that a follower reports; check that its patches are undone."""
    functions = torch.cuda.make_graphed_callables, torch.cuda.graphs.make_graphed_callables
    seen: list[int] = []
    follower = StepFollower(lambda: seen.append(1), seen.clear, step_on)
    follower.follow()
    try:
        yield seen
    finally:
        follower.remove()
    assert functions == (torch.cuda.make_graphed_callables, torch.cuda.graphs.make_graphed_callables)


class Training:
    """Trains a model step by step, with or without graphs."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.model = nn.Sequential(self.first, self.second)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def steps(self, count: int = 10, call: Callable[..., Any] | None = None) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            (call or self.model)(X.clone()).sum().backward()
            self.optimizer.step()


def graph_model(training: Training) -> Any:
    return torch.cuda.make_graphed_callables(training.model, (X.clone(),))


def graph_model_by_other_name(training: Training) -> Any:
    return torch.cuda.graphs.make_graphed_callables(training.model, (X.clone(),))


def graph_one_part(training: Training) -> Any:
    torch.cuda.make_graphed_callables(training.first, (X.clone(),))
    return training.model


def graph_all_parts(training: Training) -> Any:
    inputs = (X.clone(),), (X.clone().requires_grad_(),)
    torch.cuda.make_graphed_callables((training.first, training.second), inputs)
    return training.model


def graph_parts_in_sequence(training: Training) -> Any:
    inputs = (X.clone(),), (X.clone().requires_grad_(),)
    first, second = torch.cuda.make_graphed_callables((training.first, training.second), inputs)
    return lambda x: second(first(x))


def graph_wrapped_model(training: Training) -> Any:
    return torch.cuda.make_graphed_callables(nn.Sequential(training.model), (X.clone(),))


def graph_function(training: Training) -> Any:
    graphed = torch.cuda.make_graphed_callables(lambda x: training.model(x), (X.clone().requires_grad_(),))
    return lambda x: graphed(x.requires_grad_())


@pytest.mark.parametrize("eager", [0, 2])
@pytest.mark.parametrize("step_on", SIGNS)
@pytest.mark.parametrize(
    "make",
    [
        graph_model,
        graph_model_by_other_name,
        graph_one_part,
        graph_all_parts,
        graph_parts_in_sequence,
        graph_wrapped_model,
    ],
)
def test_each_call_is_a_step(
    device: Device, make: Callable[[Training], Any], step_on: str | None, eager: int
) -> None:
    """Each call is a step, however many graphs it replays, and whether the model ran before or not."""
    training = Training()
    with count_steps(step_on) as seen:
        training.steps(eager, training.first if make is graph_parts_in_sequence else None)
        call = make(training)
        assert len(seen) == eager
        training.steps(10, call)
        assert device.replays >= 20  # forward and backward
    assert len(seen) == eager + 10
    assert not device.violations


@pytest.mark.parametrize("step_on", ["backward", "optimizer", None])
def test_graphed_function(device: Device, step_on: str | None) -> None:
    """A call of a graphed function counts as one step."""
    training = Training()
    with count_steps(step_on) as seen:
        training.steps(2)
        training.steps(10, graph_function(training))
    assert len(seen) == 12


def test_graphed_function_that_calls_the_model(device: Device) -> None:
    """Each replay of the function's graph counts as a call of the model it contains."""
    training = Training()
    with count_steps("forward") as seen:
        training.steps(2)
        call = graph_function(training)
        assert len(seen) == 2
        training.steps(10, call)
    assert len(seen) == 12


@pytest.mark.parametrize("step_on", ["forward", None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_training_and_evaluation(device: Device, training: bool, then: bool, step_on: str | None) -> None:
    """A module runs without its graph in the mode that the graph was not made for, and its calls count."""
    model = nn.Linear(2, 2).train(training)
    with count_steps(step_on) as seen, torch.set_grad_enabled(step_on == "forward"):
        model(X)
        with torch.enable_grad():
            torch.cuda.make_graphed_callables(model, (X.clone(),))
        model.train(then)
        for _ in range(10):
            model(X)
    assert device.replays == 10 * (training == then)
    assert len(seen) == 11


def test_several_followers(device: Device) -> None:
    """Each of several followers counts, also one that starts after the model's first call."""
    training = Training()
    with count_steps("forward") as one, count_steps("forward") as other:
        training.steps(2)
        with count_steps("forward") as late:
            training.steps(1)
            training.steps(10, graph_model(training))
    assert (len(one), len(other), len(late)) == (13, 13, 11)


def test_function_imported_earlier(device: Device) -> None:
    """A `make_graphed_callables` imported earlier accepts the followed model, which has no hooks."""
    training = Training()
    with count_steps("forward") as seen:
        training.steps(2)
        imported_before(training.model, (X.clone(),))
        before = len(seen)
        training.steps(10)
    assert len(seen) == before + 10


def test_error_in_the_warmup(device: Device) -> None:
    """An error in the warm-up is unchanged, and later steps are counted."""
    training = Training()
    with count_steps("forward") as seen:
        training.steps(2)
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            torch.cuda.make_graphed_callables(training.model, (torch.ones(1, 3),))
        training.steps(10)
    assert len(seen) == 12
    assert not [
        entry for entry in caught.traceback if "instrument" in str(entry.path) and "tests" not in str(entry.path)
    ]


def test_backward_inside_a_backward(device: Device) -> None:
    """A backward graph replayed inside an autograd node belongs to the enclosing backward pass."""
    training, graph = Training(), torch.cuda.CUDAGraph()

    with count_steps("backward") as seen:
        with torch.cuda.graph(graph):
            training.model(X).sum().backward()
        for _ in range(10):
            Replays.apply(X.clone().requires_grad_(), graph).sum().backward()
        assert len(seen) == 10
        graph.replay()
    assert len(seen) == 11


replayed: list[Any] = []


def train_step(training: Training) -> None:
    """Run the step once in the capture; then replay its graph."""
    if replayed:
        replayed[0].replay()
    else:
        training.optimizer.zero_grad()
        training.model(X).sum().backward()


def test_function_that_replays_its_own_graph(device: Device) -> None:
    """The function's call is the step; the steps in the graph that it replays do not count."""
    training, graph = Training(), torch.cuda.CUDAGraph()
    with count_steps(f"{__name__}:train_step") as seen:
        with torch.cuda.graph(graph):
            train_step(training)
        replayed.append(graph)
        try:
            for _ in range(10):
                train_step(training)
        finally:
            replayed.clear()
        assert len(seen) == 10
        graph.replay()
    assert len(seen) == 11


@contextlib.contextmanager
def followed(model: nn.Module) -> Iterator[list[int]]:
    with count_steps("forward") as seen:
        model(X)
        assert seen == [1]
        assert not [hooks for name, hooks in vars(model).items() if name.endswith("_hooks") and hooks]
        yield seen


def test_copies_of_a_followed_model() -> None:
    """Scripted, traced, exported, copied and quantized models are the same as without a follower."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    expected = model(X)
    torch.jit.script(model)  # this writes into the model
    exported, pickled = str(torch.export.export(model, (X,)).graph), pickle.dumps(model)
    with followed(model):
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(model), file)
        file.seek(0)
        made = [torch.jit.load(file), torch.jit.trace(model, (X,)), torch.fx.symbolic_trace(model)]
        assert exported == str(torch.export.export(model, (X,)).graph)
        assert pickled == pickle.dumps(model)
    assert all(torch.equal(expected, other(X)) for other in made)


class Plain(nn.Module):
    """A module whose class has no annotations: TorchScript looks up those of `nn.Module`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_scripting_a_followed_model() -> None:
    """TorchScript finds no attributes of the follower, and later calls count."""
    model = Plain().eval()
    with torch.no_grad(), count_steps("forward") as seen:
        model(X)
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(X), model(X))
    assert len(seen) == 2


def test_patched_call_called_directly() -> None:
    """The patched call counts as a call of the model, from a function or from another module."""

    class Other(Plain):
        def call(self, model: nn.Module) -> torch.Tensor:
            result: torch.Tensor = (model._compiled_call_impl or model._call_impl)(X)
            return result

    model = Plain().eval()
    expected = model(X)
    with count_steps("forward"):
        model(X)
        assert model._compiled_call_impl is not None
        assert torch.equal(expected, model._compiled_call_impl(X))
        assert torch.equal(expected, Other().call(model))


def test_replica_through_another_wrapper() -> None:
    """A replica's own forward runs, even if another tool wraps the patched call."""
    model = Plain().eval()
    with count_steps("forward") as seen:
        model(X)
        patched = model._compiled_call_impl
        model._compiled_call_impl = lambda *args: patched(*args)  # type: ignore[method-assign, misc]
        replica = model._replicate_for_data_parallel()
        replica.linear = nn.Linear(2, 2)
        assert torch.equal(replica(X), replica.forward(X))
        assert torch.equal(model(X), model.forward(X))
    assert len(seen) == 2


def test_followed_model_is_freed() -> None:
    """A follower does not keep its model alive."""
    model = Plain().eval()
    with torch.no_grad(), count_steps("forward"):
        model(X)
        ref = weakref.ref(model)
        del model
        assert ref() is None


def test_fused_path_of_a_transformer() -> None:
    """A followed TransformerEncoderLayer keeps its fused path, as it has no hooks."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x = torch.ones(1, 3, 4)
    names: list[set[str]] = []
    with count_steps("forward") as seen, torch.inference_mode():
        for _ in range(3):
            with torch.autograd.profiler.profile() as prof:
                layer(x)
            names.append({event.name for event in prof.function_events})
    assert ["aten::_transformer_encoder_layer_fwd" in called for called in names] == [True] * 3
    assert len(seen) == 3


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), nn.TransformerEncoderLayer(2, 1, 2)])
def test_regions_of_a_followed_model(model: nn.Module, before: int) -> None:
    """A followed model and its parts have regions, whether the recording begins before or after its first call."""
    x = torch.ones(1, 1, 2)
    with count_steps("forward") as seen, instrument.annotate_modules(model):
        for _ in range(before):
            model(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            model(x)
            model(x)
        model(x)
    names = {event.name for event in prof.events()}
    assert {type(model).__name__} | {name for name, _ in model.named_children()} <= names
    assert len(seen) == before + 3


def test_followed_model_compiled_later() -> None:
    """A followed model is compiled as a whole and once, and the compiled model is followed."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Linear(2, 2)
    with followed(model) as seen:
        fast = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            fast(X)
        before = len(seen)
        for _ in range(10):
            fast(X)
        assert len(seen) == before + 10
    fast(X)
    assert len(graphs) == 1
