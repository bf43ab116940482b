"""`WindowTiming`: how long the steps in a window and around it take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from ...base.guard import guard

TIMING = "timing steps"
AROUND = 20  # steps timed before a window, and after it
_MIN_TOTAL_NS, _MIN_STEPS = 1_000_000_000, 3  # when timing after a window ends: both are reached


class WindowTiming:
    """Measures the durations of the steps in and around windows. The profile reports the end of each."""

    def __init__(self) -> None:
        self._unrecorded_steps: deque[tuple[int, int]] = deque(maxlen=AROUND)  # the last steps outside windows
        self._steps_before: list[tuple[int, int]] = []  # the last window: numbers and durations of steps
        self._steps_after: list[tuple[int, int]] = []
        self._recorded_ns: list[int] = []
        self._own_ns = 0  # the library's own work while the window was open
        self._timed_until = 0  # the first step after a window that is no longer timed
        self._step = 0
        self._began_ns = 0
        self._recording: bool | None = None  # whether the timed step is recorded; None if no step is timed
        self._run: tuple[int, int, int] | None = None  # first step, first timed step, time of its start

    def start(self, step: int, *, late: bool = False) -> None:
        """Begin or continue the run with ``step``.

        Args:
            step: its number.
            late: the run began earlier, with step 0, at an unknown time.
        """
        self._recording = None
        if self._run is None:
            self._run = 0 if late else step, max(step, 1) if late else step, time.perf_counter_ns()

    def renumber(self, shift: int) -> None:
        """Have the run go on ``shift`` steps further than it would."""
        self._timed_until = 0
        if self._run is not None:
            first, timed, since_ns = self._run
            self._run = first + shift, timed + shift, since_ns

    def begin(self, step: int, *, recording: bool) -> None:
        """Begin to time ``step``."""
        self._step, self._recording = step, recording
        self._began_ns = time.perf_counter_ns()

    def cancel(self) -> None:
        """Discard the time of the current step."""
        self._recording = None

    @guard.contained(TIMING)
    def end(self) -> None:
        """End the timed step, if any."""
        if self._recording is None:
            return
        took_ns = time.perf_counter_ns() - self._began_ns
        if self._recording:
            self._recorded_ns.append(took_ns)
        elif self._run is None or self._step > self._run[0]:  # the first step of a run is not typical
            self._unrecorded_steps.append((self._step, took_ns))
            if len(self._steps_after) < AROUND:
                self._steps_after.append((self._step, took_ns))
        self._recording = None

    def leave_out(self, ns: int) -> None:
        """Leave out ``ns`` of the library's own work."""
        self._began_ns += ns
        self._own_ns += ns

    def open(self) -> None:
        """Open a window: the steps so far come before it."""
        self._steps_before, self._recorded_ns, self._timed_until = list(self._unrecorded_steps), [], 0
        self._own_ns = 0

    def close(self, step: int) -> None:
        """Close the window, which ended before ``step``."""
        self._steps_after, self._timed_until = [], step + AROUND

    def is_timed(self, step: int) -> bool:
        """Return whether ``step``, after a window, is timed."""
        return step < self._timed_until and (
            len(self._steps_after) < _MIN_STEPS or sum(took_ns for _, took_ns in self._steps_after) < _MIN_TOTAL_NS
        )

    def next_due(self, step: int, due: int) -> int:
        """Return the next step to report after ``step``, given that something is due at step ``due``."""
        return step + 1 if self.is_timed(step) else max(step + 1, due - AROUND)

    @guard.contained(TIMING)
    def timing(self, step: int) -> dict[str, Any]:
        """Return the timing of the last window for the manifest, at the beginning of ``step``.

        ``recorded_ns`` and ``around_ns`` are the median durations of the recorded steps and of the steps timed
        before and after them, while the library did not work beside the loop; ``around_each_ns`` lists the latter,
        and ``around_steps`` their numbers as pairs [first, last]; ``own_ns`` is the time of the library's own work
        while the window was open; ``run_steps`` is the number of steps of the run so far;
        ``untimed_steps`` holds the first and the last step whose time is unknown (None if all are known), and
        ``run_ns`` is the wall time of the other steps.
        """
        first, timed, since_ns = self._run or (step, step, time.perf_counter_ns())
        around = self._steps_before + self._steps_after
        return {
            "recorded_ns": int(median(self._recorded_ns)) if self._recorded_ns else None,
            "around_ns": int(median(took_ns for _, took_ns in around)) if around else None,
            "around_each_ns": [took_ns for _, took_ns in around],
            "around_steps": stretches(number for number, _ in around),
            "own_ns": self._own_ns,
            "run_steps": step - first,
            "untimed_steps": [first, timed - 1] if timed > first else None,
            "run_ns": time.perf_counter_ns() - since_ns,
        }


def stretches(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and the last of each run of consecutive numbers in ``numbers``, which are sorted."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
