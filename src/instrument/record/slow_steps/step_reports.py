"""`StepReports`: calls the functions of ``on_steps`` with the numbers of the steps since their last call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from operator import sub
from pathlib import Path
from typing import Protocol

from ...base.compat import gpu
from ...base.guard import guard
from ...base.job import rank, world_size
from .judging import NOT_IN_STEPS, OTHER, SlowStep
from .step_clock import StepClock
from .step_numbers import PREFIX, Count, Every, RecordedWindow, StepNumbers

FEATURE = "a function of on_steps"
NEVER = 1 << 62


class SyncTotals(Protocol):
    """What a detector of synchronizations has counted: waits, their time, those without one, and checked steps."""

    syncs: int
    blocked_ns: int
    untimed: int
    steps: int


sync_totals: list[SyncTotals] = []
"""Those of the detectors that run, the outermost first."""


class Interval:
    """The steps since the last call of one function, with the totals as they were then."""

    def __init__(self, every: Every, first_step: int, slow: SlowStep | None) -> None:
        self.every = every
        self.first_step = first_step
        self.windows: list[RecordedWindow] = []  # that ended in it
        self.slow = slow
        self.totals = {name: _total(count) for name, count in every.counts.items()}
        self.sync_totals = sync_totals[0] if sync_totals else None
        self.syncs = _values(self.sync_totals)

    def is_due(self, step: int) -> bool:
        """Return whether the interval is over when ``step`` begins."""
        return step // self.every.steps > self.first_step // self.every.steps


@dataclass(frozen=True)
class Reported:
    """Who gets the numbers of a loop, and what is in them besides its times.

    Attributes:
        functions: those of ``on_steps``.
        windows: returns how many windows were recorded so far.
        run: the folder of the profile.
        on_called: called after the functions, whose time is to be part of no step.
    """

    functions: Sequence[Every] = ()
    windows: Callable[[], int] = int
    run: Path | None = None
    on_called: Callable[[], object] = bool


NOBODY = Reported()  # without functions


class StepReports:
    """Calls the functions of ``on_steps`` for the steps of one clock.

    Args:
        reported: the functions, and what they get.
        clock: has the times of the steps.
        slow_steps: those of the box.

    Raises:
        ValueError: from ``use_clock`` of a function that has this method.

    Attributes:
        due_step: the number of steps done at which the next function is called.
    """

    def __init__(self, reported: Reported, clock: StepClock, slow_steps: Sequence[SlowStep]) -> None:
        self._reported = reported
        self._functions = reported.functions
        self._clock = clock
        self._slow_steps = slow_steps
        self._process = os.getpid()  # a forked child reports nothing
        self._calling = False
        self._seen: set[str] = set()  # phases
        self._not_summed = clock.first_step
        self.due_step = NEVER
        self._intervals: list[Interval] = []
        for each in self._functions:
            if hasattr(each.function, "use_clock"):
                each.function.use_clock(clock)

    def begin(self, step: int, not_summed: int | None = None) -> None:
        """Begin all intervals with ``step``; ``not_summed`` is the step that is left out from now on."""
        if not_summed is not None:
            self._not_summed = not_summed
        with guard.contained(FEATURE):
            self._intervals = [self._interval(each, step) for each in self._functions]
        self._set_due_step(step)

    def _interval(self, function: Every, step: int) -> Interval:
        return Interval(function, step, next(reversed(self._slow_steps), None))

    def add_window(self, window: RecordedWindow) -> None:
        """Have the next call of each function tell of a window that was recorded."""
        for each in self._intervals:
            each.windows.append(window)

    def _set_due_step(self, step: int) -> None:
        self.due_step = min(((step // each.steps + 1) * each.steps for each in self._functions), default=NEVER)
        self._clock.review_at(self.due_step)

    def report(self, *, rest: bool = False) -> None:
        """Call the functions that are due; with ``rest``, those that have not had the last steps or windows."""
        if self._calling:  # by a function that ends a step itself
            return
        step, self._calling = self._clock.step_num, True
        try:
            for number, interval in enumerate(self._intervals):
                unreported = step > interval.first_step or interval.windows
                if interval.is_due(step) or (rest and unreported):
                    with guard.contained(FEATURE):
                        self._call(number, interval, step)
        finally:  # an interrupt leaves the loop as it would without these functions
            self._calling = False
            self._set_due_step(self._clock.step_num)
            self._reported.on_called()

    def _call(self, number: int, interval: Interval, step: int) -> None:
        if os.getpid() == self._process:
            function = interval.every.function
            following = self._intervals[number] = self._interval(interval.every, step)
            numbers = self._numbers(interval, following)
            if numbers.durations_ns or getattr(function, "takes_windows", False):
                function(numbers)
            else:
                following.windows = interval.windows  # they come with the next steps

    def end(self) -> None:
        """Report the rest, and close the functions that have a method for it."""
        with ExitStack() as stack:  # closes all of them after an interrupt of one, too
            for each in self._functions:
                close = getattr(each.function, "close", None)
                if callable(close) and os.getpid() == self._process:
                    stack.callback(guard.contained(FEATURE)(close))
            self.report(rest=True)

    def _numbers(self, interval: Interval, following: Interval) -> StepNumbers:
        step = following.first_step
        first = interval.first_step + (interval.first_step == self._not_summed)
        durations, *phases = self._clock.columns(max(step - first, 0))
        times = dict(zip(self._clock.phases, phases, strict=True))
        for name in NOT_IN_STEPS:
            if any(times[name]):
                durations = list(map(sub, durations, times[name]))
        timed = [ns for ns in durations if ns > 0] if 0 in durations else durations
        new = takewhile(lambda slow: slow is not interval.slow, reversed(self._slow_steps))
        slow = [each for each in new if each.cause not in NOT_IN_STEPS][::-1]
        numbers: dict[str, int | float] = {"step": step - 1, "steps": len(timed), "slow_steps": len(slow)}
        if timed:
            numbers |= _times(timed)
            numbers |= self._phases(times, timed)
            numbers |= _rates(interval, following, numbers["step_time_mean_s"])
        waits, checked = _waits(interval)
        numbers |= {name: value / checked for name, value in waits.items()}
        peak = getattr(gpu.in_use(), "max_memory_allocated", None)
        if peak is not None:
            numbers["memory_peak_bytes"] = peak()
        numbers["windows"] = self._reported.windows()
        for each in self._functions:
            numbers |= getattr(each.function, "numbers", {})
        return StepNumbers(
            {f"{PREFIX}{name}": value for name, value in numbers.items()},
            first_step=interval.first_step,
            durations_ns=timed,
            slow_steps=slow,
            windows=interval.windows,
            rank=rank(),
            world_size=world_size(),
            run=self._reported.run,
            totals={**waits, **_taken(interval, following)},
        )

    def _phases(self, times: dict[str, list[int]], timed: Sequence[int]) -> Iterator[tuple[str, float]]:
        totals = {name: sum(column) for name, column in times.items()}
        self._seen |= {name for name, ns in totals.items() if ns}
        in_steps = sum(ns for name, ns in totals.items() if name not in NOT_IN_STEPS)
        shown = {name: ns for name, ns in totals.items() if name in self._seen}
        if shown:
            shown[OTHER] = sum(timed) - in_steps
        return ((f"phase_{name}_s", ns / len(timed) / 1e9) for name, ns in shown.items())


def _times(timed: Sequence[int]) -> dict[str, float]:
    ordered = sorted(timed)
    return {
        "step_time_mean_s": sum(ordered) / len(ordered) / 1e9,
        "step_time_p50_s": _percentile(ordered, 50),
        "step_time_p99_s": _percentile(ordered, 99),
        "step_time_max_s": ordered[-1] / 1e9,
    }


def _percentile(ordered: Sequence[int], percent: int) -> float:
    """Return the percentile of the nearest rank, in s: the least value that so many percent do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1] / 1e9


