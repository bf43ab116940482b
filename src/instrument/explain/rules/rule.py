"""Rules: functions that read the facts of a trace and yield findings; registered, applied, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar, get_args

from ...base.config import settings
from ...base.findings import Evidence, Finding, Fix, Severity, Site, Where
from ..replay.critical_path import CLASSES
from ..replay.replay import Change
from ..replay.requests import joined
from ..replay.step_waits import parts_after
from .trace_facts import LEAST_SHARES, MissingEvidenceError, TraceFacts, Win

GROUP = "instrument.rules"
"""The group of entry points whose modules define rules."""

Function = TypeVar("Function", bound=Callable[..., Iterable[Finding]])


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        name: the name, in lower case with hyphens.
        function: takes `TraceFacts` and its thresholds as keywords, and yields findings.
        on_cpu: whether its times are measured on the CPU, where a profiler inflates them.
        gpu: whether it abstains if times of the GPU are not known.
        share: the threshold of this name: the least share of a step that a finding must win; None without one.
        of: the class of the critical path that its findings are about, which bounds what they win; or None.
    """

    name: str
    function: Callable[..., Iterable[Finding]]
    on_cpu: bool = False
    gpu: bool = False
    share: float | None = None
    of: str | None = None

    @property
    def thresholds(self) -> dict[str, Any]:
        """The thresholds with their defaults: the keyword-only parameters of the function, and ``share``."""
        parameters = inspect.signature(self.function).parameters.values()
        own = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        return own if self.share is None else own | {"share": self.share}

    def findings(self, facts: TraceFacts, changed: Mapping[str, float]) -> Iterator[tuple[Finding, bool]]:
        """Yield what the rule finds with these thresholds changed, and whether something else hides it.

        Raises:
            MissingEvidenceError: the trace lacks what it needs.
        """
        if self.gpu:
            facts.require_gpu()
        values = dict(changed)
        share = None if self.share is None else values.pop("share", self.share)
        for finding in self.function(facts, **values):
            check_finding(finding, facts.step_ns)
            finding = _at_most_on_path(facts, finding, self.of) if self.of else finding
            if share is None or facts.share(finding.win_ns or 0) >= share:
                yield finding, False
            elif facts.share(_may_win_later(facts, finding)) >= share:
                yield finding, True

    def check(self, values: Mapping[str, Any]) -> None:
        """Check thresholds that a user gives.

        Raises:
            TypeError: ``values`` is not a mapping.
            ValueError: a name that the rule does not have, or a value that is not a finite number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f'"thresholds" of the rule "{self.name}" must be a mapping to numbers: {values!r:.200}'
            )
        for name, value in values.items():
            if name not in self.thresholds:
                names = ", ".join(self.thresholds) or "none"
                raise ValueError(f'the rule "{self.name}" has no threshold {name!r}; it has: {names}')
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(
                    f'the threshold "{name}" of the rule "{self.name}" must be a finite number: {value!r}'
                )


RULES: dict[str, Rule] = {}
"""The rules by name, in order of definition."""


def rule(
    name: str, *, on_cpu: bool = False, gpu: bool = False, share: float | None = None, of: str | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as a rule.

    The function takes a `TraceFacts`, and thresholds as keyword-only arguments with defaults; it yields findings.
    It raises `MissingEvidenceError` if the trace lacks what it needs. What raises another error, or yields what is
    not a finding, is listed in `Diagnosis.failed`. A later rule of the same name replaces the earlier one;
    `Diagnosis.replaced` lists the rules of the library that were replaced.

    Args:
        name: the name of the rule, in lower case with hyphens.
        on_cpu: whether its times are measured on the CPU, where a profiler inflates them.
        gpu: whether it abstains if times of the GPU are not known.
        share: a threshold: findings that win a smaller share of a step are left out.
        of: the class of the critical path that the findings are about, such as "copies"; see
            `instrument.explain.replay.critical_path.CLASSES`. What they win more than it has on the path must come
            from other classes, which they name.

    Example:
        >>> @rule("many-fills")
        ... def many_fills(facts, *, most=100):
        ...     fills = facts.rows(facts.trace.operators, "aten::fill_")
        ...     if len(fills) > most * facts.steps:
        ...         number = Evidence("fills", len(fills) / facts.steps, "events", "Fills per step.")
        ...         yield facts.finding("Tensors are filled again and again", win_ns=None, evidence=[number])

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: ``name`` is not in lower case with hyphens, or ``of`` is not a class of the critical path.
    """
    if not isinstance(name, str):
        raise TypeError(f'"name" must be a string: {name!r}')
    if not name.replace("-", "").isalnum() or name != name.lower():
        raise ValueError(f'"name" must be in lower case with hyphens: {name!r}')
    if of is not None and of not in CLASSES:
        raise ValueError(f'"of" must be one of {", ".join(CLASSES)}: {of!r}')

    def register(function: Function) -> Function:
        RULES[name] = Rule(name, function, on_cpu, gpu, share, of)
        return function

    return register


