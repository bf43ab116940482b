"""`SlowStep`, and how it is judged: `UsualStep` (from when it is slow), `Periods` (what recurs), `Alarms`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from time import time_ns
from typing import Any, NamedTuple

from ...base.units import duration

OTHER = "other"
"""The time of a step outside its phases."""

PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
"""The phases that the regions of this library and of its adapters show."""

NOT_IN_STEPS = ("evaluation", "checkpoint")
"""Phases that are taken out of the times of steps."""

OPTIMIZER = 1 + PHASES.index("optimizer")
"""The column of the phase that may contain others, as a closure computes the loss in it."""


class PhaseTime(NamedTuple):
    """The time of a phase in a step.

    Attributes:
        ns: in this step.
        usual_ns: in a usual step.
    """

    ns: int
    usual_ns: int

    @property
    def delta_ns(self) -> int:
        """``ns`` - ``usual_ns``."""
        return self.ns - self.usual_ns


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than usual.

    The usual step is the one of median length out of the last steps. So both columns of ``phases`` are exact: they
    add up to ``duration_ns`` and to ``usual_ns``, and the differences to ``delta_ns``.

    Attributes:
        step: its number.
        duration_ns: its length.
        usual_ns: the length of a usual step.
        score: how many times the noise it is above that, on a logarithmic scale (a robust z-score).
        phases: the time of each phase in both steps, the one that grew most first; "other" is the time outside all
            phases.
        period: it recurs: every so many steps there is one like it; 0 if it does not.
        ended_ns: when it ended, in ns since the epoch.
    """

    step: int
    duration_ns: int
    usual_ns: int
    score: float
    phases: dict[str, PhaseTime]
    period: int = 0
    ended_ns: int = field(default_factory=time_ns, compare=False)

    @property
    def delta_ns(self) -> int:
        """``duration_ns`` - ``usual_ns``."""
        return self.duration_ns - self.usual_ns

    @property
    def cause(self) -> str:
        """The phase that took the most time more than usual."""
        return next(iter(self.phases))

    def __str__(self) -> str:
        text = f"step {self.step} took {duration(self.duration_ns)}, {duration(self.delta_ns)} more than usual"
        if len(self.phases) == 1:
            return text
        cause, (largest, *_) = self.cause, self.phases.values()
        return f"{text}: {duration(largest.delta_ns)} of it in {cause if cause != 'other' else 'no phase'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the step as a dict of JSON values: its attributes, ``delta_ns`` and ``cause``."""
        phases = {name: {**time._asdict(), "delta_ns": time.delta_ns} for name, time in self.phases.items()}
        own = {"delta_ns": self.delta_ns, "cause": self.cause, "phases": phases}
        return {**vars(self), **own}


_LEVEL_BLOCKS = 3  # whose medians give the usual time: few, so that it follows a drift
_SPREAD_BLOCKS = 16  # whose spreads give the noise: many, as each knows it by a third only
_UPPER = 0.9  # the quantile that says how far steps vary upward
_NORMAL_UPPER = 1.2816  # the same quantile of a normal distribution
_SCORE = 3.5  # a slow step is this many times the noise above the usual time, on a logarithmic scale
_CAUTION = 0.5  # by how much more after the first block, as the noise is hardly known
_MIN_NOISE, _MAX_NOISE = 0.01, 0.5  # a loop that varies more has a limit as well


