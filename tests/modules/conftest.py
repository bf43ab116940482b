"""Fixtures for tests of modules: who listens, and that no hook is left."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from instrument.modules.fitting import State
from instrument.modules.hooks import Hook
from instrument.modules.installer import installer
from instrument.regions import live
from instrument.regions.region import Region


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    """Fail a test after which a hook or a patch of ours is left anywhere."""
    yield
    gc.collect()
    left = [thing for thing in gc.get_objects() if isinstance(thing, (Hook, State))]
    patches = list(installer._patches)
    installer.clear()
    assert not left
    assert not patches


class Heard:
    """An emitter that notes what it is told, as "+name" and "-name"."""

    name = "heard"

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
        """What was opened inside what, as nested lists: [name, [name, ...], ...]; fails if it does not nest."""
        root: list[Any] = []
        path = [root]
        for event in self.events:
            if event.startswith("+"):
                node: list[Any] = [event[1:]]
                path[-1].append(node)
                path.append(node)
            else:
                assert path.pop()[0] == event[1:], self.events
        assert path == [root], self.events
        return root


Listening = Callable[[], contextlib.AbstractContextManager[Heard]]


@pytest.fixture
def listening() -> Listening:
    """A context manager in which a tool is attached that hears every region."""

    @contextlib.contextmanager
    def attach() -> Iterator[Heard]:
        heard = Heard()
        live.live._attached.append(heard)
        live.live._settle()
        try:
            yield heard
        finally:
            live.live._attached.remove(heard)
            live.live._settle()

    return attach
