"""Models and activations are freed, windows may end at any moment, and threads do not disturb each other."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import instrument
from instrument.record.modules.module_calls import running_layers, thread_state
from instrument.record.regions import dispatch

from .conftest import AttachEmitter, RecordingEmitter, Window
from .net_runs import (
    A_BACKWARD,
    B_BACKWARD,
    BACKWARD,
    FORWARD,
    A,
    B,
    assert_same,
    backward_counts,
    batch,
    flat,
    gradients,
    hooks,
    seeded,
)

pytestmark = pytest.mark.corpus


def test_model_is_freed(attach_emitter: AttachEmitter) -> None:
    """An annotated model is freed with its last reference, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with attach_emitter():
            model = seeded()
            handle = instrument.annotate_modules(model)
            out = model(batch())
            out.sum().backward()
            dead = [weakref.ref(thing) for thing in (model, model.a.lin, model.a.lin.weight, out)]
            del model, out
            assert [ref() for ref in dead] == [None] * 4
            handle.remove()
    finally:
        gc.enable()


def test_activations_are_freed(attach_emitter: AttachEmitter) -> None:
    """A module's saved activations are freed with the output, also after a forward without a backward."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            kept = x + 1
            context.save_for_backward(kept)
            alive.append(weakref.ref(context))
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Keeping.apply(x)

    alive: list[weakref.ref[Any]] = []
    model = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 4), Layer())
    gc.collect()
    gc.disable()
    try:
        with instrument.annotate_modules(model), attach_emitter():
            x = batch()
            here = weakref.ref(x)
            out = model(x)
            del x, out
            assert here() is None
            assert [ref() for ref in alive] == [None, None]
            out = model(batch())
            out.sum().backward()
            del out
            assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_activations_are_freed_after_an_error(window: Window) -> None:
    """A failed forward keeps no inputs alive; an interrupted one none after the next call."""

    class Stop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise kind

    model = nn.Sequential(nn.Linear(4, 4), Stop())
    gc.collect()
    gc.disable()
    try:
        for kind in (ValueError, KeyboardInterrupt):
            with window(model):
                x = batch()
                alive = weakref.ref(x)
                with contextlib.suppress(kind):
                    model(x)
                del x
                if kind is KeyboardInterrupt:  # noticed at the next call only
                    model[0](batch())
                assert alive() is None, kind
    finally:
        gc.enable()


def test_model_is_freed_after_an_interrupt(attach_emitter: AttachEmitter) -> None:
    """A model interrupted in its forward is freed with its last reference, or when the window closes."""

    class Stop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    gc.collect()
    gc.disable()
    try:
        with attach_emitter():
            model = nn.Sequential(nn.Linear(4, 4), Stop())
            instrument.annotate_modules(model)
            with contextlib.suppress(KeyboardInterrupt):
                model(batch())
            dead = weakref.ref(model)
            del model
        assert dead() is None
    finally:
        gc.enable()


def test_graph_kept_from_a_window(attach_emitter: AttachEmitter) -> None:
    """An autograd graph from a window runs without regions after it, and with regions in the next one."""
    model, expected = seeded(), seeded()
    expected(batch()).sum().backward()
    with instrument.annotate_modules(model):
        with attach_emitter() as first:
            loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        assert first.tree() == [FORWARD]
        assert_same(gradients(expected), gradients(model))
        with attach_emitter() as second:
            loss.backward(retain_graph=True)
        assert second.tree() == [BACKWARD]
    with attach_emitter() as third:
        model.zero_grad()
        loss.backward()
    third.tree()
    assert_same(gradients(expected), gradients(model))


def test_graph_from_before_a_window(attach_emitter: AttachEmitter) -> None:
    """The backward of a forward before the window has no regions, and none stays open."""
    model = seeded()
    with instrument.annotate_modules(model):
        loss = model(batch()).sum()
        with attach_emitter() as emitter:
            (loss + model(batch()).sum()).backward()
    assert emitter.tree() == [FORWARD, BACKWARD]


def test_window_that_ends_in_a_backward(attach_emitter: AttachEmitter) -> None:
    """A window that ends, or begins, in a backward has balanced regions."""
    model = seeded()
    with instrument.annotate_modules(model):
        stack = contextlib.ExitStack()
        emitters = [stack.enter_context(attach_emitter())]
        middle = model.a(batch())
        middle.register_hook(lambda _: stack.close())
        model.b(middle).sum().backward()
        assert not dispatch.recording
        assert emitters[0].tree()[:3] == [A, B, B_BACKWARD]
        with attach_emitter():
            middle = model.a(batch())
            loss = model.b(middle).sum()
        middle.register_hook(lambda _: emitters.append(stack.enter_context(attach_emitter())))
        loss.backward()
        stack.close()
    assert emitters[1].tree() == [A_BACKWARD]


class CallsInForward(nn.Module):
    """Calls a function in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.call: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        self.call()
        return x


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = CallsInForward()
        self.b = CallsInForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def other_thread(function: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    return run


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("where", ["pre-hook", "forward", "hook"])
def test_removed_in_a_forward(attach_emitter: AttachEmitter, where: str, threaded: bool) -> None:
    """A handle removed in a forward closes the open regions at their ends and adds no more."""
    expected, model = seeded(TwoCalls), seeded(TwoCalls)
    expected(batch()).sum().backward()
    with attach_emitter() as emitter:
        handle = instrument.annotate_modules(model)
        remove = other_thread(handle.remove) if threaded else handle.remove
        if where == "forward":
            model.a.call = remove
            other = None
        else:
            register = getattr(model.a.lin, f"register_forward_{where.replace('-', '_')}")
            other = register(lambda *_: remove())
        model(batch()).sum().backward()
        if other is not None:
            other.remove()
        assert not hooks(model)
        assert emitter.tree()[0] == ["TwoCalls", ["a", ["a.lin"]]]
        assert all(not name.startswith("b") for name, _ in flat(emitter.tree()))
        assert_same(gradients(expected), gradients(model))
        emitter.events.clear()
        model.a.call = lambda: None
        handle.remove()
        model(batch())
        assert not emitter.events


@pytest.mark.parametrize("threaded", [False, True])
def test_removed_in_a_backward(attach_emitter: AttachEmitter, threaded: bool) -> None:
    """A handle removed in a backward leaves balanced regions and no hook."""
    expected, model = seeded(), seeded()
    expected(batch()).sum().backward()
    with attach_emitter() as emitter:
        handle = instrument.annotate_modules(model)
        remove = other_thread(handle.remove) if threaded else handle.remove
        middle = model.a(batch())
        middle.register_hook(lambda _: remove())
        model.b(middle).sum().backward()
        assert not hooks(model)
        assert emitter.tree()[:3] == [A, B, B_BACKWARD]
        assert_same(gradients(expected), gradients(model))


def test_handle_removed_again() -> None:
    """Removing a handle again has no effect, even after its model is freed."""
    model = seeded()
    handle = instrument.annotate_modules(model)
    other = instrument.annotate_modules(model)
    for _ in range(3):
        handle.remove()
    del model
    handle.remove()
    other.remove()
    with other:
        pass


def test_handle_removed_again_leaves_the_next(attach_emitter: AttachEmitter) -> None:
    """Removing a handle again does not affect a later handle of the same model."""
    model = seeded()
    old = instrument.annotate_modules(model)
    old.remove()
    with instrument.annotate_modules(model), attach_emitter() as emitter:
        old.remove()
        model(batch())
    assert emitter.tree() == [FORWARD]


def test_profiler_within_a_forward(tmp_path: Path) -> None:
    """A profiler that starts and stops within a forward shows the regions in between, as complete ranges."""
    model = seeded(TwoCalls)
    expected = model(batch())
    with instrument.annotate_modules(model):
        for _ in range(2):
            prof = profile(activities=[ProfilerActivity.CPU])
            model.a.call, model.b.call = prof.start, prof.stop
            assert torch.equal(model(batch()), expected)
            assert not hooks(model)
            assert regions_of(prof, tmp_path) == ["b", "b.lin"]
        model.a.call = model.b.call = lambda: None
        first, second = (profile(activities=[ProfilerActivity.CPU]) for _ in range(2))

        def swap() -> None:
            first.stop()
            second.start()

        model.a.call = swap
        first.start()
        model(batch())
        second.stop()
        assert not hooks(model)
        assert regions_of(first, tmp_path) == ["TwoCalls", "a", "a.lin"]
        assert regions_of(second, tmp_path) == ["b", "b.lin"]


def regions_of(prof: Any, folder: Path) -> list[str]:
    prof.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    assert all(event["ph"] == "X" for event in found)
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("direct", [False, True])
def test_interrupt_in_a_forward(window: Window, kind: type[BaseException], direct: bool) -> None:
    """After an interrupt in a forward the next call closes the open regions and is not nested in them."""
    model = seeded(TwoCalls)

    def fail() -> None:
        raise kind("stop")

    with window(model) as emitter:
        model.a.call = fail
        with pytest.raises(kind, match="stop"):
            model(batch())
        model.a.call = lambda: None
        if direct:  # a part of the interrupted model
            model.a.lin(batch())
            assert emitter.tree()[1:] == [["a.lin"]]
        model(batch()).sum().backward()
    tree = emitter.tree()
    assert tree[0] == ["TwoCalls", ["a", ["a.lin"]]]
    assert tree[-2:] == [
        ["TwoCalls", ["a", ["a.lin"]], ["b", ["b.lin"]]],
        ["TwoCalls (backward)", ["b (backward)", ["b.lin (backward)"]], ["a (backward)", ["a.lin (backward)"]]],
    ]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_failure_in_a_backward(window: Window, kind: type[BaseException]) -> None:
    """After a backward that failed its regions are closed, and later steps have complete ones."""
    expected, model = seeded(), seeded()

    def fail(_: object) -> None:
        raise kind("stop")

    for each in (expected, model):
        context = window(model) if each is model else contextlib.nullcontext(RecordingEmitter())
        with context as emitter:
            handle = each.a.lin.register_forward_hook(lambda module, args, out: void(out.register_hook(fail)))
            loss = each(batch()).sum()
            with pytest.raises(kind, match="stop"):
                loss.backward()
            handle.remove()
            if each is model:
                assert emitter.events.count("+Net (backward)") == emitter.events.count("-Net (backward)") == 1
                emitter.tree()
                emitter.events.clear()
            each.zero_grad()
            each(batch()).sum().backward()
            if each is model:
                assert emitter.tree() == [FORWARD, BACKWARD]
    assert_same(gradients(expected), gradients(model))


def void(_: object) -> None:
    """Return None."""


def test_failed_backward_is_repeated(window: Window) -> None:
    """The same graph can run again after its backward failed."""
    model = seeded()
    failing = [True]

    def fail(_: object) -> None:
        if failing.pop():
            failing.append(False)
            raise ValueError("stop")
        failing.append(False)

    with window(model) as emitter:
        middle = model.a(batch())
        middle.register_hook(fail)
        loss = model.b(middle).sum()
        with pytest.raises(ValueError, match="stop"):
            loss.backward(retain_graph=True)
        emitter.events.clear()
        loss.backward()
    assert emitter.tree() == [B_BACKWARD, A_BACKWARD]


class EventsByThread:
    """Events by thread, in place of the emitter's list."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}

    def append(self, event: str) -> None:
        self.of.setdefault(threading.get_ident(), []).append(event)

    def trees(self) -> list[list[Any]]:
        trees = []
        for events in self.of.values():
            emitter = RecordingEmitter()
            emitter.events = events
            trees.append(emitter.tree())
        return trees


def test_threads(window: Window) -> None:
    """Two threads that run one model concurrently have a complete tree each."""
    model = seeded()
    expected = model(batch())
    results: list[Tensor] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(3)

    def work() -> None:
        try:
            barrier.wait(20)
            for _ in range(30):
                out = model(batch())
                torch.autograd.grad(out.sum(), model.a.lin.weight)
            results.append(out)
        except BaseException as error:
            errors.append(error)

    with window(model) as emitter:
        by_thread: Any = EventsByThread()
        emitter.events = by_thread
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trees = by_thread.trees()
        emitter.events = []
    assert not errors
    assert len(trees) == 3
    for tree in trees:
        assert [node for node in tree if node[0] == "Net"] == [FORWARD] * 30
        assert backward_counts(tree)["a.lin"] == 30
    assert all(torch.equal(result, expected) for result in results)


def test_windows_while_another_thread_trains(attach_emitter: AttachEmitter) -> None:
    """Windows that open and close while another thread trains have balanced regions."""
    model = seeded()
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                model(batch()).sum().backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    heards = []
    with instrument.annotate_modules(model):
        thread.start()
        for _ in range(30):
            with attach_emitter() as emitter:
                stop.wait(0.005)
            heards.append(emitter)
        stop.set()
        thread.join()
        assert not errors
        assert not hooks(model)
    for emitter in heards:
        emitter.tree()


class Probe(nn.Module):
    """A module that keeps a weak reference to a tensor of its call, and opens or closes a window in it."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act
        self.held: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = x + 1
        self.held.append(weakref.ref(local))
        self.act()
        return x


@pytest.mark.parametrize("act", [running_layers, lambda: thread_state.stack.drop_ended()])
def test_no_cycle_keeps_tensors_of_a_call(act: Callable[[], object], attach_emitter: AttachEmitter) -> None:
    """Tensors of a module's call are freed when it returns, and not by a later garbage collection."""
    model = Probe(act)
    gc.collect()
    gc.disable()
    try:
        with instrument.annotate_modules(model), attach_emitter():
            model(torch.ones(2))
        assert [None] == [reference() for reference in model.held]
    finally:
        gc.enable()