class UsualStep:
    """Learns the usual time of a step and its noise from blocks of steps.

    The time is the median of the last blocks' medians. The noise is a robust scale: the upper part of each block,
    from its median to its upper decile, as a loop that varies has longer steps but no shorter ones. Both are on a
    logarithmic scale. A few slow steps in a block change neither.

    Args:
        slow: the ratio to the usual time from which a step can be slow, however little the steps vary.

    Attributes:
        slow: as given.
        usual_ns: the usual time of a step; 0 before the first block.
        noise: the standard deviation of the logarithm of a step's time.
        ratio: the ratio to the usual time from which a step is slow.
        limit_ns: the time from which a step is slow.
        shifts: how often the usual time changed at once, to a level at which every step would have been slow.
    """

    def __init__(self, slow: float) -> None:
        self.slow = slow
        self._levels: deque[int] = deque(maxlen=_LEVEL_BLOCKS)
        self._spreads: deque[float] = deque(maxlen=_SPREAD_BLOCKS)
        self.usual_ns = 0
        self.noise = _MIN_NOISE
        self.ratio = slow
        self.limit_ns = 0
        self.shifts = 0

    def add_block(self, durations_ns: Sequence[int]) -> None:
        """Learn from a block of steps, all of them, slow ones as well."""
        ordered = sorted(durations_ns)
        middle = ordered[(len(ordered) - 1) // 2]
        spread = ordered[int(_UPPER * len(ordered))] / middle
        if self.usual_ns and not 1 / self.ratio < middle / self.usual_ns < self.ratio:
            self._levels.clear()
            self.shifts += 1
        self._levels.append(middle)
        self._spreads.append(spread)
        self.usual_ns = median_low(self._levels)
        self.noise = min(max(math.log(median_low(self._spreads)) / _NORMAL_UPPER, _MIN_NOISE), _MAX_NOISE)
        score = _SCORE * (1 + _CAUTION / len(self._spreads))
        self.ratio = max(math.exp(score * self.noise), self.slow)
        self.limit_ns = int(self.usual_ns * self.ratio)

    def score(self, duration_ns: int) -> float:
        """Return how many times the noise a step is above the usual time (a robust z-score)."""
        return math.log(duration_ns / self.usual_ns) / self.noise


_REMEMBERED = 16  # slow steps in which a period is looked for
_MISSES = 2  # turns, after which a period without a slow step is forgotten
_MIN_PERIOD = 4
_ALIKE = 1.5  # the largest ratio of the lengths from which a period is learned
_OUT_OF_PERIOD = 2  # a step of a period this many times its usual time is slow among its own kind


@dataclass
class Period:
    """A slow step that recurs.

    Attributes:
        every: the number of steps from one to the next.
        last: the number of the last one.
        durations_ns: the lengths of the last ones.
    """

    every: int
    last: int
    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Periods:
    """The periods of a loop; `period_of` learns from every slow step.

    A period is learned from four slow steps at equal distances, with none of like length between them; from three
    if their numbers are multiples of the distance, or one less, as loops count. It is forgotten when its steps are
    no longer slow.
    """

    def __init__(self) -> None:
        self._known: list[Period] = []
        self._slow: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # numbers and lengths of slow steps

    def period_of(self, step: int, duration_ns: int) -> int:
        """Return the period by which ``step`` was to be expected; 0 if there is none."""
        self._known = [period for period in self._known if step - period.last <= _MISSES * period.every]
        for period in self._known:
            if (step - period.last) % period.every == 0:
                usual = median(period.durations_ns)
                period.last = step
                period.durations_ns.append(duration_ns)
                return period.every if duration_ns <= _OUT_OF_PERIOD * usual else 0
        self._slow.append((step, duration_ns))
        new = self._new_period(step, duration_ns)
        if new is None:
            return 0
        self._known.append(new)
        return new.every

    @property
    def known(self) -> set[int]:
        """The periods: the numbers of steps from one slow step to the next."""
        return {period.every for period in self._known}

    def _new_period(self, step: int, duration_ns: int) -> Period | None:
        alike = [
            (number, ns) for number, ns in self._slow if max(ns, duration_ns) <= _ALIKE * min(ns, duration_ns)
        ]
        if len(alike) < 2:
            return None
        every = step - alike[-2][0]
        if every < _MIN_PERIOD:
            return None
        needed = 3 if step % every in (0, every - 1) else 4
        members = alike[-needed:]
        if [number for number, _ in members] != [step - turn * every for turn in reversed(range(needed))]:
            return None
        return Period(every, step, deque((ns for _, ns in members), _REMEMBERED))


_WORSE = 1.5  # times the delay of the worst alarm: such a step gives an alarm whatever was given before
_HOUR_NS = 3600 * 10**9


class _Alarm(NamedTuple):
    step: int
    time_ns: int
    delta_ns: int


class Alarms:
    """Decides which slow steps give an alarm; `is_due` notes those that do.

    After an alarm there is none for ``cooldown`` steps, and none after ``cap`` in an hour. A step whose delay is
    one and a half times that of the worst of those alarms gives one nevertheless, so that a stall of a second is
    not missed because of a stall of 50 ms before it. As each is that much worse, they are few.

    Args:
        cooldown: a number of steps.
        cap: the most alarms in an hour.

    Attributes:
        count: the number of alarms given.
    """

    def __init__(self, cooldown: int, cap: int) -> None:
        self._cooldown = cooldown
        self._cap = cap
        self._given: list[_Alarm] = []  # those that may prevent another one
        self.count = 0

    def is_due(self, step: int, delta_ns: int, now_ns: int) -> bool:
        """Return whether a slow step gives an alarm.

        Args:
            step: its number.
            delta_ns: how much longer than usual it took.
            now_ns: the time.
        """
        hour = [alarm for alarm in self._given if now_ns - alarm.time_ns < _HOUR_NS]
        cooling = [alarm for alarm in self._given if step < alarm.step + self._cooldown]
        for before, prevents in ((cooling, bool(cooling)), (hour, len(hour) >= self._cap)):
            if prevents and delta_ns < _WORSE * max((alarm.delta_ns for alarm in before), default=delta_ns):
                return False
        self._given = [*{*hour, *cooling}, _Alarm(step, now_ns, delta_ns)]
        self.count += 1
        return True

    def forget_steps(self) -> None:
        """Take the numbers of steps anew, as after `BlackBox.go_to`."""
        self._given = [alarm._replace(step=-self._cooldown) for alarm in self._given]
