"""`OptimizerSteps` counts the steps of the first optimizer, however it is called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from instrument.record.modules import parts
from instrument.record.stepping.follower import StepFollower
from instrument.record.stepping.optimizer_steps import OptimizerSteps

RANGES = torch.autograd.profiler.record_function
BEFORE = {
    (owner, name): vars(owner).get(name)
    for owner, name in [(RANGES, "__enter__"), (RANGES, "__exit__"), (torch.amp.GradScaler, "step")]
}


class Counter:
    """Counts steps, and checks that none is reported within a backward pass."""

    def __init__(self) -> None:
        self.steps = 0
        self.steps_of = StepFollower(self.step, lambda: None, "optimizer")
        self.steps_of.follow()

    def step(self) -> None:
        self.steps += 1
        assert torch._C._current_graph_task_id() == -1


@pytest.fixture
def counter() -> Iterator[Counter]:
    step_counter = Counter()
    yield step_counter
    step_counter.steps_of.remove()
    assert {place: vars(place[0]).get(place[1]) for place in BEFORE} == BEFORE


def weights(count: int = 2) -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def backward(parameters: list[torch.Tensor]) -> None:
    sum((parameter**2).sum() for parameter in parameters).backward()  # type: ignore[union-attr]


def train(optimizer: torch.optim.Optimizer, reached: list[torch.Tensor]) -> None:
    """Make an update whose backward pass reaches these parameters."""
    optimizer.zero_grad()
    backward(reached)
    optimizer.step()


def test_gradient_accumulation(counter: Counter) -> None:
    """A step is one update, however many backward passes it has."""
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    for batch in range(6):
        backward(parameters)
        if batch % 2:
            optimizer.step()
    assert counter.steps == 3


def test_two_optimizers(counter: Counter) -> None:
    """Of several optimizers, the one that steps first counts; once it is deleted, the one that goes on."""
    parameters = weights()
    first, second = (torch.optim.SGD([parameter]) for parameter in parameters)
    for _ in range(3):
        backward(parameters)
        first.step()
        second.step()
    assert counter.steps == 3
    first.step()
    del first
    second.step()
    second.step()
    assert counter.steps == 6


def test_new_optimizer_for_each_epoch(counter: Counter) -> None:
    """A new optimizer of the same model takes over, although a scheduler keeps the old one alive."""
    parameters = weights()
    kept = []
    for _ in range(3):
        optimizer = torch.optim.SGD(parameters)
        kept.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for _ in range(4):
            backward(parameters)
            optimizer.step()
    assert counter.steps == 12


@pytest.mark.parametrize("order", [1, -1])
def test_optimizers_with_shared_parameters(counter: Counter, order: int) -> None:
    """An optimizer that shares only some parameters takes over, wherever they are in its list."""
    head, other_head, body = weights(3)
    optimizers = [torch.optim.SGD([head, body]), torch.optim.SGD([body, other_head])]
    for optimizer in optimizers[::order]:
        for _ in range(4):
            optimizer.step()
    assert counter.steps == 8


def test_second_training(counter: Counter) -> None:
    """An optimizer that continues alone takes over; a critic that takes several steps at a time does not."""
    first, second = (torch.optim.SGD([parameter]) for parameter in weights())
    for _ in range(3):
        first.step()
        for _ in range(5):
            second.step()
    assert counter.steps == 3
    for _ in range(100):
        second.step()
    assert counter.steps > 30


@pytest.mark.parametrize("phases", [(6, 6), (80, 80, 80, 80), (6, 40, 7, 2)])
def test_phases_of_several_optimizers(counter: Counter, phases: tuple[int, ...]) -> None:
    """If optimizers step one after the other, or in long turns, each update is a step."""
    optimizers = [torch.optim.SGD([parameter]) for parameter in weights()]
    for number, steps in enumerate(phases):
        for _ in range(steps):
            optimizers[number % 2].step()
    assert counter.steps == sum(phases)


@pytest.mark.parametrize(
    ("warmup", "critic", "actor"),
    [(0, 1, 1), (0, 2, 1), (0, 2, 2), (0, 5, 1), (0, 5, 2), (100, 1, 1), (100, 2, 1), (0, 100, 1)],
)
@pytest.mark.parametrize("zeroes_all", [False, True])
def test_alternating_optimizers(counter: Counter, warmup: int, critic: int, actor: int, zeroes_all: bool) -> None:
    """If two optimizers take turns, even after a warm-up of the first, the first one counts."""
    parameters = weights()
    first, second = (torch.optim.SGD([parameter]) for parameter in parameters)
    for _ in range(warmup):
        train(first, parameters[:1])
    for _ in range(20):
        for _ in range(critic):
            train(first, parameters[:1])
        for _ in range(actor):
            if zeroes_all:
                first.zero_grad()
            train(second, parameters)  # its loss is that of the critic
    assert counter.steps == warmup + 20 * critic


@pytest.mark.parametrize("zeroed", ["before", "after", "all"])
@pytest.mark.parametrize("updates", [2, 3, 5])
def test_optimizers_of_folds_that_exist_before(counter: Counter, updates: int, zeroed: str) -> None:
    """If optimizers step in short phases, one after the other, each update is a step from the second on."""
    folds = weights(4)
    optimizers = [torch.optim.SGD([parameter]) for parameter in folds]
    for number, (optimizer, parameter) in enumerate(zip(optimizers, folds, strict=True)):
        for update in range(updates):
            for other in optimizers if zeroed == "all" else [optimizer]:
                other.zero_grad()
            backward([parameter])
            optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad()
            assert counter.steps == number * updates + update + (number == 0 or update > 0)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("updates", [1, 4])
def test_new_model_and_optimizer_for_each_phase(counter: Counter, kept: bool, updates: int) -> None:
    """Each update of short phases is reported when it ends, whether or not earlier optimizers still exist."""
    optimizers = []
    for phase in range(3):
        optimizers.append(torch.optim.SGD(weights()))
        for update in range(updates):
            optimizers[-1].step()
            assert counter.steps == phase * updates + update + 1
        if not kept:
            optimizers.clear()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_outer_optimizer_above_new_inner_ones(counter: Counter, kept: bool, shared: bool) -> None:
    """The inner updates are the steps, whether the outer optimizer updates the same parameters or others."""
    parameters = weights()
    outer = torch.optim.SGD(parameters)
    inner = []
    for _ in range(4):
        inner.append(torch.optim.SGD(parameters if shared else weights()))
        for _ in range(3):
            inner[-1].step()
        if not kept:
            inner.clear()
        outer.step()
    assert counter.steps == 12


@pytest.mark.parametrize("renewed", ["both", "first", "second"])
def test_new_optimizers_of_alternating_models(counter: Counter, renewed: str) -> None:
    """If two optimizers take turns, a new one counts if it replaces the one that counts."""
    generator, critic = ([parameter] for parameter in weights())
    optimizers = [torch.optim.SGD(generator), torch.optim.SGD(critic)]
    for _ in range(3):
        if renewed in ("both", "first"):
            optimizers[0] = torch.optim.SGD(generator)
        if renewed in ("both", "second"):
            optimizers[1] = torch.optim.SGD(critic)
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.step()
    assert counter.steps == 12


def test_short_training_between_phases_of_another(counter: Counter) -> None:
    """A probe that is trained now and then counts, and so does the training that goes on after it."""
    main = torch.optim.SGD(weights())
    for _ in range(3):
        for _ in range(4):
            main.step()
        probe = torch.optim.SGD(weights())
        for _ in range(3):
            probe.step()
    assert counter.steps == 21


def test_step_skipped_by_a_scaler(counter: Counter) -> None:
    """A step skipped for infinite gradients counts, even the first."""
    parameters = weights(1)
    optimizer = torch.optim.SGD(parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0, float("inf"), 1.0):
        scaler.scale((parameters[0] * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert counter.steps == 4


def test_optimizers_that_step_in_the_backward_pass(counter: Counter) -> None:
    """If each parameter has an optimizer that steps in the backward pass, a step ends with the pass."""
    parameters = weights(60)
    optimizers = {parameter: torch.optim.SGD([parameter]) for parameter in parameters}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    for number in range(4):
        assert counter.steps == number
        backward(parameters)
    assert counter.steps == 4


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another, as for sharding or averaging."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_wrapped_optimizer(counter: Counter) -> None:
    """An optimizer that calls another one's step makes one step."""
    parameters = weights()
    optimizer = Wrapper(torch.optim.SGD(parameters))
    for _ in range(3):
        backward(parameters)
        optimizer.step()
    assert counter.steps == 3


