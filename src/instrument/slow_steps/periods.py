"""`Periods`: learns that every so many steps one is slow, as with evaluations, logs and checkpoints."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

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
        self._known = [known for known in self._known if step - known.last <= _MISSES * known.every]
        for known in self._known:
            if (step - known.last) % known.every == 0:
                usual = median(known.durations_ns)
                known.last = step
                known.durations_ns.append(duration_ns)
                return known.every if duration_ns <= _OUT_OF_PERIOD * usual else 0
        self._slow.append((step, duration_ns))
        found = self._new_period(step, duration_ns)
        if found is None:
            return 0
        self._known.append(found)
        return found.every

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
