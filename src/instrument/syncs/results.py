"""What a detector found, worst first, and how bad it is."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from .finding import Finding, Severity, Source, error_text
from .pattern import Pattern

OFTEN, SELDOM = 1 / 2, 1 / 10  # shares of the steps
NEGLIGIBLE = 1 / 1000  # a share of the time
_UNTIMED = {
    "dry run": "a dry run has no GPU to wait for",
    "live": "neither start nor end of the wait could be seen",
    "trace": "the trace has no times for it",
}


@dataclass
class Results:
    """The findings of one run.

    Attributes:
        source: how they were found.
        findings: all of them, worst first, also what is allowed and what could not be looked at.
        steps: how many steps were looked at; 0 where there were none, and "in a step" is then of the whole run.
        coverage: sentences that say what this source cannot see.
        error: what ended the user's step before its end, in a dry run.
        dropped: waits at further lines than can be listed.
        blind: why nothing at all could be seen, in a sentence; empty where something could.
        listed: the fingerprints that an allowlist allowed.
        budgeted: a budget was given, which says how much may wait.
        exceeded: where it was exceeded, in sentences.
        span_ns: how long what was looked at took; None where that is not known.
    """

    source: Source
    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    coverage: list[str] = field(default_factory=list)
    error: BaseException | None = None
    dropped: int = 0
    blind: str = ""
    listed: set[str] = field(default_factory=set)
    budgeted: bool = False
    exceeded: list[str] = field(default_factory=list)
    span_ns: int | None = None

    def __post_init__(self) -> None:
        self.sort()

    def sort(self) -> None:
        """Put the worst first, what is allowed after it, and what could not be looked at last."""
        self.findings = sorted(self.findings, key=self._rank)

    @property
    def syncs(self) -> list[Finding]:
        """The waits that nobody allowed, worst first."""
        return [found for found in self.findings if found.covered and found.allowed is None]

    @property
    def allowed(self) -> list[Finding]:
        """The waits that somebody allowed."""
        return [found for found in self.findings if found.covered and found.allowed is not None]

    @property
    def not_covered(self) -> list[Finding]:
        """What could not be looked at, and why."""
        return [found for found in self.findings if not found.covered]

    @property
    def ended(self) -> str | None:
        """What ended the run before its end, in one line; None where nothing did."""
        return None if self.error is None else error_text(self.error)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.error is None

    def per_step(self, found: Finding) -> float:
        """Return how many times in a step ``found`` was seen, outside of steps not counted where there are any."""
        if not self.steps:
            return float(found.count)
        return (found.count - found.steps[None]) / self.steps

    def most(self, *findings: Finding) -> int:
        """Return the greatest number of waits of ``findings`` in any one step.

        What is outside of steps is not counted where there are any; where there are none, all is one step.
        """
        return max(self.each_step(*findings), default=0)

    def typical(self, *findings: Finding) -> int:
        """Return the median of the number of waits of ``findings`` in a step."""
        return int(statistics.median_low(self.each_step(*findings)))

    def each_step(self, *findings: Finding) -> list[int]:
        """Return the number of waits of ``findings`` in each step; where there are none, the run is one."""
        if not self.steps:
            return [sum(found.count for found in findings)]
        steps: Counter[int | None] = Counter()
        for found in findings:
            steps.update(found.steps)
        counts = [number for step, number in steps.items() if step is not None]
        return counts + [0] * (self.steps - len(counts))

    def pattern(self, found: Finding) -> Pattern:
        """Return in how many steps ``found`` waits, and how often in each."""
        return Pattern.of(found.steps if self.steps else Counter({None: found.count}), self.steps)

    def negligible(self, found: Finding) -> bool:
        """Return whether ``found`` is known to take less than a thousandth of the time."""
        took = max(found.blocked_ns or 0, found.idle_ns or 0)
        timed = found.blocked_ns is not None and found.timed == found.count
        return bool(self.span_ns) and timed and took < NEGLIGIBLE * (self.span_ns or 0)

    def severity(self, found: Finding) -> Severity:
        """Return how bad ``found`` is: what repeats comes before what happens once.

        "high" waits in at least half of the steps for all that the GPU has to do, or where nothing may wait.
        "medium" waits in at least a tenth of the steps, or in half of them for a copy to the GPU. "low" is
        everything else: what is rarer, or in one of several steps, such as a checkpoint, what is outside of the
        steps, allowed, or takes next to no time.
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

    def why_untimed(self, found: Finding) -> str | None:
        """Return why it is not known how long ``found`` waited; None where that is known."""
        return _UNTIMED[self.source] if found.blocked_ns is None else None

    def _rank(self, found: Finding) -> tuple[object, ...]:
        order = {"high": 0, "medium": 1, "low": 2}[self.severity(found)]
        return (
            not found.covered, found.allowed is not None, not found.forbidden, order, -self.pattern(found).share,
            -(found.blocked_ns or 0), -found.count, found.site.file if found.site else "",
            found.site.line if found.site else 0,
        )  # fmt: skip
