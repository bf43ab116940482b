"""`ReportData`: the findings of one run, worst first, with their severity and how often they happen."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

from ...base.early_stop import describe_error
from ...base.findings import Evidence, Severity, SyncFinding, Where
from ...base.units import count
from .events import Source

OFTEN, SELDOM = 1 / 2, 1 / 10  # shares of the steps
NEGLIGIBLE = 1 / 1000  # a share of the time
_UNTIMED = {
    "dry run": "a dry run has no GPU to wait for",
    "live": "the start or end of the wait was not seen",
    "trace": "the trace has no times for it",
}
_EVIDENCE = {
    "count": ("events", "Calls that synchronized."),
    "blocked_ns": ("ns", "Time that the CPU was blocked in all timed calls."),
    "idle_ns": ("ns", "Time that the calls left the GPU idle."),
    "bytes": ("bytes", "Bytes of all copies."),
}


@dataclass(frozen=True)
class StepPattern:
    """In how many steps a line synchronizes, and how often; ``str`` gives "in 1 of 7 steps, 61 times".

    Attributes:
        counts: number of synchronizations in each step that has any, in ascending order.
        steps: number of steps that were checked; 0 if no steps are known.
        outside: number of synchronizations outside steps, as in the set-up, in an evaluation before the first
            step, and after the last update; all of them if no steps are known.
    """

    counts: tuple[int, ...]
    steps: int
    outside: int

    @classmethod
    def of(cls, by_step: Counter[int | None], steps: int) -> StepPattern:
        """Return the pattern of synchronizations counted by step number, in ``steps`` steps."""
        if not steps:
            return cls((), 0, by_step.total())
        counts = sorted(number for step, number in by_step.items() if step is not None and number)
        return cls(tuple(counts), steps, by_step[None])

    @property
    def share(self) -> float:
        """The share of steps with a synchronization, from 0 to 1; 1 if no steps are known."""
        return min(len(self.counts) / self.steps, 1.0) if self.steps else 1.0

    @property
    def repeats(self) -> bool:
        """Whether more than one step has a synchronization."""
        return len(self.counts) > 1

    def __str__(self) -> str:
        if not self.steps:
            return times(self.outside)
        parts = [self._describe_steps()] if self.counts else []
        if self.outside:
            parts.append(f"{times(self.outside)} outside the steps")
        return "; ".join(parts)

    def _describe_steps(self) -> str:
        least, most, inside = self.counts[0], self.counts[-1], len(self.counts)
        if self.steps == 1:
            return f"{times(most)} in the step"
        where = "in every step" if inside >= self.steps else f"in {count(inside)} of {count(self.steps)} steps"
        if most == 1:
            return where
        if least < most:
            return f"{where}, {'once' if least == 1 else count(least)} to {times(most)}"
        return f"{where}, {times(most)}{' each' if self.repeats else ''}"


def times(number: int) -> str:
    """Return ``number`` as "once" or "2 times"."""
    return "once" if number == 1 else f"{count(number)} times"


@dataclass
class ReportData:
    """The findings of one run.

    Attributes:
        source: how they were found.
        findings: all findings, worst first, also those that are allowed and code that could not be checked.
        steps: number of steps that were checked; 0 if there were none, and the whole run then counts as one step.
        coverage: sentences on what this source cannot see.
        error: the exception that ended the user's step early, in a dry run.
        dropped: number of synchronizations at lines that are not listed.
        unavailable_reason: why nothing could be checked, in a sentence; empty if something could.
        listed: fingerprints that an allowlist allowed.
        budgeted: whether a budget was given.
        exceeded: sentences on exceeded budgets.
        unmatched: sentences on what matched nothing, such as a budget of a region that never ran.
        span_ns: how long the checked part of the run took; None if unknown.
    """

    source: Source
    findings: list[SyncFinding] = field(default_factory=list)
    steps: int = 0
    coverage: list[str] = field(default_factory=list)
    error: BaseException | None = None
    dropped: int = 0
    unavailable_reason: str = ""
    listed: set[str] = field(default_factory=set)
    budgeted: bool = False
    exceeded: list[str] = field(default_factory=list)
    span_ns: int | None = None
    unmatched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sort()

    def sort(self) -> None:
        """Rate the findings and order them: the worst first, then the allowed ones, then code not covered."""
        self.findings = sorted(map(self._rate, self.findings), key=self._sort_key)

    def _rate(self, found: SyncFinding) -> SyncFinding:
        """Return the finding with what follows from the whole run: severity, title, evidence and time to win."""
        idle_ns = found.idle_ns
        return replace(
            found,
            rule=f"synchronization/{found.op}" if found.covered else found.op,
            severity=self.severity(found),
            title=f"{found.op}: {found.cause}, {self.pattern(found)}" if found.covered else found.cause,
            where=Where(region=found.region, step=found.step, site=found.site or found.via),
            evidence=tuple(Evidence(name, getattr(found, name), *about) for name, about in _EVIDENCE.items()),
            win_ns=None if idle_ns is None else idle_ns // max(self.steps, 1),
            coverage=found.timed / found.count if found.count else None,
        )

    @property
    def syncs(self) -> list[SyncFinding]:
        """The synchronizations that are not allowed, worst first."""
        return [found for found in self.findings if found.covered and found.allowed is None]

    @property
    def allowed(self) -> list[SyncFinding]:
        """The synchronizations that are allowed."""
        return [found for found in self.findings if found.covered and found.allowed is not None]

    @property
    def not_covered(self) -> list[SyncFinding]:
        """Code that could not be checked, and why."""
        return [found for found in self.findings if not found.covered]

    @property
    def ended(self) -> str | None:
        """What ended the run early, in one line; None if nothing did."""
        return None if self.error is None else describe_error(self.error)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.error is None

    def per_step(self, found: SyncFinding) -> float:
        """Return the mean number of calls of ``found`` in a step; calls outside steps do not count."""
        if not self.steps:
            return float(found.count)
        return (found.count - found.steps[None]) / self.steps

    def max_in_step(self, *findings: SyncFinding) -> int:
        """Return the greatest number of synchronizations of ``findings`` in any one step.

        Synchronizations outside steps do not count; without steps the whole run counts as one step.
        """
        return max(self.each_step(*findings), default=0)

    def typical(self, *findings: SyncFinding) -> int:
        """Return the median number of synchronizations of ``findings`` in a step."""
        return int(statistics.median_low(self.each_step(*findings)))

    def each_step(self, *findings: SyncFinding) -> list[int]:
        """Return the number of synchronizations of ``findings`` in each step; a run without steps is one step."""
        if not self.steps:
            return [sum(found.count for found in findings)]
        steps: Counter[int | None] = Counter()
        for found in findings:
            steps.update(found.steps)
        counts = [number for step, number in steps.items() if step is not None]
        return counts + [0] * (self.steps - len(counts))

    def pattern(self, found: SyncFinding) -> StepPattern:
        """Return in how many steps ``found`` synchronizes, and how often."""
        return StepPattern.of(found.steps if self.steps else Counter({None: found.count}), self.steps)

    def negligible(self, found: SyncFinding) -> bool:
        """Return whether ``found`` is known to take less than a thousandth of the time."""
        took = max(found.blocked_ns or 0, found.idle_ns or 0)
        timed = found.blocked_ns is not None and found.timed == found.count
        return bool(self.span_ns) and timed and took < NEGLIGIBLE * (self.span_ns or 0)

    def severity(self, found: SyncFinding) -> Severity:
        """Return how bad ``found`` is: a line that synchronizes repeatedly comes before one that does so once.

        "high": waits for all work of the GPU in at least half of the steps, or synchronizes inside `no_syncs`.
        "medium": waits in at least a tenth of the steps, or waits for a copy to the GPU in half of them.
        "low": everything else: seldom, in only one of several steps (such as a checkpoint), outside the steps,
        allowed, or taking next to no time.
        """
        if found.forbidden:
            return "high"
        if found.allowed is not None or not found.covered or self.negligible(found):
            return "low"
        pattern, upward = self.pattern(found), found.direction == "H2D"
        if not pattern.repeats and self.steps > 1:
            return "low"
        if pattern.share >= OFTEN:
            return "medium" if upward else "high"
        return "medium" if pattern.share >= SELDOM and not upward else "low"

    def why_untimed(self, found: SyncFinding) -> str | None:
        """Return why it is unknown how long ``found`` waited; None if it is known."""
        return _UNTIMED[self.source] if found.blocked_ns is None else None

    def _sort_key(self, found: SyncFinding) -> tuple[object, ...]:
        order = {"high": 0, "medium": 1, "low": 2}[self.severity(found)]
        return (
            not found.covered, found.allowed is not None, not found.forbidden, order, -self.pattern(found).share,
            -(found.blocked_ns or 0), -found.count, found.site.file if found.site else "",
            found.site.line if found.site else 0,
        )  # fmt: skip