def test_closure(counter: Counter) -> None:
    """An optimizer that calls a closure several times in a step makes one step."""
    parameters = weights()
    optimizer = torch.optim.LBFGS(parameters, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(parameter**2).sum() for parameter in parameters]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert counter.steps == 1


def test_compiled_step() -> None:
    """A compiled step is not seen, `compiled` is true, and the graphs are unchanged."""

    def graphs() -> int:
        torch.compiler.reset()
        parameters, found = weights(), []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            found.append(graph)
            return graph.forward

        step = torch.compile(torch.optim.SGD(parameters).step, backend=backend)
        for _ in range(3):
            backward(parameters)
            step()
        return len(found)

    plain = graphs()
    counter = Counter()
    assert graphs() == plain
    assert (counter.steps, counter.steps_of.compiled) == (0, True)
    counter.steps_of.remove()


def test_step_in_a_function_that_is_not_compiled(counter: Counter) -> None:
    """A step in a function that `torch.compiler.disable` excludes ends at once, as that of LBFGS does."""
    (parameter,) = weights(1)
    optimizer = torch.optim.SGD([parameter])
    torch.compile(lambda x: x + 1, backend="eager")(parameter)

    @torch.compiler.disable
    def update() -> int:
        optimizer.step()
        return counter.steps

    assert update() == 1


