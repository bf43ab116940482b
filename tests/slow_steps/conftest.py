"""A clock that tests set, for the times of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from instrument.record.slow_steps import step_clock
from instrument.record.slow_steps.box import BlackBox

MS = 1_000_000


class Clock:
    """A monotonic clock that advances when it is told to."""

    def __init__(self) -> None:
        self.ns = 1

    def __call__(self) -> int:
        return self.ns

    def advance(self, ms: float) -> None:
        self.ns += int(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let the box read a clock that the test advances."""
    clock = Clock()
    monkeypatch.setattr(step_clock, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def make() -> Iterator[Callable[..., BlackBox]]:
    """Make boxes that run, and stop them at the end of the test."""
    boxes: list[BlackBox] = []

    def made(*args: int, **options: object) -> BlackBox:
        box = BlackBox(*args, **options)  # type: ignore[arg-type]
        box.start()
        boxes.append(box)
        return box

    yield made
    for box in boxes:
        box.stop()
