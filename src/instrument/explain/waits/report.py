"""`SyncReport`: the findings of one run, worst first, to print, to assert on and to export."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...base.early_stop import describe_error
from ...base.findings import Evidence, Severity, Site, SyncFinding, Where
from ...base.page_file import Page
from ...base.units import count, counted
from .events import CHOSEN, Source

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_WIDTH = 100  # columns, without a terminal
_INTERNAL = {"each_step", "max_in_step", "negligible", "sort", "typical", "why_untimed"}  # only for this package
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
class SyncReport(Page):
    """The lines that make the CPU wait for the GPU; print it, or read its attributes.

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

    def _rate(self, finding: SyncFinding) -> SyncFinding:
        """Return the finding with what follows from the whole run: severity, title, evidence and time to win."""
        idle_ns = finding.idle_ns
        return replace(
            finding,
            rule=f"synchronization/{finding.op}" if finding.covered else finding.op,
            severity=self.severity(finding),
            title=f"{finding.op}: {finding.cause}, {self.pattern(finding)}" if finding.covered else finding.cause,
            where=Where(region=finding.region, step=finding.step, site=finding.site or finding.via),
            evidence=tuple(Evidence(name, getattr(finding, name), *about) for name, about in _EVIDENCE.items()),
            win_ns=None if idle_ns is None else idle_ns // max(self.steps, 1),
            coverage=finding.timed / finding.count if finding.count else None,
        )

    @property
    def syncs(self) -> list[SyncFinding]:
        """The synchronizations that are not allowed, worst first."""
        return [finding for finding in self.findings if finding.covered and finding.allowed is None]

    @property
    def allowed(self) -> list[SyncFinding]:
        """The synchronizations that are allowed."""
        return [finding for finding in self.findings if finding.covered and finding.allowed is not None]

    @property
    def not_covered(self) -> list[SyncFinding]:
        """Code that could not be checked, and why."""
        return [finding for finding in self.findings if not finding.covered]

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
        if not self.steps:
            return StepPattern((), 0, found.count)
        counts = sorted(number for step, number in found.steps.items() if step is not None and number)
        return StepPattern(tuple(counts), self.steps, found.steps[None])

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

    def _sort_key(self, sync: SyncFinding) -> tuple[object, ...]:
        order = {"high": 0, "medium": 1, "low": 2}[self.severity(sync)]
        return (
            not sync.covered, sync.allowed is not None, not sync.forbidden, order, -self.pattern(sync).share,
            -(sync.blocked_ns or 0), -sync.count, sync.site.file if sync.site else "",
            sync.site.line if sync.site else 0,
        )  # fmt: skip

    def assert_max(self, most: int | None = None) -> None:
        """Fail if a step synchronizes more than ``most`` times or exceeds its budget; allowed calls do not count.

        Without ``most`` no step may synchronize, or only within the budget if one was given.

        The step with the most synchronizations counts; those outside steps do not. Without steps the whole run
        counts as one step. It also fails if anything inside `no_syncs` synchronized, if the run ended early, if
        nothing could be checked, and if a budget or a comment matches nothing, as one that is misspelled. Code
        that is "not covered" but ran does not make it fail.

        Raises:
            AssertionError: with the report as its message.
            TypeError, ValueError: ``most`` is not a number of synchronizations.
        """
        reason = self.over(most)
        if reason is not None:
            raise AssertionError(f"{reason}\n\n{self}")

    def over(self, most: int | None = None) -> str | None:
        """Return one sentence on why `assert_max` would fail; None if it would not.

        If several steps synchronize too often, the sentence has their number and how often each does.
        """
        unlimited = most is None and self.budgeted
        most = most or 0
        if not isinstance(most, int) or isinstance(most, bool):
            raise TypeError(f'"most" must be an int: {most!r}')
        if most < 0:
            raise ValueError(f'"most" must be >= 0: {most}')
        forbidden = sum(finding.count for finding in self.syncs if finding.forbidden)
        if forbidden:
            return f"the CPU waits for the GPU {times(forbidden)} inside no_syncs"
        wrong = next((finding for finding in self.not_covered if finding.forbidden), None)
        if wrong is not None:
            about = "" if wrong.cause.startswith(CHOSEN) else "would not run on a GPU: "
            return f"{about}{wrong.cause} ({wrong.site or wrong.via})"
        if self.exceeded:
            return self.exceeded[0]
        waits = self.max_in_step(*self.syncs) + self.dropped
        if waits > most and not unlimited:
            return self._too_many(waits, most)
        if self.unavailable_reason:
            return f"nothing could be checked: {self.unavailable_reason}"
        if not self.finished:
            return "the run ended early"
        return self.unmatched[0] if self.unmatched else None

    def _too_many(self, waits: int, most: int) -> str:
        over = sorted(number for number in self.each_step(*self.syncs) if number > most)
        if self.steps < 2 or not over:
            return f"the {'step' if self.steps else 'run'} waits for the GPU {times(waits)}; allowed: {most}"
        over[-1] = waits
        who = "every step waits" if len(over) == self.steps else f"{len(over)} of {self.steps} steps wait"
        return f"{who} for the GPU {self._range(over)}; allowed in a step: {most}"

    def _range(self, waits: list[int]) -> str:
        """Return how often steps synchronize, from the least to the most, and how often most of them do."""
        least, most = waits[0], waits[-1]
        if least == most:
            return times(most)
        usual, steps = Counter(waits).most_common(1)[0]
        usually = f" ({count(usual)} in most)" if 2 * steps > len(waits) else ""
        return f"{'once' if least == 1 else count(least)} to {times(most)}{usually}"

    def to_json(self) -> str:
        """Return the exact report as JSON; `as_dict` describes it."""
        return json.dumps(as_dict(self), indent=2)

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0 for code scanning, such as GitHub's on pull requests."""
        from ...show.text.sarif import to_sarif

        return to_sarif([self])

    def _page(self) -> str:
        from ...show.sections.syncs import page_of

        return page_of([("", self)])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name not in _INTERNAL]

    def __repr__(self) -> str:
        at = counted(len(self.syncs), "line")
        return f"<synchronizations at {at}, in {counted(self.steps, 'step')}; print it>"

    def __str__(self) -> str:
        from ...show.text.lines import as_text
        from ...show.text.syncs import lines

        return as_text(lines(self, shutil.get_terminal_size((_WIDTH, 0)).columns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from ...show.text.lines import as_rich
        from ...show.text.syncs import lines

        return as_rich(lines(self, options.max_width), no_wrap=True, overflow="ignore")


def render(report: SyncReport, *, console: Console) -> None:
    """Print ``report``, in color if the console is a terminal."""
    console.print(report, soft_wrap=True)


VERSION = 1


def as_dict(results: SyncReport) -> dict[str, Any]:
    """Return the report as a dict of JSON values; while ``version`` is 1, keys are only added.

    ``source`` ("live", "dry run", "trace"), ``steps`` (number checked; 0: the whole run counts as one step),
    ``syncs_per_step`` (synchronizations that are not allowed, the greatest number in any step), ``median_syncs``
    (their median), ``finished``, ``error`` (null, or what ended the run), ``unavailable`` (empty, or why nothing
    could be checked), ``dropped`` (synchronizations at lines that are not listed), ``exceeded`` (sentences on the
    budget), ``coverage`` (sentences), and ``findings``, worst first, each with

    - ``status`` ("sync", "allowed", "not covered"), ``severity`` ("high", "medium", "low"), ``op``, ``cause``;
    - ``site`` and ``via`` (null, or file, line, function, code), ``vias`` (line and count of each), ``thread``,
      ``backward``, ``region`` (the names from the outermost, of the region with most calls), ``regions`` (path and
      count of each);
    - ``count``, ``pattern`` ("in 1 of 7 steps, 61 times"), ``in_steps`` (number of steps that synchronize there),
      ``outside`` (calls outside the steps), ``per_step`` (mean), ``step`` (the first), ``steps`` (number and
      count of each; number null outside steps);
    - ``direction`` ("H2D", "D2H", null), ``bytes``, ``blocked_ns``, ``timed`` (number of calls in
      that sum), ``untimed`` (why it is null), ``idle_ns``: integers, null where unknown;
    - ``allowed`` (the reason, or null), ``forbidden`` (inside `no_syncs`), ``fingerprint``, and ``fix`` (text,
      before, after; null for what is not covered).
    """
    return {
        "version": VERSION,
        "source": results.source,
        "steps": results.steps,
        "syncs_per_step": results.max_in_step(*results.syncs),
        "median_syncs": results.typical(*results.syncs),
        "finished": results.finished,
        "error": results.ended,
        "unavailable": results.unavailable_reason,
        **{name: getattr(results, name) for name in ("dropped", "exceeded", "coverage")},
        "findings": [_finding(results, finding) for finding in results.findings],
    }


def _finding(results: SyncReport, finding: SyncFinding) -> dict[str, Any]:
    pattern = results.pattern(finding)
    return {
        "status": "not covered" if not finding.covered else "sync" if finding.allowed is None else "allowed",
        "severity": results.severity(finding),
        "op": finding.op,
        "cause": finding.cause,
        "site": _site(finding.site),
        "via": _site(finding.via),
        "vias": [{"line": _site(via), "count": count} for via, count in finding.vias.most_common()],
        **{name: getattr(finding, name) for name in ("thread", "backward", "region")},
        "regions": [{"path": path, "count": count} for path, count in finding.regions.most_common()],
        "count": finding.count,
        "pattern": str(pattern),
        "in_steps": len(pattern.counts),
        "outside": pattern.outside,
        "per_step": results.per_step(finding),
        "step": finding.step,
        "steps": [{"number": number, "count": count} for number, count in finding.steps.items()],
        **{name: getattr(finding, name) for name in ("direction", "bytes", "blocked_ns", "timed")},
        "untimed": results.why_untimed(finding),
        **{name: getattr(finding, name) for name in ("idle_ns", "allowed", "forbidden", "fingerprint")},
        "fix": finding.fix and vars(finding.fix),
    }


def _site(site: Site | None) -> dict[str, Any] | None:
    return None if site is None else vars(site) | {"code": site.code}
