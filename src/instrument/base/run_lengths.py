"""`RunLengths`: where the time of a run is, in typical steps, slow ones, or outside of steps; `StepTally`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import merge
from itertools import pairwise
from typing import Any, NamedTuple

from .units import counted, duration, ordinal

SLOW = 2
"""How many times as long as the median of its block a step is slow."""

TYPICAL_SHARE = 0.8
"""The least share of the loop's time in typical steps at which they stand for the loop."""

BLOCK = 1024
"""The number of steps after which their lengths are added up, a power of two."""

_SAMPLE = 128  # successive steps of a block, whose median is that of the block
_CHUNK = 32  # successive steps of a block that are looked at together, as few have a slow one
_FEW = 16  # a block with fewer steps takes the median of the one before
_KEPT = 256  # slow steps
_OUTSIDE = {"between_ns": "between loops", "phases_ns": "in other phases"}
_MIN_STEPS = 16  # fewer say little about a loop
_MIN_SHARE = 0.05  # of the loop's time; smaller parts are not mentioned
_ALIKE = (
    1.5  # slow steps of one family: sorted by length, none is more than so many times as long as the one before
)
_FAMILIES = 4  # that are looked at, those of the longest steps first
_MIN_PERIOD, _MIN_EPOCHS = 2, 2
_UNEVEN_PERIOD, _UNEVEN_MEMBERS = 8, 6  # from which distances may differ by one: chance rarely does that
_NAMED = 6
_BESIDE = 8  # slow steps that may lie between two of a series
_CHANCE = 0.001
_PART, _PARTS = 8, 32  # successive steps of a part, and the most parts: then two and two are joined
_CHANGED = 1.25  # times as long or as short: so much longer steps at the end are another loop than at the begin


class Recurrence(NamedTuple):
    """Slow steps of like length at equal distances, or at the begin of epochs.

    Attributes:
        every: the number of steps from one to the next, the nearest integer; 0 if that differs.
        steps: their numbers.
        each_ns: their mean length.
        begin_epochs: whether most of them are the first of an epoch, and most epochs begin with one.
    """

    every: int
    steps: tuple[int, ...]
    each_ns: int
    begin_epochs: bool

    def __str__(self) -> str:
        if not self.every:
            return "the first step of each epoch"
        return f"every {ordinal(self.every)} step{', the first of each epoch' * self.begin_epochs}"


