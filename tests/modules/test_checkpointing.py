"""Activation checkpointing: the recomputation runs in the backward, on a GPU on another thread than the forward.

Each thread numbers the autograd nodes that it makes, so that a node of the forward may have the number of
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
from .conftest import Listening
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
    """Blocks in a row, each called through ``wrap``."""

    def __init__(self, count: int, wrap: Wrap, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


def here(function: Callable[[], Any]) -> Any:
    return function()


@pytest.fixture
def elsewhere() -> Iterator[Call]:
    """Calls a function on another thread, which made no autograd node yet and has lower numbers than this one."""
    advance_to(2000)
    # OpenMP counts threads by thread; sums over other numbers of them have other last bits.
    with ThreadPoolExecutor(1, "", torch.set_num_threads, (torch.get_num_threads(),)) as thread:
        yield lambda function: thread.submit(function).result()


@pytest.fixture(params=["here", "elsewhere"])
def backward(request: pytest.FixtureRequest) -> Call:
    """Calls a function on the thread of the backward."""
    return here if request.param == "here" else request.getfixturevalue("elsewhere")


def advance_to(number: int) -> None:
    """Make autograd nodes on this thread, until the next one has at least ``number``."""
    x = torch.ones(1, requires_grad=True)
    while next_number() < number:
        x.exp()


def step(model: nn.Module, call: Call) -> list[Any]:
    """Train for one step, whose backward ``call`` calls; return the loss and all gradients."""
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
    loss = model(x).square().sum()
    call(loss.backward)
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def blocks(count: int, wrap: Wrap) -> Blocks:
    torch.manual_seed(0)
    return Blocks(count, wrap)


def forward_of(name: str) -> list[Any]:
    return [name, [f"{name}.lin"], [f"{name}.act"]]


def test_recomputed_inside_of_the_backward(listening: Listening, backward: Call) -> None:
    """A block is computed again in the backward region of the layer that needs it, and nothing else changes."""
    expected = step(blocks(3, recomputed), here)
    with instrument.annotate_modules(model := blocks(3, recomputed)), listening() as heard:
        assert same(step(model, backward), expected)
    assert heard.tree() == [
        ["Blocks", *[forward_of(f"blocks.{at}") for at in range(3)]],
        [
            "Blocks (backward)",
            *[
                [
                    f"blocks.{at} (backward)",
                    [f"blocks.{at}.act (backward)", forward_of(f"blocks.{at}")],
                    [f"blocks.{at}.lin (backward)"],
                ]
                for at in (2, 1, 0)
            ],
        ],
    ]


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_same_on_another_thread(listening: Listening, elsewhere: Call, wrap: Wrap) -> None:
    """Regions, their order and all numbers are those of a backward on the thread of the forward."""
    heard = []
    numbers = [step(blocks(3, wrap), here)]
    for call in (here, elsewhere):
        with instrument.annotate_modules(model := blocks(3, wrap)), listening() as events:
            numbers.append(step(model, call))
        heard.append(events.tree())
    assert heard[0] == heard[1]
    assert same(numbers[0], numbers[1])
    assert same(numbers[0], numbers[2])


@pytest.mark.parametrize("wrap", [recomputed, nested])
def test_numbers_that_meet(listening: Listening, wrap: Wrap) -> None:
    """Nodes of the forward that have the numbers of recomputed ones are not taken for those."""
    with instrument.annotate_modules(model := blocks(3, wrap)), listening() as expected:
        step(model, here)
    advance_to(200)
    for shift in range(-30, 30):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(advance_to, next_number() + shift).result()
            with instrument.annotate_modules(model), listening() as heard:
                step(model, lambda function, thread=thread: thread.submit(function).result())
        assert heard.events == expected.events


class Passing(nn.Module):
    """Makes autograd nodes, and returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.lin(x)
        return x


def test_an_input_that_is_returned(listening: Listening, backward: Call) -> None:
    """A module whose output the forward made, and not its recomputation, opens no region there."""

    def wrap(forward: Forward, x: Tensor) -> Tensor:
        return recomputed(lambda y: forward(passing(y)), x)

    passing, model = Passing(), blocks(3, wrap)
    model.passing = passing
    with instrument.annotate_modules(model), listening() as heard:
        step(model, backward)
    names = [event for event in heard.events if event.endswith("(backward)")]
    assert names.count("+Blocks (backward)") == names.count("+blocks.1 (backward)") == 1
    assert "+passing (backward)" not in names
    heard.tree()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint under no_grad
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes)
def test_any_model_on_another_thread(listening: Listening, elsewhere: Call, shape: Shape) -> None:
    """Whatever the model, its regions are those of a backward on the thread of the forward."""
    trees, numbers = [], []
    for call in (here, elsewhere):
        with instrument.annotate_modules(model := model_of(shape)), listening() as heard:
            numbers.append(train(model, True, call))
        trees.append(heard.tree())
    assert trees[0] == trees[1]
    assert same(*numbers)


def test_an_exception_in_a_recomputation(listening: Listening, backward: Call) -> None:
    """It comes out of the backward, whose regions nest all the same; so do those of the next step."""

    class Failing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ArithmeticError
            return x.sin()

    model = blocks(3, recomputed)
    model.blocks[1].act = Failing()
    with instrument.annotate_modules(model), listening() as heard:
        with pytest.raises(ArithmeticError):
            step(model, backward)
        heard.tree()
        heard.events.clear()
        step(model, backward)
    _, behind = heard.tree()
    assert [name for name, *_ in behind[1:]] == [f"blocks.{at} (backward)" for at in (2, 1, 0)]


@contextlib.contextmanager
def node_visits() -> Iterator[list[int]]:
    """Count how often Python code of this thread asks an autograd node for its number."""
    visits = [0]

    def profile(frame: object, event: str, called: Any) -> None:
        visits[0] += event == "c_call" and called.__name__ == "_sequence_nr"

    sys.setprofile(profile)
    try:
        yield visits
    finally:
        sys.setprofile(None)


def test_visits_of_nodes(listening: Listening, backward: Call) -> None:
    """As many nodes are looked at as the recomputation made, a few times each, and none of the forward."""

    def counted(run: Callable[[], Any]) -> None:
        before = next_number()
        with node_visits() as visits:
            run()
        found.append((next_number() - before, visits[0]))

    found: list[tuple[int, int]] = []
    for count in (10, 80):
        with instrument.annotate_modules(model := blocks(count, recomputed)), listening():
            step(model, lambda run: backward(lambda: counted(run)))
    (few, visits_of_few), (many, visits_of_many) = found
    assert many == 8 * few
    assert few <= visits_of_few <= 4 * few
    assert visits_of_many <= 4 * many


@pytest.mark.gpu
def test_on_a_gpu(listening: Listening, tmp_path: Path) -> None:
    """Numbers are those without us, listened to and recorded; each block is there twice, and once backward."""
    count, trace = 100, tmp_path / "trace.json"
    expected = step(blocks(count, recomputed).cuda(), here)
    with instrument.annotate_modules(model := blocks(count, recomputed).cuda()), listening() as heard:
        assert same(step(model, here), expected)
    heard.tree()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    model = blocks(count, recomputed).cuda()
    with instrument.annotate_modules(model), profile(activities=activities) as prof:
        assert same(step(model, here), expected)
    prof.export_chrome_trace(str(trace))
    for names in (
        Counter(event[1:] for event in heard.events if event.startswith("+")),
        Counter(event["name"] for event in annotations(trace)),
    ):
        assert [2] * count == [names[f"blocks.{at}"] for at in range(count)]
        assert [1] * count == [names[f"blocks.{at} (backward)"] for at in range(count)]