def _rates(interval: Interval, following: Interval, mean_s: float) -> Iterator[tuple[str, float]]:
    steps = following.first_step - interval.first_step
    for name, taken in _taken(interval, following).items():
        yield f"{name}_per_s", taken / steps / mean_s


def _taken(interval: Interval, following: Interval) -> dict[str, int]:
    """Return the samples and tokens that all steps of the interval took."""
    taken = {}
    for name, count in interval.every.counts.items():
        before, now = interval.totals[name], following.totals[name]
        if isinstance(count, int):
            taken[name] = count * (following.first_step - interval.first_step)
        elif before is not None and now is not None and now >= before:  # else it began to count anew
            taken[name] = now - before
    return taken


def _waits(interval: Interval) -> tuple[dict[str, int | float], int]:
    """Return the waits in the steps that a detector has checked, as far as known, and how many these are."""
    totals = sync_totals[0] if sync_totals else None
    before = interval.syncs if totals is interval.sync_totals else (0, 0, 0, 0)
    syncs, blocked_ns, untimed, steps = map(sub, _values(totals), before)
    known = {"sync_wait_s": blocked_ns / 1e9} if not untimed else {}
    return ({"syncs": syncs, **known}, steps) if steps > 0 else ({}, 1)


def _values(totals: SyncTotals | None) -> tuple[int, int, int, int]:
    if totals is None:
        return 0, 0, 0, 0
    return totals.syncs, totals.blocked_ns, totals.untimed, totals.steps


def _total(count: Count | None) -> int | None:
    with guard.contained("a function for samples or tokens"):
        return int(count()) if callable(count) else None
    return None
