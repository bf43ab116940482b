"""Steps in CUDA graphs: a captured step does not count; each replay counts the steps of its graph."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from instrument.record.stepping.follower import StepFollower
from instrument.record.stepping.optimizer_steps import OptimizerSteps

from ..support.cuda_graphs import Device, Training, emulate

METHODS = ("capture_begin", "capture_end", "replay")
GRAPHS = [torch.cuda.CUDAGraph, getattr(torch.xpu, "XPUGraph", torch.cuda.CUDAGraph)]  # older versions lack it


class Counter:
    """Counts the steps that a follower reports."""

    def __init__(self, step_on: str | None = None) -> None:
        self.steps = self.restarts = 0
        self.follower = StepFollower(self._step, self._restart, step_on)
        self.follower.follow()

    def _step(self) -> None:
        self.steps += 1

    def _restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return emulate(monkeypatch)


@pytest.fixture
def counter(device: Device) -> Iterator[Counter]:
    before = [vars(kind)[name] for kind in GRAPHS for name in METHODS]
    step_counter = Counter()
    yield step_counter
    step_counter.follower.remove()
    assert before == [vars(kind)[name] for kind in GRAPHS for name in METHODS]


@pytest.mark.parametrize(("warmups", "updates"), [(3, 1), (4, 1), (3, 4), (0, 1)])
def test_replays_count_the_steps_of_their_graph(counter: Counter, warmups: int, updates: int) -> None:
    """A captured step does not count; each replay counts all steps of the graph."""
    training = Training(warmups, updates=updates)
    training.run(0)
    assert counter.steps == warmups
    for _ in range(100):
        training.graph.replay()
    assert counter.steps == warmups + 100 * updates
    assert counter.follower.by == "optimizer"


def test_step_in_two_graphs(counter: Counter) -> None:
    """The graph of forward and backward contains no step, the graph of the update does."""
    training = Training()
    training.step()
    update = torch.cuda.CUDAGraph()
    with torch.cuda.graph(training.graph):
        training.half()
    with torch.cuda.graph(update):
        training.optimizer.step()
    for _ in range(10):
        training.graph.replay()
        update.replay()
    assert counter.steps == 11


def test_optimizer_outside_of_the_graph(counter: Counter) -> None:
    """An optimizer outside the graph counts as without a graph."""
    training = Training()
    with torch.cuda.graph(training.graph):
        training.half()
    for _ in range(10):
        training.graph.replay()
        training.optimizer.step()
    assert counter.steps == 10


def test_two_optimizers_in_a_graph(counter: Counter) -> None:
    """In a graph with two optimizers, the first one counts."""
    first, second = Training(), Training()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.step()
        second.step()
    for _ in range(200):
        graph.replay()
    assert counter.steps == 200


@pytest.mark.parametrize("how", ["body", "end"])
def test_failing_capture(counter: Counter, device: Device, how: str) -> None:
    """A failing capture raises the program's error, and training without the graph counts."""
    training = Training()

    def fail() -> None:
        if how == "body":
            raise ValueError("on purpose")
        device.fail = True

    with pytest.raises(ValueError if how == "body" else RuntimeError):
        training.capture(fail)
    assert not device.capturing
    for _ in range(5):
        training.step()
    assert counter.steps == 5


def test_graph_captured_again(counter: Counter) -> None:
    """After `reset`, a graph contains the steps of its next capture."""
    training = Training()
    training.run(10)
    training.graph.reset()
    with torch.cuda.graph(training.graph):
        training.step()
        training.step()
    training.graph.replay()
    assert counter.steps == 3 + 10 + 2


def test_capture_on_another_thread(counter: Counter, device: Device) -> None:
    """Steps on this thread count while another thread captures."""
    training, other = Training(), Training()
    begun, over = threading.Event(), threading.Event()

    def inside() -> None:
        begun.set()
        over.wait(60)

    training.step()
    thread = threading.Thread(target=other.capture, args=(inside,))
    thread.start()
    begun.wait(60)
    for _ in range(5):
        training.step()
    over.set()
    thread.join()
    assert counter.steps == 6
    assert not device.capturing


