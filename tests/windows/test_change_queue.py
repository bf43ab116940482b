"""Tests of `ChangeQueue`: it makes one change at a time, also after an interrupt in the middle of one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from instrument.record.windows.window_recorder import ChangeQueue


def call_interrupted(call: Callable[[], None], at: int) -> bool:
    """Call with a KeyboardInterrupt before the ``at``-th line in `ChangeQueue`; return whether it was raised."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith("window_recorder.py"):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return lines == at


def test_a_change_after_an_interrupt() -> None:
    """The next change is made at once, after those queued by the interrupted one; each is made at most once."""
    lost, raised, at = list[int](), True, 0
    while raised:
        changes, made = ChangeQueue(), list[str]()

        def first(changes: ChangeQueue = changes, made: list[str] = made) -> None:
            made.append("first")
            changes.make(lambda: made.append("waiting"))

        at += 1
        raised = call_interrupted(functools.partial(changes.make, first), at)
        changes.make(functools.partial(made.append, "next"))
        assert made in (["first", "waiting", "next"], ["first", "next"], ["next"]), at
        if made == ["first", "next"]:
            lost.append(at)
    assert made == ["first", "waiting", "next"]
    assert at > 20
    assert len(lost) < at / 2  # interrupted before the first change queued it, or as it was about to begin


def test_a_change_within_another() -> None:
    """A change that is queued by another one is made after it, also where that one raises."""
    changes, made = ChangeQueue(), list[str]()

    def fail() -> None:
        changes.make(lambda: made.append("waiting"))
        made.append("failing")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        changes.make(fail)
    assert made == ["failing", "waiting"]
