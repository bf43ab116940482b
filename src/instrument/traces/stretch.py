"""`Stretch`: how many times as long a step takes while it is recorded, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from .step_lengths import StepLengths
from .timing import Timing

MIN_STEPS_AROUND = 3
"""The steps outside a window that a comparison needs."""

_SIMILAR = 1.25  # times longer or shorter; closer steps count as equally long
# Half the 90 % confidence interval of a median, in ranks, divided by the root of the number of values.
_SPREAD = 0.82
_BLOCKS = 4  # a block has at most this fraction of the steps outside a window


class Stretch(NamedTuple):
    """The length of a recorded step / the length of a step outside the window.

    Attributes:
        ratio: of the medians.
        low: the lowest ratio that the samples allow: both the median of the recorded steps, and that of as many
            successive steps outside, are known within a range only.
        high: the highest one.
    """

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, recorded_ns: Sequence[int], timing: Timing | None, lengths: StepLengths | None) -> Stretch | None:
        """Return the stretch of steps; None if it is not known.

        Steps outside are timed on the CPU. If it runs ahead of the GPU, their length is that of a step on the GPU
        where the queue is full, and says nothing elsewhere.

        Args:
            recorded_ns: the lengths of the recorded steps on the CPU.
            timing: the timing of the run.
            lengths: the lengths of the recorded steps by all clocks, if the trace has GPU work.
        """
        steps, around_ns = timing.around if timing and timing.around else (0, 0.0)
        if timing is None or steps < MIN_STEPS_AROUND or not around_ns or not len(recorded_ns):
            return None
        middle, (least, most) = median(recorded_ns), _range_of_median(recorded_ns)
        if not middle:
            return None
        if lengths is not None and lengths.runs_ahead and not is_similar(middle / around_ns):
            ratio = (lengths.gpu_step_ns or 0) / around_ns
            return cls(ratio, ratio, ratio) if is_similar(ratio) else None
        shortest, longest = around_ns * least / middle, around_ns * most / middle  # if they vary like the recorded
        if timing.around_each_ns:
            shortest, longest = _range_of_medians(timing.around_each_ns, len(recorded_ns))
        return cls(middle / around_ns, least / max(longest, around_ns), most / max(min(shortest, around_ns), 1))

    @property
    def is_certain(self) -> bool:
        """Whether the recorded steps are longer or shorter by more than chance."""
        return self.low > 1 or self.high < 1

    @property
    def differs(self) -> bool:
        """Whether the recorded steps are not typical: longer or shorter by 25 %, and by more than chance."""
        return self.is_certain and not is_similar(self.ratio)

    def __format__(self, spec: str) -> str:
        low, high = format(self.low, spec), format(self.high, spec)
        return low if low == high else f"{low} to {high}"


def is_similar(ratio: float) -> bool:
    """Return whether steps with this ratio of lengths count as equally long."""
    return bool(ratio) and max(ratio, 1 / ratio) <= _SIMILAR


def _range_of_median(values: Sequence[int]) -> tuple[int, int]:
    """Return two of ``values``, equally far from their middle, between which the median of all steps is."""
    ordered = sorted(map(int, values))
    rank = max(math.floor(len(ordered) / 2 - _SPREAD * math.sqrt(len(ordered))) - 1, 0)
    return ordered[rank], ordered[-1 - rank]


def _range_of_medians(values: Sequence[int], size: int) -> tuple[float, float]:
    """Return the least and the largest median of ``size`` successive values."""
    size = max(min(size, len(values) // _BLOCKS), 1)
    medians = [median(values[at : at + size]) for at in range(len(values) - size + 1)]
    return min(medians), max(medians)
