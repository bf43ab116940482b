"""`OrderedCalls`: calls in their order, each once, whichever thread makes them."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.record.handover.window_sender import OrderedCalls


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=30))
def test_order(plan: list[int | None]) -> None:
    """A call waits for itself and those before it; a number opens a gate, None is a call behind the next gate."""
    calls, made, opened = OrderedCalls(), list[int](), set[int]()
    added: list[int] = []
    for number, gate in enumerate(plan):
        if gate is None:
            calls.add(lambda number=number: made.append(number), lambda gate=number % 6: gate in opened)
            added.append(number)
        else:
            opened.add(gate)
            calls.make()
        blocked = [number for number in added if number % 6 not in opened]
        assert [number for number in added if not blocked or number < blocked[0]] == made


def test_threads() -> None:
    """Calls from several threads are made one at a time, and none is lost."""
    calls, made, running = OrderedCalls(), list[int](), 0
    ready = threading.Event()

    def call(number: int) -> None:
        nonlocal running
        running += 1
        assert 1 == running
        made.append(number)
        running -= 1

    def work(first: int) -> None:
        for number in range(first, first + 500):
            calls.add(lambda number=number: call(number), ready.is_set)
            if number == 250:
                ready.set()

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.make()
    assert 1500 == len(made)
    for first in (0, 1000, 2000):
        assert list(range(first, first + 500)) == [number for number in made if first <= number < first + 500]


def test_an_error_stops_nothing() -> None:
    """It reaches the caller, and the next calls are made."""
    calls, made = OrderedCalls(), list[str]()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        calls.add(fail)
    calls.add(lambda: made.append("next"))
    assert ["next"] == made


def test_a_call_within_a_call() -> None:
    """It is made after the one that adds it."""
    calls, made = OrderedCalls(), list[Any]()

    def outer() -> None:
        calls.add(lambda: made.append("inner"))
        made.append("outer")

    calls.add(outer)
    assert ["outer", "inner"] == made


def test_an_interrupt_as_the_lock_is_taken() -> None:
    """The thread that was interrupted makes the calls later."""
    calls, made = OrderedCalls(), list[str]()

    def interrupt(_: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        calls.add(lambda: made.append("first"))
    assert not made
    calls.add(lambda: made.append("second"))
    assert ["first", "second"] == made
