"""Durations of steps: those of a window, and some before and after it for comparison."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from ..guard import guard

FEATURE = "timing steps"
AROUND = 20  # steps timed before a window, and after it
_ENOUGH_NS, _LEAST = 1_000_000_000, 3  # of those after it: that much time, once there are so many


class StepTimes:
    """Times the steps of a loop that comes back to it at their ends; off-window, only those around windows."""

    def __init__(self) -> None:
        self._off: deque[tuple[int, int]] = deque(maxlen=AROUND)  # the last ones that were not recorded
        self._before: list[tuple[int, int]] = []  # the window that is over, as numbers and durations of steps
        self._after: list[tuple[int, int]] = []
        self._recorded: list[int] = []
        self._own_ns = 0  # of the library's own work while the window was open
        self._until = 0  # the first step after a window that is not timed any more
        self._step = 0
        self._began_ns = 0
        self._recording: bool | None = None  # of the step that is timed; None where none is
        self._run: tuple[int, int, int] | None = None  # its first step, the first that is timed, and since when

    @guard.contained(FEATURE)
    def start(self, step: int, *, late: bool = False) -> None:
        """Begin the run, or go on with it: ``step`` is the next one.

        Args:
            step: its number.
            late: the run has made the steps before, from 0 on, or is at the end of step 0: nothing tells when it
                began.
        """
        self._recording = None
        if self._run is None:
            self._run = 0 if late else step, max(step, 1) if late else step, time.perf_counter_ns()

    @guard.contained(FEATURE)
    def begin(self, step: int, *, recording: bool) -> None:
        """Time ``step``, which begins and is recorded or not."""
        self._step, self._recording = step, recording
        self._began_ns = time.perf_counter_ns()

    def cancel(self) -> None:
        """Leave out the step that is timed, if one is."""
        self._recording = None

    @guard.contained(FEATURE)
    def end(self) -> None:
        """End the step that is timed, if one is."""
        if self._recording is None:
            return
        took_ns = time.perf_counter_ns() - self._began_ns
        if self._recording:
            self._recorded.append(took_ns)
        elif self._run is None or self._step > self._run[0]:  # the first step of a run is not like the others
            self._off.append((self._step, took_ns))
            if len(self._after) < AROUND:
                self._after.append((self._step, took_ns))
        self._recording = None

    @guard.contained(FEATURE)
    def leave_out(self, ns: int) -> None:
        """Work of the library itself took ``ns``, perhaps in the step that is timed."""
        self._began_ns += ns
        self._own_ns += ns

    @guard.contained(FEATURE)
    def open(self) -> None:
        """A window opens: the steps so far were those before it."""
        self._before, self._recorded, self._until = list(self._off), [], 0
        self._own_ns = 0

    @guard.contained(FEATURE)
    def close(self, step: int) -> None:
        """A window ended before ``step``."""
        self._after, self._until = [], step + AROUND

    def waits(self, step: int) -> bool:
        """Tell whether ``step`` is one after a window that is to be timed."""
        return step < self._until and (
            len(self._after) < _LEAST or sum(took_ns for _, took_ns in self._after) < _ENOUGH_NS
        )

    def next(self, step: int, due: int) -> int:
        """Return the step at which the loop comes back, from ``step`` on, where it has to at ``due``."""
        return step + 1 if self.waits(step) else max(step + 1, due - AROUND)

    @guard.contained(FEATURE)
    def timing(self, step: int) -> dict[str, Any]:
        """Return what the manifest says of the window that is over, at the beginning of ``step``.

        That is ``recorded_ns`` and ``around_ns``, the median durations of recorded steps and of those timed around
        them, ``around_steps``, the first and last step of each stretch of these, ``own_ns``, how long the library
        itself worked while the window was open, ``run_steps``, how many steps the run has made so far,
        ``untimed_steps``, the first and last of those whose time is not known, None if it is of all, and
        ``run_ns``, the wall time of the others.
        """
        first, timed, since_ns = self._run or (step, step, time.perf_counter_ns())
        around = self._before + self._after
        return {
            "recorded_ns": int(median(self._recorded)) if self._recorded else None,
            "around_ns": int(median(took_ns for _, took_ns in around)) if around else None,
            "around_steps": stretches(number for number, _ in around),
            "own_ns": self._own_ns,
            "run_steps": step - first,
            "untimed_steps": [first, timed - 1] if timed > first else None,
            "run_ns": time.perf_counter_ns() - since_ns,
        }


def stretches(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and the last of each run of successive ``numbers``, which are in order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