def test_failing_step(counter: Counter) -> None:
    """A step that raises does not count; the next one does."""
    parameters = weights()
    optimizer = torch.optim.LBFGS(parameters)

    def closure() -> float:
        raise ValueError("no loss")

    for _ in range(2):
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(closure)
    assert counter.steps == 0
    torch.optim.SGD(parameters).step()
    assert counter.steps == 1


def test_recording_starts_and_stops_at_a_step() -> None:
    """A recording may stop and start at the end of a step, as torch has closed its optimizer range by then."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    running: list[profile] = []

    def step() -> None:
        if running:
            running.pop().stop()
        running.append(profile(activities=[ProfilerActivity.CPU]))
        running[0].start()

    steps = OptimizerSteps(step)
    steps.follow()
    for _ in range(20):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    steps.remove()
    names = [event.name for event in running[0].events()] if running[0].stop() is None else []
    assert not any(name.startswith("Optimizer.step") for name in names)


@pytest.mark.parametrize("failing_call", [1, 2])
def test_failing_patch(monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    """If the last patch fails, the earlier ones are undone."""
    watched = [*BEFORE, (torch.autograd, "backward"), (torch.optim.Optimizer, "__init__"), (nn.Module, "__call__")]
    before = {place: vars(place[0]).get(place[1]) for place in watched}
    hooks = len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    contexts, calls = parts.contexts, 0

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        patches = contexts(*given)
        if calls == failing_call:
            yield next(patches)
            raise MemoryError
        yield from patches

    monkeypatch.setattr(parts, "contexts", failing)
    with pytest.raises(MemoryError):
        StepFollower(int, int).follow()
    assert {place: vars(place[0]).get(place[1]) for place in watched} == before
    assert len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) == hooks


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def updates(count: int) -> Callable[[], None]:
    """Return a function that trains for a number of updates with its own optimizer."""
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)

    def train() -> None:
        for _ in range(count):
            backward(parameters)
            optimizer.step()

    return train


def test_training_on_another_thread(counter: Counter) -> None:
    """The optimizer that steps first counts while its thread runs, however many steps other threads make."""
    train, other = updates(7), updates(60)
    for _ in range(2):
        train()
        in_a_thread(other)
    assert counter.steps == 14


def test_training_after_another_thread(counter: Counter) -> None:
    """Once the first optimizer's thread has ended, the next optimizer takes over."""
    in_a_thread(updates(7))
    updates(7)()
    assert counter.steps == 14


def test_every_update_of_one_thread() -> None:
    """Updates in a backward pass belong to the thread that called the pass."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        assert threading.current_thread() is threading.main_thread()

    steps = OptimizerSteps(step, every=True)
    steps.follow()
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    try:
        in_a_thread(updates(3))
        in_a_thread(lambda: backward([parameter]))
        backward([parameter])
        updates(3)()
    finally:
        steps.remove()
    assert count == 4
