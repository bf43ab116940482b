"""Activation checkpointing: the recomputation runs in the backward, with a GPU on another thread than the forward.

Each thread numbers the autograd nodes that it creates, so a node of the forward may have the number of
one of the recomputation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import instrument

from ..conftest import annotations
from ..support.net import Block
from .conftest import AttachEmitter
from .test_any_model import Shape, model_of, same, shapes, train

next_number = torch.autograd._get_sequence_nr
Forward = Callable[[Tensor], Tensor]
Wrap = Callable[[Forward, Tensor], Tensor]
Call = Callable[[Callable[[], Any]], Any]


def plain(forward: Forward, x: Tensor) -> Tensor:
    return forward(x)


def recomputed(forward: Forward, x: Tensor) -> Tensor:
    return checkpoint(forward, x, use_reentrant=False)


def to_the_end(forward: Forward, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return recomputed(forward, x)


def reentrant(forward: Forward, x: Tensor) -> Tensor:
    return checkpoint(forward, x, use_reentrant=True)


def nested(forward: Forward, x: Tensor) -> Tensor:
    return recomputed(lambda y: recomputed(forward, y.cos()) * 2, x.sin())


def selective(forward: Forward, x: Tensor) -> Tensor:
    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = operator is torch.ops.aten.add.Tensor
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(forward, x, use_reentrant=False, context_fn=contexts)


WRAPS = [plain, recomputed, to_the_end, reentrant, nested, selective]


class Blocks(nn.Module):
    """A sequence of blocks, each called through ``wrap``."""

    def __init__(self, count: int, wrap: Wrap, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


def call_here(function: Callable[[], Any]) -> Any:
    return function()


@pytest.fixture
def on_another_thread() -> Iterator[Call]:
    """Return a caller on another thread, which has made no autograd nodes and has lower sequence numbers."""
    advance_to(2000)
    # OpenMP's number of threads is per thread, and the last bits of sums depend on it.
    with ThreadPoolExecutor(1, "", torch.set_num_threads, (torch.get_num_threads(),)) as thread:
        yield lambda function: thread.submit(function).result()


@pytest.fixture(params=["here", "on_another_thread"])
def backward(request: pytest.FixtureRequest) -> Call:
    """Return a caller for the thread of the backward pass."""
    return call_here if request.param == "here" else request.getfixturevalue("on_another_thread")


def advance_to(number: int) -> None:
    """Create autograd nodes on this thread until the next sequence number is at least ``number``."""
    x = torch.ones(1, requires_grad=True)
    while next_number() < number:
        x.exp()


def step(model: nn.Module, call: Call) -> list[Any]:
    """Train for one step, with the backward run by ``call``; return the loss and all gradients."""
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
    loss = model(x).square().sum()
    call(loss.backward)
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def blocks(count: int, wrap: Wrap) -> Blocks:
    torch.manual_seed(0)
    return Blocks(count, wrap)


def forward_tree(name: str) -> list[Any]:
    return [name, [f"{name}.lin"], [f"{name}.act"]]


def test_recomputation_inside_the_backward(attach_emitter: AttachEmitter, backward: Call) -> None:
    """A block is recomputed inside the backward region of the layer that needs it; nothing else changes."""
    expected = step(blocks(3, recomputed), call_here)
    with instrument.annotate_modules(model := blocks(3, recomputed)), attach_emitter() as emitter:
        assert same(step(model, backward), expected)
    assert emitter.tree() == [
        ["Blocks", *[forward_tree(f"blocks.{at}") for at in range(3)]],
        [
            "Blocks (backward)",
            *[
                [
                    f"blocks.{at} (backward)",
                    [f"blocks.{at}.act (backward)", forward_tree(f"blocks.{at}")],
                    [f"blocks.{at}.lin (backward)"],
                ]
                for at in (2, 1, 0)
            ],
        ],
    ]


@pytest.mark.parametrize("wrap", WRAPS)
def test_backward_on_another_thread(attach_emitter: AttachEmitter, on_another_thread: Call, wrap: Wrap) -> None:
    """Regions, their order and all numbers are the same as with a backward on the forward's thread."""
    trees = []
    numbers = [step(blocks(3, wrap), call_here)]
    for call in (call_here, on_another_thread):
        with instrument.annotate_modules(model := blocks(3, wrap)), attach_emitter() as emitter:
            numbers.append(step(model, call))
        trees.append(emitter.tree())
    assert trees[0] == trees[1]
    assert same(numbers[0], numbers[1])
    assert same(numbers[0], numbers[2])