def test_gradient_scaler(counter: Counter) -> None:
    """A scaler's step in a capture counts at each replay."""
    training = Training()
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(training.model(torch.ones(1, 2)).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()

    for _ in range(3):
        step()
    with torch.cuda.graph(training.graph):
        step()
    for _ in range(10):
        training.graph.replay()
    assert counter.steps == 13


def train_step() -> None:
    """A step counted by its function name."""


@pytest.mark.parametrize("step_on", ["backward", "forward", f"{__name__}:train_step"])
def test_other_ends_of_a_step(device: Device, step_on: str) -> None:
    """Captured backward passes and calls of the model or of a function count at each replay."""
    counter = Counter(step_on)
    training = Training()
    try:
        for _ in range(3):
            training.half()
            train_step()
        with torch.cuda.graph(training.graph):
            training.half()
            train_step()
        for _ in range(10):
            training.graph.replay()
    finally:
        counter.follower.remove()
    assert counter.steps == 13


def test_every_optimizer(device: Device) -> None:
    """With `every=True`, a replay counts all updates of its graph."""
    updates: list[int] = []
    steps = OptimizerSteps(lambda: updates.append(1), every=True)
    steps.follow()
    try:
        first, second = Training(), Training()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first.step()
            second.step()
        assert not updates
        graph.replay()
    finally:
        steps.remove()
    assert len(updates) == 2


def test_freed_optimizer(counter: Counter) -> None:
    """Replays count the updates of a freed optimizer, which the graph does not keep alive."""
    training = Training()
    training.run(0)
    del training.optimizer
    for _ in range(10):
        training.graph.replay()
    assert counter.steps == 13


def test_freed_graph(counter: Counter) -> None:
    """A freed graph is not kept alive, and a new graph in its place is distinct."""
    training = Training()
    training.run(1)
    reference = weakref.ref(training.graph)
    training.graph = torch.cuda.CUDAGraph()
    assert reference() is None
    with torch.cuda.graph(training.graph):
        training.half()
    training.graph.replay()
    assert counter.steps == 4


def test_graph_captured_earlier(device: Device) -> None:
    """The steps of an earlier graph are unknown: without other signs, its replays count after a while."""
    training = Training()
    training.run(0)
    counter = Counter()
    try:
        for _ in range(100):
            training.graph.replay()
        assert (counter.steps, counter.follower.explanation) == (0, None)
        for _ in range(50):
            training.graph.replay()
        explanation = counter.follower.explanation
    finally:
        counter.follower.remove()
    assert counter.steps == 150
    assert "a CUDA graph that was captured before" in str(explanation)


def test_earlier_graphs_with_an_optimizer(device: Device) -> None:
    """If an optimizer steps, replays of unknown graphs are parts of its steps."""
    training = Training()
    with torch.cuda.graph(training.graph):
        training.half()
    counter = Counter()
    try:
        for _ in range(4):
            for _ in range(90):
                training.graph.replay()
            training.optimizer.step()
    finally:
        counter.follower.remove()
    assert (counter.steps, counter.follower.by) == (4, "optimizer")


def test_failing_callback(device: Device, lenient: None) -> None:
    """An internal error does not reach the caller of a replay."""

    def fail() -> None:
        raise ValueError("on purpose")

    steps = OptimizerSteps(fail)
    steps.follow()
    try:
        training = Training(0)
        training.run(2)
    finally:
        steps.remove()
    assert device.replays == 2


def test_replay_method_kept_by_the_program(counter: Counter, device: Device) -> None:
    """A bound `replay` that the program kept works, also after `remove`."""
    training = Training()
    training.run(0)
    replay = training.graph.replay
    replay()
    counter.follower.remove()
    replay()
    assert (counter.steps, device.replays) == (4, 2)
