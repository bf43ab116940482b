"""Fixtures for tests of modules: an attached emitter, and a check that no hook is left."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import instrument
from instrument.base.live_objects import IdentitySet
from instrument.record.modules.compiling import ReplacedCall
from instrument.record.modules.hooks import Hook
from instrument.record.modules.installer import installer
from instrument.record.modules.labels import optimizers
from instrument.record.modules.parts import patcher
from instrument.record.regions import dispatch
from instrument.record.regions.region import Region

from ..support.net import Net
from .net_runs import Run, assert_same, hooks, seeded
from .step_parts import patched


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    """Fail a test that leaves one of the library's hooks on a module, or a patch on torch."""
    yield
    gc.collect()
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and vars(thing)]
    patches = list(installer._patches)
    installer.clear()
    for module in modules:
        held = [*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not [thing for thing in held if isinstance(thing, (Hook, ReplacedCall))], module
    assert not patches


class RecordingEmitter:
    """An emitter that records regions as "+name" and "-name"."""

    name = "recording"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.regions: list[Region] = []

    def push(self, region: Region) -> str:
        self.events.append(f"+{region.name}")
        self.regions.append(region)
        return region.name

    def pop(self, name: str) -> None:
        self.events.append(f"-{name}")

    start = push
    end = pop

    def mark(self, region: Region) -> None:
        self.events.append(f"!{region.name}")

    def tree(self) -> list[Any]:
        """Return the regions as nested lists: [name, [name, ...], ...]; fail if they do not nest."""
        regions: list[Any] = []
        path = [regions]
        for event in self.events:
            if event.startswith("+"):
                node: list[Any] = [event[1:]]
                path[-1].append(node)
                path.append(node)
            else:
                assert path.pop()[0] == event[1:], self.events
        assert path == [regions], self.events
        return regions


AttachEmitter = Callable[[], contextlib.AbstractContextManager[RecordingEmitter]]


@pytest.fixture
def attach_emitter() -> AttachEmitter:
    """Return a context manager that attaches an emitter, which records every region."""

    @contextlib.contextmanager
    def attach() -> Iterator[RecordingEmitter]:
        recording = RecordingEmitter()
        dispatch.active.add(recording)
        try:
            yield recording
        finally:
            dispatch.active.remove(recording)

    return attach


@pytest.fixture
def tree_of(attach_emitter: AttachEmitter) -> Callable[..., list[Any]]:
    """Run a function on a plain model, between windows and in a window; return the regions of the last run."""

    def run(function: Run, make: Callable[[], Any] = Net) -> list[Any]:
        expected = function(seeded(make))
        model = seeded(make)
        with instrument.annotate_modules(model):
            assert_same(expected, function(model))
        model = seeded(make)
        with attach_emitter() as emitter:
            with instrument.annotate_modules(model):
                assert hooks(model)
                assert_same(expected, function(model))
            assert not hooks(model)
        return emitter.tree()

    return run


@pytest.fixture
def window(
    attach_emitter: AttachEmitter,
) -> Callable[[nn.Module], contextlib.AbstractContextManager[RecordingEmitter]]:
    """Return a context manager in which a model is annotated and an emitter attached."""

    @contextlib.contextmanager
    def open_window(model: nn.Module) -> Iterator[RecordingEmitter]:
        with attach_emitter() as emitter, instrument.annotate_modules(model):
            assert hooks(model)
            yield emitter
        assert not hooks(model)

    return open_window


Window = Callable[[nn.Module], contextlib.AbstractContextManager[RecordingEmitter]]
TreeOf = Callable[..., "list[Any]"]


@pytest.fixture
def no_patch_left() -> Iterator[None]:
    """Fail a test that leaves a patch."""
    yield
    handles, remaining = list(patcher.requests), patched()
    patcher.clear()
    assert not remaining
    assert not handles


@pytest.fixture(autouse=True)
def new_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the optimizers of earlier tests, which are perhaps still alive and would take their names."""
    monkeypatch.setattr(optimizers, "_known", IdentitySet())
