"""Plans that are functions, as torch.profiler has them, in the terms of our own schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .schedule import Phase, Window

_NONE, _WARMUP, _RECORD_AND_SAVE = 0, 1, 3  # the values of torch.profiler.ProfilerAction


class TorchSchedule:
    """A function from a step's number to a `torch.profiler.ProfilerAction`; asked once a step, in order.

    What it will say of a later step is not known, so a window has no end until the function names it.
    """

    count = None
    finite = False
    plans_ahead = False

    def __init__(self, decide: Callable[[int], Any], first_step: int = 0) -> None:
        self._decide = decide
        self._first = first_step
        self._index = 0
        self._window: Window | None = None

    def starting(self, step: int) -> TorchSchedule:
        """Return the plan of a loop whose first step is ``step``: torch counts from 0 there."""
        return TorchSchedule(self._decide, step)

    def at(self, step: int) -> tuple[Phase, Window | None]:
        """Return the phase of ``step`` and the window it belongs to."""
        action = int(getattr(decided := self._decide(step - self._first), "value", decided))
        if action == _NONE:
            self._window = None
            return Phase.WAIT, None
        window = self._window
        if window is None or window.stop <= step or (action == _WARMUP and window.active < step):
            self._index += 1
            window = Window(self._index, step, step, sys.maxsize)
        if action == _WARMUP:
            window = replace(window, active=step + 1)
        elif action == _RECORD_AND_SAVE:
            window = replace(window, stop=step + 1)
        self._window = window
        return (Phase.WARMUP if action == _WARMUP else Phase.ACTIVE), window

    def next_window(self, step: int) -> Window | None:
        """Return the window that may begin at the next step; one that is open ends, as its loop did."""
        self._window = None
        return Window(self._index + 1, step + 1, step + 1, sys.maxsize)

    def window(self, index: int) -> Window | None:
        """Return None: no window is known before it begins."""
        return None