@pytest.mark.corpus
@pytest.mark.parametrize("wrap", [recomputed, nested])
def test_colliding_sequence_numbers(attach_emitter: AttachEmitter, wrap: Wrap) -> None:
    """Forward nodes are not confused with recomputed nodes of the same sequence number."""
    with instrument.annotate_modules(model := blocks(3, wrap)), attach_emitter() as expected:
        step(model, call_here)
    for shift in range(-30, 30):  # on new threads, whose numbers are low: to make nodes takes time
        with ThreadPoolExecutor(1) as forward, ThreadPoolExecutor(1) as backward:
            forward.submit(advance_to, 40).result()
            backward.submit(advance_to, 40 + shift).result()
            with instrument.annotate_modules(model), attach_emitter() as emitter:
                forward.submit(step, model, lambda function, to=backward: to.submit(function).result()).result()
        assert emitter.events == expected.events


class Passthrough(nn.Module):
    """Creates autograd nodes, but returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.lin(x)
        return x


def test_recomputation_that_returns_its_input(attach_emitter: AttachEmitter, backward: Call) -> None:
    """A module whose recomputation did not create its output opens no region in the backward."""

    def wrap(forward: Forward, x: Tensor) -> Tensor:
        return recomputed(lambda y: forward(passing(y)), x)

    passing, model = Passthrough(), blocks(3, wrap)
    model.passing = passing
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        step(model, backward)
    names = [event for event in emitter.events if event.endswith("(backward)")]
    assert names.count("+Blocks (backward)") == names.count("+blocks.1 (backward)") == 1
    assert "+passing (backward)" not in names
    emitter.tree()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint under no_grad
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes)
def test_random_models_on_another_thread(
    attach_emitter: AttachEmitter, on_another_thread: Call, shape: Shape
) -> None:
    """Any model has the same regions with a backward on another thread as on the forward's thread."""
    trees, numbers = [], []
    for call in (call_here, on_another_thread):
        with instrument.annotate_modules(model := model_of(shape)), attach_emitter() as emitter:
            numbers.append(train(model, True, call))
        trees.append(emitter.tree())
    assert trees[0] == trees[1]
    assert same(*numbers)


def test_exception_in_a_recomputation(attach_emitter: AttachEmitter, backward: Call) -> None:
    """An exception leaves the backward with nested regions, and the next step is unaffected."""

    class Failing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ArithmeticError
            return x.sin()

    model = blocks(3, recomputed)
    model.blocks[1].act = Failing()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        with pytest.raises(ArithmeticError):
            step(model, backward)
        emitter.tree()
        emitter.events.clear()
        step(model, backward)
    _, behind = emitter.tree()
    assert [name for name, *_ in behind[1:]] == [f"blocks.{at} (backward)" for at in (2, 1, 0)]


@contextlib.contextmanager
def node_visits() -> Iterator[list[int]]:
    """Count how often Python code on this thread reads the sequence number of an autograd node."""
    visits = [0]

    def profile(frame: object, event: str, called: Any) -> None:
        visits[0] += event == "c_call" and called.__name__ == "_sequence_nr"

    sys.setprofile(profile)
    try:
        yield visits
    finally:
        sys.setprofile(None)


def test_number_of_node_visits(attach_emitter: AttachEmitter, backward: Call) -> None:
    """Only nodes of the recomputation are visited, each a few times."""

    def count_visits(run: Callable[[], Any]) -> None:
        before = next_number()
        with node_visits() as visits:
            run()
        results.append((next_number() - before, visits[0]))

    results: list[tuple[int, int]] = []
    for count in (10, 80):
        with instrument.annotate_modules(model := blocks(count, recomputed)), attach_emitter():
            step(model, lambda run: backward(lambda: count_visits(run)))
    (few, visits_of_few), (many, visits_of_many) = results
    assert many == 8 * few
    assert few <= visits_of_few <= 4 * few
    assert visits_of_many <= 4 * many


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_values")
def test_on_a_gpu(attach_emitter: AttachEmitter, tmp_path: Path) -> None:
    """Numbers equal those of an unannotated model; each block has two forward regions and one backward region."""
    count, trace = 100, tmp_path / "trace.json"
    expected = step(blocks(count, recomputed).cuda(), call_here)
    with instrument.annotate_modules(model := blocks(count, recomputed).cuda()), attach_emitter() as emitter:
        assert same(step(model, call_here), expected)
    emitter.tree()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    model = blocks(count, recomputed).cuda()
    with instrument.annotate_modules(model), profile(activities=activities) as prof:
        assert same(step(model, call_here), expected)
    prof.export_chrome_trace(str(trace))
    for names in (
        Counter(event[1:] for event in emitter.events if event.startswith("+")),
        Counter(event["name"] for event in annotations(trace)),
    ):
        assert [2] * count == [names[f"blocks.{at}"] for at in range(count)]
        assert [1] * count == [names[f"blocks.{at} (backward)"] for at in range(count)]
