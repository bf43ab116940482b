"""Reads the timing of a run around its windows; `Stretch` compares the recorded steps with those around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ...base.run_lengths import RunLengths
from .step_lengths import StepLengths

Span = tuple[int, int]  # the first and the last step


@dataclass(frozen=True)
class Timing:
    """The steps around one or several windows, the run so far, and how the windows ended.

    Attributes:
        around_ns: For each window, the median duration of the timed but not recorded steps before and after it.
        around_steps: The ranges of these steps, in order and without overlap.
        run_steps: The number of steps of the run when the last window was written.
        run_ns: The wall time of these steps, without the untimed ones.
        untimed_steps: The first and the last of the steps whose time is not known.
        own_ns: How long the library itself worked while the windows were open.
        endings: For each window, its planned steps (None without a planned end), and why it ended before its last
            step; empty if it did not.
        cut_steps: The steps that did not run to their end, or were not recorded to their end.
        around_each_ns: The durations of all steps around the windows; empty if the manifest does not say them.
        lengths: The lengths of all steps of the run, or so far; None if the manifest does not say them.
    """

    around_ns: tuple[int, ...] = ()
    around_steps: tuple[Span, ...] = ()
    run_steps: int = 0
    run_ns: int = 0
    untimed_steps: Span | None = None
    own_ns: int = 0
    endings: tuple[tuple[Span | None, str], ...] = ()
    cut_steps: tuple[int, ...] = ()
    around_each_ns: tuple[int, ...] = ()
    lengths: RunLengths | None = None

    @classmethod
    def from_manifest(cls, entry: Mapping[str, Any] | None) -> Timing | None:
        """Return the timing in a line of the manifest; None if it has none."""
        timing = entry.get("timing") if entry else None
        if entry is None or not isinstance(timing, Mapping):
            return None
        run_steps, run_ns, around_ns = (timing.get(key) for key in ("run_steps", "run_ns", "around_ns"))
        own_ns, cut_step = timing.get("own_ns", 0), entry.get("cut_step")
        if not (isinstance(run_steps, int) and isinstance(run_ns, int) and isinstance(own_ns, int)):
            return None
        around = (around_ns,) if isinstance(around_ns, int) else ()
        reason = str(entry.get("reason") or "") if entry.get("status") == "partial" else ""
        return cls(
            around,
            _join_spans(filter(None, map(_span, _as_list(timing.get("around_steps"))))) if around else (),
            run_steps,
            run_ns,
            _span(timing.get("untimed_steps")),
            own_ns,
            ((_span(entry.get("planned_steps")), reason),),
            (cut_step,) if isinstance(cut_step, int) else (),
            tuple(each for each in _as_list(timing.get("around_each_ns")) if isinstance(each, int))
            if around
            else (),
            RunLengths.from_json(timing.get("lengths")),
        )

    def __add__(self, later: Timing) -> Timing:
        """Return the timing of both; a window in two parts ended as the later part says."""
        last = later if later.run_steps >= self.run_steps else self
        endings = dict(self.endings) | dict(later.endings)
        return Timing(
            self.around_ns + later.around_ns,
            _join_spans(self.around_steps + later.around_steps),
            last.run_steps,
            last.run_ns,
            last.untimed_steps,
            self.own_ns + later.own_ns,
            tuple((planned, reason) for planned, reason in endings.items() if reason),
            (*self.cut_steps, *later.cut_steps),
            self.around_each_ns + later.around_each_ns,
            last.lengths,
        )

    @property
    def around(self) -> tuple[int, float] | None:
        """The number of steps timed around the windows, and the median of the windows' medians in ns."""
        if not self.around_ns:
            return None
        return sum(last - first + 1 for first, last in self.around_steps), median(self.around_ns)


def _join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same steps as spans that neither overlap nor touch."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _span(value: object) -> Span | None:
    """Return the first and the last step in a value of the manifest; None if it is not a span."""
    match value:
        case [int(first), int(last)] if first <= last:
            return first, last
    return None


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
