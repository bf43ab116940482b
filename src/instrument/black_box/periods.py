"""`Periods`: learns that every so many steps one is slow, as with evaluations, logs and checkpoints."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_REMEMBERED = 16  # slow steps in which a period is looked for
_MISSES = 3  # turns without a slow step, after which a period is forgotten
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

    A period is learned from three slow steps at equal distances with no other between them, or from four. It is
    forgotten when its steps are no longer slow.
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
        every = self._new_period(step)
        lengths = dict(self._slow)
        self._slow.append((step, duration_ns))
        if every:
            alike = [lengths[other] for other in (step - 2 * every, step - every)]
            self._known.append(Period(every, step, deque([*alike, duration_ns], _REMEMBERED)))
        return every

    def _new_period(self, step: int) -> int:
        slow = [number for number, _ in self._slow]
        known = set(slow)
        if step - 1 in known:  # a stall over several steps
            return 0
        for back, earlier in enumerate(reversed(slow), 1):
            every = step - earlier
            consecutive = back == 1 and slow[-2:-1] == [step - 2 * every]
            if consecutive or {step - 2 * every, step - 3 * every} <= known:
                return every
        return 0
