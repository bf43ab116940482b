"""Callables made by `make_graphed_callables`, on a real GPU: each call is one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instrument.record.stepping.follower import StepFollower

from ..support.cuda_graphs import Replays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # torch 2.14, of make_graphed_callables
]


class Training:
    """Trains a model on the GPU and keeps its losses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64, device="cuda"), nn.Linear(64, 8, device="cuda")
        self.model = nn.Sequential(self.first, self.second)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.batch = torch.randn(32, 64, device="cuda")
        self.losses: list[float] = []

    def steps(self, count: int, call: Callable[..., Any]) -> None:
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            loss = call(self.batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def graph_model(training: Training) -> Any:
    return torch.cuda.make_graphed_callables(training.model, (training.batch.clone(),))


def graph_all_parts(training: Training) -> Any:
    hidden = torch.randn(32, 64, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables((training.first, training.second), ((training.batch.clone(),), (hidden,)))
    return training.model


def graph_wrapped_model(training: Training) -> Any:
    return torch.cuda.make_graphed_callables(nn.Sequential(training.model), (training.batch.clone(),))


@pytest.mark.parametrize("eager", [0, 2])
@pytest.mark.parametrize("step_on", ["forward", "backward", "optimizer", None])
@pytest.mark.parametrize("make", [graph_model, graph_all_parts, graph_wrapped_model])
def test_each_call_is_a_step(make: Callable[[Training], Any], step_on: str | None, eager: int) -> None:
    """Each call of a graphed model is a step, whether the model ran before or not; training is unchanged."""
    plain = Training()
    plain.steps(eager + 10, plain.model)
    seen: list[int] = []
    training = Training()
    follower = StepFollower(lambda: seen.append(1), seen.clear, step_on)
    follower.follow()
    try:
        training.steps(eager, training.model)
        call = make(training)
        assert len(seen) == eager
        training.steps(10, call)
    finally:
        follower.remove()
    assert len(seen) == eager + 10
    torch.testing.assert_close(training.losses, plain.losses)


def test_graphed_function_that_calls_the_model() -> None:
    """A replay of the function's graph counts as a call of the model."""
    seen: list[int] = []
    training = Training()
    follower = StepFollower(lambda: seen.append(1), seen.clear, "forward")
    follower.follow()
    try:
        training.steps(2, training.model)
        call = torch.cuda.make_graphed_callables(
            lambda x: training.model(x), (training.batch.clone().requires_grad_(),)
        )
        for _ in range(10):
            call(training.batch.clone().requires_grad_())
    finally:
        follower.remove()
    assert len(seen) == 12


def test_evaluation_runs_without_the_graph() -> None:
    """A module graphed for training runs without its graph in evaluation, and its calls count."""
    seen: list[int] = []
    training = Training()
    follower = StepFollower(lambda: seen.append(1), seen.clear, "forward")
    follower.follow()
    try:
        call = graph_model(training)
        training.steps(5, call)
        training.model.eval()
        with torch.no_grad():
            for _ in range(5):
                call(training.batch)
    finally:
        follower.remove()
    assert len(seen) == 10


def test_backward_inside_a_backward() -> None:
    """A backward graph replayed on an autograd thread belongs to the enclosing backward pass."""
    training, graph = Training(), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.model(training.batch).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad(set_to_none=True)

    seen: list[int] = []
    follower = StepFollower(lambda: seen.append(1), seen.clear, "backward")
    follower.follow()
    try:
        with torch.cuda.graph(graph):
            training.model(training.batch).sum().backward()
        for _ in range(10):
            Replays.apply(training.batch.clone().requires_grad_(), graph).sum().backward()
        torch.cuda.synchronize()
        assert len(seen) == 10
        graph.replay()
    finally:
        follower.remove()
    assert len(seen) == 11
