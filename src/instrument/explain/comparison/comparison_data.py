"""`ComparisonData`: the verdict, the parts of the difference and the findings of two recordings, also in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ...base.findings import Finding
from ...base.units import duration
from ..diagnosis.diagnose import Diagnosis

Key = TypeVar("Key", bound=Hashable)
Verdict = Literal["faster", "slower", "no change seen", "not comparable"]


@dataclass(frozen=True)
class Part:
    """A part of the difference of two steps.

    Attributes:
        kind: one of `step_parts.KINDS`.
        region: the names of the regions, outermost first.
        operator: the operator; empty if there is none.
        kernel: the kernel, memcpy or memset; empty for other kinds.
        before_ns: its time in the step before the change.
        after_ns: its time in the step after the change.
        before_calls: how often it occurs in the step before.
        after_calls: how often it occurs in the step after.
    """

    kind: str
    region: tuple[str, ...]
    operator: str
    kernel: str
    before_ns: int
    after_ns: int
    before_calls: int
    after_calls: int

    @property
    def ns(self) -> int:
        """The time after - the time before."""
        return self.after_ns - self.before_ns

    @property
    def change(self) -> Literal["appeared", "gone", "changed"]:
        """Whether it occurs on one side only."""
        if not self.before_calls:
            return "appeared"
        return "changed" if self.after_calls else "gone"


@dataclass(frozen=True)
class ComparisonData:
    """What changed between two recordings.

    Attributes:
        verdict: "faster" or "slower" if the steps differ by more than chance; "no change seen"; "not comparable".
        before_ns: the lower median of the lengths of the steps before the change.
        after_ns: that after it.
        parts: the difference of the two median steps by kind, region, operator and kernel, the largest first;
            the sum of their ``ns`` is ``delta_ns``.
        p_value: the probability of such a difference if the true change is at most 0.5 %; None with fewer than
            four steps on a side.
        detectable: the smallest relative change that these samples show in 80 % of cases; None like ``p_value``.
        reasons: why the recordings cannot be compared, or why "no change seen" says little.
        notes: other differences between the recordings.
        gone: the findings of the first diagnosis that the second one lacks.
        new: the findings of the second that the first one lacks.
        lengths_ns: the lengths of the steps before and after, in their order.
        before: the first diagnosis.
        after: the second diagnosis.
    """

    verdict: Verdict
    before_ns: int
    after_ns: int
    parts: tuple[Part, ...]
    p_value: float | None
    detectable: float | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    lengths_ns: tuple[tuple[int, ...], tuple[int, ...]] = field(repr=False)
    before: Diagnosis = field(repr=False)
    after: Diagnosis = field(repr=False)

    @property
    def have_steps(self) -> bool:
        """Whether both recordings have steps."""
        return self.before.has_steps and self.after.has_steps

    @property
    def delta_ns(self) -> int:
        """``after_ns`` - ``before_ns``."""
        return self.after_ns - self.before_ns

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers of steps before and after."""
        before, after = self.lengths_ns
        return len(before), len(after)

    @property
    def relative(self) -> float | None:
        """``delta_ns`` / ``before_ns``; None if the latter is 0."""
        return self.delta_ns / self.before_ns if self.before_ns else None

    def by_kind(self) -> dict[str, int]:
        """Return the difference of each kind of part in ns, the largest first; they add up to ``delta_ns``."""
        return self._sums(lambda part: part.kind)

    def by_region(self) -> dict[tuple[str, ...], int]:
        """Return the difference of each region in ns, the largest first; they add up to ``delta_ns``."""
        return self._sums(lambda part: part.region)

    def _sums(self, key: Callable[[Part], Key]) -> dict[Key, int]:
        sums: Counter[Key] = Counter()
        for part in self.parts:
            sums[key(part)] += part.ns
        return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))


def headline(change: ComparisonData) -> str:
    """Return the verdict in one sentence."""
    what = "a step takes" if change.have_steps else "the whole trace takes"
    medians = f"{what} {duration(change.after_ns)} instead of {duration(change.before_ns)} ({change_text(change)}"
    if change.have_steps:
        medians += f"; medians of {change.steps[0]} steps before and {change.steps[1]} after"
    medians += ")"
    if change.verdict == "not comparable":
        return f"Not comparable: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen" and change.reasons:
        return f"Cannot tell whether it changed: {'; '.join(change.reasons)}; {medians}."
    if change.verdict == "no change seen":
        seen = "" if change.detectable is None else f" ({100 * change.detectable:.1f} % would have been)"
        return f"No change seen{seen}: {medians}."
    return f"{change.verdict.capitalize()}: {medians}."


def change_text(change: ComparisonData) -> str:
    """Return the relative change in words."""
    return "from nothing" if change.relative is None else f"{100 * change.relative:+.1f} %"


def details(change: ComparisonData) -> Iterator[str]:
    """Yield sentences on what the verdict rests on, and on other differences between the recordings."""
    if change.p_value is not None and change.detectable is not None:
        yield (
            f"p = {change.p_value:.4f} against a change of at most 0.5 %; a change of "
            f"{100 * change.detectable:.1f} % would be seen in 80 % of cases."
        )
    for note in change.notes:
        yield f"Note: {note}."