@dataclass(frozen=True)
class RunLengths:
    """The lengths of all timed steps of a run, from the end of one to the end of the next.

    The first step of a run belongs to its start. What the library does between steps, as to open a window, is part
    of no step. All times add up to that of the run.

    Attributes:
        usual_ns: the mean length of a typical step, one that was not recorded if there are some.
        typical_steps: how many steps took less than `SLOW` times the median of the steps around them.
        typical_ns: their time in all.
        slow_steps: how many took longer.
        slow_ns: their time in all.
        slow: numbers and lengths of the last slow steps.
        recorded: the numbers of those of them that a window recorded.
        epochs: the numbers of the first steps of the last epochs, as far as they are known.
        start_ns: the time of the first step, and of the process before it if that exists for the run alone.
        between_ns: the time between loops, such as epochs.
        phases_ns: the time in phases that the program marks beside its steps, such as evaluations.
        recording_ns: the time in which the library opened, wrote and closed windows.
        end_ns: the time since the last step.
        early_ns: the mean length of typical steps in the first quarter of the run, and ``late_ns`` in the last, if
            all parts of the one are longer than all of the other; else 0.
    """

    usual_ns: int = 0
    typical_steps: int = 0
    typical_ns: int = 0
    slow_steps: int = 0
    slow_ns: int = 0
    slow: tuple[tuple[int, int], ...] = ()
    recorded: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    start_ns: int = 0
    between_ns: int = 0
    phases_ns: int = 0
    recording_ns: int = 0
    end_ns: int = 0
    early_ns: int = 0
    late_ns: int = 0

    @classmethod
    def of(cls, plain: StepTally, recorded: StepTally, **others: Any) -> RunLengths:
        """Return the lengths of steps that were not recorded, and of recorded ones; ``others`` are attributes."""
        plain = plain.judged()
        recorded = recorded.judged(plain.median_ns)
        usual = plain if plain.typical_steps else recorded
        early_ns, late_ns = plain.quarters()
        return cls(
            early_ns=early_ns,
            late_ns=late_ns,
            usual_ns=usual.typical_ns // max(usual.typical_steps, 1),
            typical_steps=plain.typical_steps + recorded.typical_steps,
            typical_ns=plain.typical_ns + recorded.typical_ns,
            slow_steps=plain.slow_steps + recorded.slow_steps,
            slow_ns=plain.slow_ns + recorded.slow_ns,
            slow=tuple(merge(plain.slow, recorded.slow)),
            recorded=tuple(number for number, _ in recorded.slow),
            **others,
        )

    @classmethod
    def from_json(cls, values: object) -> RunLengths | None:
        """Return the lengths in a manifest; None if they are not there or not as `as_json` writes them."""
        if not isinstance(values, Mapping) or not cls.__dataclass_fields__.keys() <= values.keys():
            return None
        numbers = {name: values[name] for name in cls.__dataclass_fields__}
        lists = {name: numbers.pop(name) for name in ("slow", "recorded", "epochs")}
        if not all(map(_is_count, numbers.values())) or not all(
            isinstance(each, (list, tuple)) for each in lists.values()
        ):
            return None
        slow = tuple(tuple(pair) for pair in lists["slow"] if isinstance(pair, (list, tuple)))
        if not all(len(pair) == 2 and all(map(_is_count, pair)) for pair in slow):
            return None
        recorded, epochs = (tuple(filter(_is_count, lists[name])) for name in ("recorded", "epochs"))
        return cls(**numbers, slow=slow, recorded=recorded, epochs=epochs)

    def as_json(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return asdict(self)

    @property
    def steps(self) -> int:
        """The number of timed steps."""
        return self.typical_steps + self.slow_steps

    @property
    def are_enough(self) -> bool:
        """Whether there are enough steps to say where the time is."""
        return self.steps >= _MIN_STEPS and self.loop_ns > 0

    @property
    def loop_ns(self) -> int:
        """The time from the second step to the last one, without the library's own."""
        return self.typical_ns + self.slow_ns + self.between_ns + self.phases_ns

    @property
    def typical_share(self) -> float:
        """The share of the loop's time in typical steps; 1 before its first step."""
        return self.typical_ns / self.loop_ns if self.loop_ns else 1.0

    @property
    def are_typical(self) -> bool:
        """Whether a typical step stands for the loop."""
        return self.typical_share >= TYPICAL_SHARE and not self.change

    @property
    def change(self) -> float:
        """How many times as long steps are at the end of the run as at its begin; 0 if that is about the same."""
        ratio = self.late_ns / self.early_ns if self.early_ns else 0
        return ratio if ratio and max(ratio, 1 / ratio) > _CHANGED else 0.0

    @property
    def became(self) -> str:
        """How the steps changed, if they did: "became 1.9 times as long", with both lengths."""
        ratio = f"{self.change:.1f} times as long" if self.change > 1 else f"{1 / self.change:.1f} times faster"
        early, late = duration(self.early_ns), duration(self.late_ns)
        return f"became {ratio} ({early} in the first quarter, {late} in the last)"

    def recurrences(self) -> list[Recurrence]:
        """Return the families of slow steps that recur, the one of the longest steps first.

        The steps of a family are of like length, and they begin epochs or all distances between them are equal.
        Three steps are enough if their numbers are multiples of the distance, or one less, as loops count; else
        four; and six if distances of at least 8 differ by one; or two if they begin epochs. Fewer would be so by
        chance. A series that missed its last two turns has ended.
        """
        found = []
        rest = sorted(self.slow, key=lambda pair: pair[1])
        for _ in range(_FAMILIES):
            family = _take_longest(rest)
            numbers = sorted(number for number, _ in family)
            if not period_of(numbers) and period_of(numbers[1:]):  # the first one is of the start
                family.remove(min(family))
                numbers = numbers[1:]
            if not period_of(numbers) and (series := self._series_in(numbers)):
                family = [pair for pair in family if pair[0] in series]
                numbers = series
            every, begin_epochs = period_of(numbers), self._begin_epochs(numbers)
            ended = every and self.steps - numbers[-1] > 2 * every
            if (every or begin_epochs) and not ended:
                mean_ns = sum(ns for _, ns in family) // len(family)
                found.append(Recurrence(every, tuple(numbers), mean_ns, begin_epochs))
        return found

    def _series_in(self, numbers: Sequence[int]) -> list[int]:
        """Return the longest series at equal distances among other slow steps; empty if it may be chance.

        Of n slow steps in N, some k are at equal distances by chance about N ** 2 (n / N) ** k times.
        """
        known, longest = set(numbers), list[int]()
        for every in {
            later - first
            for ahead in range(1, _BESIDE)
            for first, later in zip(numbers, numbers[ahead:], strict=False)
        }:
            for first in numbers:
                if first - every not in known:
                    series = [first]
                    while series[-1] + every in known:
                        series.append(series[-1] + every)
                    longest = max(longest, series, key=len)
        steps = self.slow[-1][0] - self.slow[0][0] + 1 if self.slow else 1
        return longest if steps**2 * (len(self.slow) / steps) ** len(longest) < _CHANCE else []

    def _begin_epochs(self, numbers: Sequence[int]) -> bool:
        """Return whether most of these slow steps are the first of an epoch, and most epochs begin with one."""
        since = self.slow[0][0] if len(self.slow) < self.slow_steps else 0  # the earlier ones are forgotten
        epochs = {step for step in self.epochs if step >= since}
        both = len(epochs.intersection(numbers))
        return both >= _MIN_EPOCHS and 2 * both > max(len(epochs), len(numbers))

    def sentences(self, hint: str = "--steps {}") -> Iterator[str]:
        """Yield where the time of the run is, in one sentence or two; none of fewer than 16 steps.

        Args:
            hint: how the user writes the steps to record, with "{}" for the steps.
        """
        if not self.are_enough:
            return
        start = f", after {duration(self.start_ns)} of startup" * (self.start_ns > self.loop_ns / 4)
        worth = self.recording_ns >= _MIN_SHARE * self.loop_ns
        recording = f", beside {duration(self.recording_ns)} of recording" * worth
        said = f"{self.steps:,} steps in {duration(self.loop_ns)}{start}{recording}:"
        if self.are_typical:
            yield f"{said} {self._share(self.typical_ns)} in typical steps of {self._mean}"
            return
        most = f"{self._share(self.typical_ns)} in {self.typical_steps:,} steps of about {self._mean}"
        if self.change:
            most += f" that {self.became}"
        yield f"{said} {'; '.join([most, *self._slow_parts(self.recurrences()), *self._outside_parts()])}"
        if self.slow_ns >= _MIN_SHARE * self.loop_ns and not self.recorded:
            yield f"No window shows a slow step; record one with {self.how_to_record(hint)}"

    def how_to_record(self, hint: str) -> str:
        """Return the option or the argument that records a slow step; ``hint`` as for `sentences`."""
        recurrences = self.recurrences()
        if recurrences:
            middle = recurrences[0].steps[len(recurrences[0].steps) // 2]
            return hint.format(f"{max(middle - 1, 0)}-{middle + 1}")
        return "--black-box" if hint.startswith("--") else "black_box=True"

    def _slow_parts(self, recurrences: Sequence[Recurrence]) -> Iterator[str]:
        """Yield which steps are slow: those that recur, and others."""
        recurring = {number for each in recurrences for number in each.steps}
        for each in recurrences:
            ns = sum(ns for number, ns in self.slow if number in each.steps)
            if ns >= _MIN_SHARE * self.loop_ns:
                yield f"{self._share(ns)} in {each}, of about {duration(each.each_ns)} ({_named(each.steps)})"
        others = [(number, ns) for number, ns in self.slow if number not in recurring]
        ns = self.slow_ns - sum(ns for number, ns in self.slow if number in recurring)
        if ns >= _MIN_SHARE * self.loop_ns:
            number = self.slow_steps - len(recurring)
            which = "" if not recurring else "other " if others else "earlier "  # whose numbers are forgotten
            named = f" ({_named([number for number, _ in others])})" * bool(others)
            yield f"{self._share(ns)} in {counted(number, f'{which}slow step')}{named}"

    def _outside_parts(self) -> Iterator[str]:
        for part, where in _OUTSIDE.items():
            if getattr(self, part) >= _MIN_SHARE * self.loop_ns:
                yield f"{self._share(getattr(self, part))} {where}"

    @property
    def _mean(self) -> str:
        """The mean length of a typical step in words, recorded or not, so that it explains their share."""
        return duration(self.typical_ns // max(self.typical_steps, 1))

    def _share(self, ns: int) -> str:
        return f"{100 * ns / self.loop_ns:.0f} %"


class StepTally:
    """Adds up the lengths of steps, block by block: of each it is known which steps are slow.

    `add` takes twice the median of a block as the limit, `count` a given one.

    Attributes:
        typical_steps: and ``typical_ns``, ``slow_steps``, ``slow_ns``, ``slow``: as those of `RunLengths`.
        median_ns: the median length of the last block; 0 before its first step.
    """

    def __init__(self) -> None:
        self.typical_steps = self.typical_ns = self.slow_steps = self.slow_ns = 0
        self.slow: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self.median_ns = 0
        self._first = 0  # the number of the first step of the block that is being filled
        self._lengths_ns: list[int] = []
        self._parts: list[tuple[int, int]] = []  # numbers and times of successive typical steps
        self._part = _PART

    def add(self, first: int, lengths_ns: Sequence[int]) -> None:
        """Add steps, the first of which has the number ``first``."""
        if first != self._first + len(self._lengths_ns):  # other steps came between
            if self._lengths_ns:
                self._judge()
            self._first = first
        self._lengths_ns += lengths_ns
        if len(self._lengths_ns) >= BLOCK:
            self._judge()

    def judged(self, least_ns: int = 0) -> StepTally:
        """Return a copy with the steps of the unfinished block, whose median is taken as ``least_ns`` at least."""
        copy = self.copy()
        if self._lengths_ns:
            copy._judge(least_ns)
        return copy

    def copy(self) -> StepTally:
        """Return a copy, to which other steps can be added."""
        copy = StepTally()
        lists = {"_lengths_ns": self._lengths_ns.copy(), "_parts": self._parts.copy()}
        vars(copy).update(vars(self), slow=self.slow.copy(), **lists)
        return copy

    def _judge(self, least_ns: int = 0) -> None:
        lengths_ns, self._lengths_ns = self._lengths_ns, []
        sample = sorted(lengths_ns[:_SAMPLE])
        if len(sample) >= _FEW or not self.median_ns:
            self.median_ns = sample[(len(sample) - 1) // 2]
        limit_ns = SLOW * max(self.median_ns, least_ns)
        for at in range(0, len(lengths_ns), _CHUNK):
            self.count(self._first + at, lengths_ns[at : at + _CHUNK], limit_ns)
        self._first += len(lengths_ns)

    def count(self, first: int, lengths_ns: Sequence[int], limit_ns: int) -> None:
        """Add a few steps, the first of which has the number ``first``; longer ones than ``limit_ns`` are slow."""
        steps, ns = len(lengths_ns), sum(lengths_ns)
        if max(lengths_ns) > limit_ns:
            slow = [(number, ns) for number, ns in enumerate(lengths_ns, first) if ns > limit_ns]
            slow_ns = sum(ns for _, ns in slow)
            self.slow.extend(slow)
            self.slow_steps += len(slow)
            self.slow_ns += slow_ns
            steps, ns = steps - len(slow), ns - slow_ns
        self.typical_steps += steps
        self.typical_ns += ns
        self._add_part(steps, ns)

    def _add_part(self, steps: int, ns: int) -> None:
        parts = self._parts
        if parts and parts[-1][0] < self._part:
            parts[-1] = parts[-1][0] + steps, parts[-1][1] + ns
        elif steps:
            parts.append((steps, ns))
            if len(parts) > _PARTS:
                self._part *= 2
                parts[:] = [_joined(parts[at : at + 2]) for at in range(0, len(parts), 2)]

    def quarters(self) -> tuple[int, int]:
        """Return the mean lengths of typical steps in the first and last quarter; 0 if chance parts them."""
        parts = [part for part in self._parts if part[0] >= self._part]
        if len(parts) < _PARTS // 4:
            return 0, 0
        early, late = parts[: len(parts) // 4], parts[-(len(parts) // 4) :]
        (least, most), (later, latest) = ((min(each), max(each)) for each in map(_means_of, (early, late)))
        if most >= later and latest >= least:
            return 0, 0
        (early_steps, early_ns), (late_steps, late_ns) = _joined(early), _joined(late)
        return early_ns // early_steps, late_ns // late_steps


def _means_of(parts: Sequence[tuple[int, int]]) -> list[float]:
    return [ns / steps for steps, ns in parts]


def _joined(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(steps for steps, _ in parts), sum(ns for _, ns in parts)


def _named(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[-_NAMED:])) + f", and {len(numbers) - _NAMED:,} before" * (
        len(numbers) > _NAMED
    )


def period_of(numbers: Sequence[int]) -> int:
    """Return the distance between ``numbers``, which are sorted, if they recur; else 0."""
    gaps = [later - earlier for earlier, later in pairwise(numbers)]
    if not gaps or min(gaps) < _MIN_PERIOD:
        return 0
    every = round(sum(gaps) / len(gaps))
    if max(gaps) == min(gaps):
        anchored = all(number % every in (0, every - 1) for number in numbers)
        return every if len(numbers) >= (3 if anchored else 4) else 0
    uneven = max(gaps) == min(gaps) + 1 and every >= _UNEVEN_PERIOD and len(numbers) >= _UNEVEN_MEMBERS
    return every if uneven else 0


def _take_longest(ordered: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Take the steps of like length from the end of the list, which is ordered by length."""
    start = len(ordered) - 1
    while start > 0 and ordered[start][1] <= _ALIKE * ordered[start - 1][1]:
        start -= 1
    family, ordered[:] = ordered[max(start, 0) :], ordered[: max(start, 0)]
    return family


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
