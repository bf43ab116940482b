"""`SlowRank`, and how it is judged: against the other ranks, and against how it compared with them before."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ...base.units import duration

SIGNALS = {"wall": "takes", "cpu": "computes for", "gpu": "keeps the GPU busy for"}
"""The times that show the work of a rank, and what a rank does for such a time."""

_SCORE = 4.0  # a slow rank is this many times the noise above what it is compared with
_LEAST = 0.05  # and this part of a step, as less is not worth a message
_STAYS = 0.5  # of both is enough for a rank that is slow already
_CAUTION = 8  # the noise is taken for larger by this part of the intervals that it is known from
_LEAST_NOISE = 0.01  # of a step
_SIGMA = 1.4826  # the standard deviation of a normal distribution with the median absolute deviation 1
_REMEMBERED = 32  # intervals that say how a rank compares with the others as a rule
_LEARNED = 16  # intervals after which its past counts
_WARM_UP = 4  # intervals in which nothing is judged


Past = defaultdict[tuple[int, str, str], deque[tuple[float, float]]]


class RankTimes(NamedTuple):
    """What one rank did in an interval.

    Attributes:
        step: the number of the last step.
        step_ns: the mean length of a step.
        work_ns: the work of the rank itself, a step, by the signal that shows it, "wall", "cpu" or "gpu", and the
            phase; without a phase that took no time.
    """

    step: int
    step_ns: float
    work_ns: dict[str, dict[str, float]]


@dataclass(frozen=True)
class SlowRank:
    """A rank that works longer in a phase than the other ranks, or than it did compared with them.

    Attributes:
        rank: its number.
        phase: the phase.
        signal: what shows it: "wall", "cpu" or "gpu" time.
        step: the number of the last step of the interval.
        work_ns: the time of the phase on this rank, a step.
        others_ns: the median of the other ranks.
        excess_ns: how much longer that is than on the others, or how much it grew compared with them, whichever
            has the higher score.
        against: "the other ranks", "its own past", or both.
        score: how many times the noise ``excess_ns`` is (a robust z-score).
    """

    rank: int
    phase: str
    signal: str
    step: int
    work_ns: float
    others_ns: float
    excess_ns: float
    against: str
    score: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} {SIGNALS[self.signal]} {duration(self.work_ns)} a step in {self.phase}, the others "
            f"{duration(self.others_ns)}: {duration(self.excess_ns)} more, compared with {self.against}"
        )


class RankJudge:
    """Finds the slow ranks, interval by interval.

    The excess of a rank is its time of a phase above the median of the other ranks. A rank is slow if its excess,
    or its growth, is at least 5 % of a step and four times the noise, in ``patience`` intervals in a row. It grows
    above the median of its own past, and at most as much as the time itself, as it also grows when the others
    become faster. The noise is the larger of two robust scales (median absolute deviations): of the other ranks in
    this interval, and of the rank's own excess over time. What happens to all ranks, such as longer sequences,
    changes no excess.

    Args:
        patience: a number of intervals.

    Attributes:
        slow: the ranks that are slow now, as in the last interval in which they were, by rank and phase.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._past: Past = defaultdict(lambda: deque(maxlen=_REMEMBERED))  # excesses and times
        self._run: dict[tuple[int, str], int] = {}  # intervals in a row, up to the patience; falls when it is over
        self._steps_ns: deque[float] = deque(maxlen=_REMEMBERED)
        self._intervals = 0
        self.slow: dict[tuple[int, str], SlowRank] = {}

    def judge(self, ranks: Mapping[int, RankTimes]) -> tuple[list[SlowRank], list[SlowRank]]:
        """Judge an interval.

        Args:
            ranks: the times of the ranks that are known; a missing one is judged again when it is back.

        Returns:
            The ranks that are slow from now on, and those that no longer are.
        """
        self._intervals += 1
        found: dict[tuple[int, str], SlowRank] = {}
        for slow in self._compare(ranks):
            key = slow.rank, slow.phase
            if key not in found or slow.excess_ns > found[key].excess_ns:
                found[key] = slow
        before = self.slow.copy()
        for key in {*self._run, *found}:
            if key[0] in ranks:
                self._count(key, found.get(key))
        new = [slow for key, slow in self.slow.items() if key not in before]
        return new, [slow for key, slow in before.items() if key not in self.slow]

    def _count(self, key: tuple[int, str], slow: SlowRank | None) -> None:
        """Note whether a rank was slow in an interval; one not yet named starts over, one named has patience."""
        run = self._run.get(key, 0)
        if slow is not None:
            run = min(run + 1, self._patience)
            if run == self._patience:
                self.slow[key] = slow
        else:
            run = run - 1 if key in self.slow else 0
        self._run[key] = run
        if not run:
            del self._run[key]
            self.slow.pop(key, None)

    def _compare(self, ranks: Mapping[int, RankTimes]) -> Iterator[SlowRank]:
        self._steps_ns.append(median(times.step_ns for times in ranks.values()))
        step_ns = median(self._steps_ns)
        for signal in SIGNALS:
            work = {rank: times.work_ns[signal] for rank, times in ranks.items() if signal in times.work_ns}
            for phase in {phase for phases in work.values() for phase in phases} if len(work) > 1 else ():
                times_ns = {rank: phases.get(phase, 0.0) for rank, phases in work.items()}
                ordered = sorted(times_ns.values())
                for rank, ns in times_ns.items():
                    past = self._past[rank, phase, signal]
                    others_ns = _median_without(ordered, ns)
                    part = _STAYS if (rank, phase) in self.slow else 1.0
                    verdict = _verdict(ordered, ns, ns - others_ns, past, step_ns, part)
                    if verdict is None or self._intervals <= _WARM_UP:
                        past.append((ns - others_ns, ns))
                    else:
                        yield SlowRank(rank, phase, signal, ranks[rank].step, ns, others_ns, *verdict)


def _verdict(
    ordered: Sequence[float],
    ns: float,
    excess_ns: float,
    past: Sequence[tuple[float, float]],
    step_ns: float,
    part: float,
) -> tuple[float, str, float] | None:
    """Return by how much a rank is slow, against what, and the score; None if it is not.

    Args:
        ordered: the times of all ranks, sorted.
        ns: the time of this one.
        excess_ns: how far it is above the median of the others.
        past: its excess and its time in the intervals before.
        step_ns: the length of a step.
        part: of the limits, is enough.
    """
    least = part * _LEAST * step_ns
    excesses, times = zip(*past, strict=True) if past else ((), ())
    usual = median(excesses) if past else 0.0
    growth_ns = min(excess_ns - usual, ns - median(times)) if len(past) >= _LEARNED else 0.0
    if max(excess_ns, growth_ns) < least:
        return None  # as nearly always, so that the rest is rarely computed
    noise = _SIGMA * median([abs(one - usual) for one in excesses] or [0.0])
    noise = max(_LEAST_NOISE * step_ns, noise * (1 + _CAUTION / max(len(past), 1)))
    others = list(ordered)
    others.remove(ns)
    middle = median(others)
    spread = max(noise, _SIGMA * median(abs(one - middle) for one in others))
    compared = (
        (excess_ns, "the other ranks", excess_ns / spread),
        (growth_ns, "its own past", growth_ns / noise),
    )
    high = [one for one in compared if one[0] >= least and one[2] >= part * _SCORE]
    if not high:
        return None
    amount, _, score = max(high, key=lambda one: one[2])
    return amount, " and ".join(name for _, name, _ in high), score


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted numbers without one of them, in the time that finding it takes."""
    place, count = bisect_left(ordered, value), len(ordered) - 1
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
