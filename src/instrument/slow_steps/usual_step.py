"""`UsualStep`: the time of a usual step, and the limit from which a step is slow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", int, float)
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
        self.usual_ns = _lower_median(self._levels)
        self.noise = min(max(math.log(_lower_median(self._spreads)) / _NORMAL_UPPER, _MIN_NOISE), _MAX_NOISE)
        score = _SCORE * (1 + _CAUTION / len(self._spreads))
        self.ratio = max(math.exp(score * self.noise), self.slow)
        self.limit_ns = int(self.usual_ns * self.ratio)

    def score(self, duration_ns: int) -> float:
        """Return how many times the noise a step is above the usual time (a robust z-score)."""
        return math.log(duration_ns / self.usual_ns) / self.noise


def _lower_median(values: Iterable[T]) -> T:
    ordered = sorted(values)  # faster than `statistics.median`
    return ordered[(len(ordered) - 1) // 2]
