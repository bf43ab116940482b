"""`TorchSchedule`: adapts a schedule that is a function, such as torch's, to the interface of `Schedule`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .schedule import StepAction, Window

_NONE, _WARMUP, _RECORD_AND_SAVE = 0, 1, 3  # the values of torch.profiler.ProfilerAction


class TorchSchedule:
    """Calls a function that maps a step's number to a `torch.profiler.ProfilerAction`, once a step, in order.

    Later steps are unknown, so a window has no end until the function returns RECORD_AND_SAVE.
    """

    count = None
    finite = False
    plans_ahead = False

    def __init__(self, decide: Callable[[int], Any], first_step: int = 0) -> None:
        self._action_of_step = decide
        self._first = first_step
        self._index = 0
        self._window: Window | None = None

    def starting(self, step: int) -> TorchSchedule:
        """Return the schedule of a loop that begins with ``step``, for which the function gets 0."""
        return TorchSchedule(self._action_of_step, step)

    def at(self, step: int) -> tuple[StepAction, Window | None]:
        """Return what the profiler does in ``step``, and the window that it belongs to."""
        action = int(getattr(decided := self._action_of_step(step - self._first), "value", decided))
        if action == _NONE:
            self._window = None
            return StepAction.WAIT, None
        window = self._window
        if window is None or window.stop <= step or (action == _WARMUP and window.active < step):
            self._index += 1
            window = Window(self._index, step, step, sys.maxsize)
        if action == _WARMUP:
            window = replace(window, active=step + 1)
        elif action == _RECORD_AND_SAVE:
            window = replace(window, stop=step + 1)
        self._window = window
        return (StepAction.WARMUP if action == _WARMUP else StepAction.ACTIVE), window

    def next_window(self, step: int) -> Window | None:
        """Return the window that may begin at the next step; an open one ends."""
        self._window = None
        return Window(self._index + 1, step + 1, step + 1, sys.maxsize)

    def window(self, index: int) -> Window | None:
        """Return None: no window is known before it begins."""
        return None