def load_rules() -> Iterator[tuple[str, BaseException]]:
    """Import the modules of the entry points of `GROUP`, once each; yield those that fail."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (Exception, SystemExit) as error:  # somebody else's module must not stop a diagnosis
            yield point.name, error


_STRETCHED = 1.3  # times as long as outside the window: times on the CPU are inflated
_SEVERITIES = get_args(Severity)
_WORTH = 0.01  # of a step, to be replayed
_ROUNDED = 1.001  # a win may exceed the step by this factor


class Applied(NamedTuple):
    """What rules found in the facts of a trace.

    Attributes:
        findings: the findings by time to win; an unknown time counts as the least of the severity.
        hidden: those that win less than their rule asks for because something else takes longer, by the time that
            they may win later.
        abstained: the rules that abstained, each with the reason.
        failed: those that failed; what a rule found before it failed counts.
    """

    findings: tuple[Finding, ...]
    hidden: tuple[Finding, ...]
    abstained: dict[str, str]
    failed: dict[str, str]


def apply_rules(
    facts: TraceFacts,
    rules: Collection[Rule],
    thresholds: Mapping[str, Mapping[str, float]],
    *,
    what_if: bool = True,
) -> Applied:
    """Return what rules find.

    Args:
        facts: the facts.
        rules: the rules.
        thresholds: the thresholds to change, by rule.
        what_if: whether the steps are replayed without the cause of each finding worth more than 1 % of a step.
    """
    abstained, failed = dict[str, str](), dict[str, str]()
    made: list[tuple[Rule, Finding, bool]] = []
    for by in rules:
        try:
            made.extend((by, *found) for found in by.findings(facts, thresholds.get(by.name, {})))
        except MissingEvidenceError as reason:
            abstained[by.name] = str(reason)
        except (Exception, SystemExit) as error:  # one rule must not hide what the others found
            if settings.strict:
                raise
            failed[by.name] = repr(error)
    located = facts.located([finding for _, finding, _ in made])
    finished = [
        (hidden, _finished(facts, by, finding, facts.win_of(as_made), replayed=what_if and not hidden))
        for (by, as_made, hidden), finding in zip(made, located, strict=True)
    ]
    seen, unseen = ([finding for hidden, finding in finished if hidden is which] for which in (False, True))
    by_time = sorted(unseen, key=lambda finding: -(finding.hidden_ns or 0))
    return Applied(tuple(sorted(seen, key=partial(_order, facts.step_ns))), tuple(by_time), abstained, failed)


def _at_most_on_path(facts: TraceFacts, finding: Finding, of: str) -> Finding:
    """Return a finding that no replay shows with no more to win than its class has on the critical path."""
    waits = facts.step_waits
    if waits is None or finding.win_ns is None or facts.win_of(finding) is not None:
        return finding
    if finding.win_ns <= waits.parts[of]:
        return finding
    return replace(facts.with_win(finding, waits.parts[of]), hidden_ns=finding.win_ns)


def _may_win_later(facts: TraceFacts, finding: Finding) -> float:
    """Return what a finding may win in ns once something else no longer takes longer."""
    win = facts.win_of(finding)
    return finding.hidden_ns or 0 if win is None else win.hidden_ns


def _also_shorter(
    facts: TraceFacts, before: Mapping[str, int], win: Win, replayed_ns: int, of: str
) -> tuple[str, ...]:
    """Return what a change also shortens, where its class alone has less on the critical path than it wins.

    Those are, in the replay without it, the other classes that become shorter, the one that does most first, until
    they explain what it wins.
    """
    if replayed_ns <= before[of]:
        return ()
    after, most, also = parts_after(facts.replayer, win.change()), before[of], list[str]()
    for name in sorted((name for name in before if name != of), key=lambda name: after[name] - before[name]):
        if most < replayed_ns:
            also.append(name)
            most += before[name]
    return tuple(also)


def fix_of(facts: TraceFacts, name: str) -> Change:
    """Return the removal of all that a rule finds with its own thresholds, hidden or not.

    Raises:
        ValueError: the rule does not exist or fails, or a replay cannot show the removal of its findings.
    """
    if name not in RULES:
        list(load_rules())  # it may be a user's
    if name not in RULES:
        raise ValueError(f'"fix" must hold names of rules, which docs/rules.md lists: {name!r:.200}')
    try:
        wins = [facts.win_of(finding) for finding, _ in RULES[name].findings(facts, {})]
    except MissingEvidenceError as reason:
        raise ValueError(f"the rule {name!r} abstains: {reason}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"the rule {name!r} failed: {error!r}") from error
    changes = [win.change() for win in wins if win is not None]
    if not changes:
        raise ValueError(f"the rule {name!r} finds nothing that a replay can remove")
    return joined(changes)


def _order(step_ns: float, finding: Finding) -> tuple[float, int, float, str]:
    """Return what findings are sorted by: their win or, if that is unknown, the least of their severity."""
    severity, win_ns = _SEVERITIES.index(finding.severity), finding.likely_win_ns
    win = LEAST_SHARES[finding.severity] * step_ns if win_ns is None else win_ns
    return -win, severity, -(finding.win_bytes or 0), finding.rule


def check_finding(finding: Any, step_ns: float) -> None:
    """Check what a rule, perhaps a user's, has yielded.

    Raises:
        TypeError: it is not a finding, or one of its fields has another type.
        ValueError: a number is negative, infinite, or more than the step; or a word is not one of the known.
    """
    if not isinstance(finding, Finding):
        raise TypeError(f"a rule must yield findings, such as facts.finding(...) returns: {finding!r:.200}")
    if not isinstance(finding.title, str) or not finding.title:
        raise TypeError(f'"title" must be a sentence: {finding.title!r}')
    for name in ("severity", "confidence"):
        if getattr(finding, name) not in _SEVERITIES:
            raise ValueError(f'"{name}" must be "high", "medium" or "low": {getattr(finding, name)!r}')
    for name, most in (("win_ns", step_ns * _ROUNDED + 1), ("win_bytes", math.inf), ("coverage", _ROUNDED)):
        if getattr(finding, name) is not None:
            _check_number(name, getattr(finding, name), most=most)
    if not (finding.fix is None or isinstance(finding.fix, Fix)):
        raise TypeError(f'"fix" must be a Fix or None: {finding.fix!r:.200}')
    if not isinstance(finding.where, Where) or not _is_place(finding.where):
        raise TypeError(f'"where" must be a Where with fields of its types: {finding.where!r:.200}')
    if not isinstance(finding.evidence, tuple):
        raise TypeError(f'"evidence" must be a tuple: {finding.evidence!r:.200}')
    for each in finding.evidence:
        if not isinstance(each, Evidence):
            raise TypeError(f'"evidence" must hold instances of Evidence: {each!r:.200}')
        if not (each.value is None or isinstance(each.value, str)):
            _check_number(f"evidence {each.name}", each.value, least=-math.inf)


def _is_place(where: Where) -> bool:
    return (
        isinstance(where.region, tuple)
        and all(isinstance(name, str) for name in (*where.region, where.module, where.operator, where.kernel))
        and all(number is None or isinstance(number, int) for number in (where.step, where.rank))
        and (where.site is None or isinstance(where.site, Site))
    )


def _check_number(name: str, value: Any, least: float = 0, most: float = math.inf) -> None:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f'"{name}" must be a number: {value!r:.200}')
    if not math.isfinite(value) or not least <= value <= most:
        accepted = "finite" if math.isinf(most) else f"from {least:g} to {most:,.0f}"
        raise ValueError(f'"{name}" must be {accepted}: {value!r}')


def _finished(facts: TraceFacts, by: Rule, finding: Finding, win: Win | None, *, replayed: bool) -> Finding:
    """Return a finding with the name of its rule, with what a replay wins, and with a note on inflated times."""
    finding = replace(finding, rule=by.name)
    if win is not None:
        waits = facts.step_waits
        exceeds = by.of is not None and waits is not None and win > waits.parts[by.of]
        worth = replayed and (exceeds or facts.share(win) > _WORTH)
        replayed_ns = facts.replayed_ns(win) if worth else finding.replayed_ns
        hidden_ns = win.hidden_ns if win.hidden_ns > win else None
        words = win.words or f"--fix {by.name}"
        if replayed_ns is not None and replayed_ns > win:  # the time that the GPU idles does not show all
            finding = facts.with_win(finding, replayed_ns)
        finding = replace(finding, replayed_ns=replayed_ns, change=words, hidden_ns=hidden_ns)
        if exceeds and worth and replayed_ns is None and waits is not None and by.of is not None:
            finding = facts.with_win(finding, waits.parts[by.of])  # as of what no replay shows
        elif by.of is not None and waits is not None and replayed_ns is not None:
            finding = replace(finding, also=_also_shorter(facts, waits.parts, win, replayed_ns, by.of))
    stretch = facts.stretch
    if not by.on_cpu or stretch is None or not stretch.differs or stretch.ratio <= _STRETCHED:
        return finding
    inflated = Evidence(
        "stretch", stretch.ratio, "1", "Times on the CPU are inflated: step in the window / step outside."
    )
    title = f"{finding.title} (inflated: recording made steps {stretch:.2f} times as long)"
    return replace(finding, title=title, evidence=(*finding.evidence, inflated), confidence="low")
