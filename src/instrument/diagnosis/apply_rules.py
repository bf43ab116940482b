"""Applies the rules to the facts of a trace, and checks what they yield."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

from ..config import settings
from ..findings import Evidence, Finding, Fix, Severity, Site, Where
from .rule import Rule
from .trace_facts import MissingEvidenceError, TraceFacts
from .wins import Win

_STRETCHED = 1.3  # times as long as outside the window: times on the CPU are inflated
_SEVERITIES = get_args(Severity)
_WORTH = 0.01  # of a step, to be replayed
_ROUNDED = 1.001  # a win may exceed the step by this factor


def apply_rules(
    facts: TraceFacts,
    rules: Collection[Rule],
    thresholds: Mapping[str, Mapping[str, float]],
    *,
    what_if: bool = True,
) -> tuple[tuple[Finding, ...], dict[str, str], dict[str, str]]:
    """Return the findings by time to win, the rules that abstained, and those that failed, each with the reason.

    What a rule found before it failed counts.

    Args:
        facts: the facts.
        rules: the rules.
        thresholds: the thresholds to change, by rule.
        what_if: whether the steps are replayed without the cause of each finding worth more than 1 % of a step.
    """
    abstained, failed = dict[str, str](), dict[str, str]()
    found: list[tuple[Rule, Finding]] = []
    for each_rule in rules:
        try:
            for each in each_rule.function(facts, **thresholds.get(each_rule.name, {})):
                check_finding(each, facts.step_ns)
                found.append((each_rule, each))
        except MissingEvidenceError as reason:
            abstained[each_rule.name] = str(reason)
        except (Exception, SystemExit) as error:  # one rule must not hide what the others found
            if settings.strict:
                raise
            failed[each_rule.name] = repr(error)
    wins = [facts.win_of(each) for _, each in found]
    located = facts.located([each for _, each in found])
    findings = [_finished(facts, by, each) for (by, _), each in zip(found, located, strict=True)]
    if what_if:
        findings = [_replayed(facts, each, win) for each, win in zip(findings, wins, strict=True)]
    findings.sort(key=_order)
    return tuple(findings), abstained, failed


def _order(found: Finding) -> tuple[float, int, float, str]:
    return (
        -(found.likely_win_ns or 0),
        _SEVERITIES.index(found.severity),
        -(found.win_bytes or 0),
        found.rule,
    )


def check_finding(found: Any, step_ns: float) -> None:
    """Check what a rule, perhaps a user's, has yielded.

    Raises:
        TypeError: it is not a finding, or one of its fields has another type.
        ValueError: a number is negative, infinite, or more than the step; or a word is not one of the known.
    """
    if not isinstance(found, Finding):
        raise TypeError(f"a rule must yield findings, such as facts.finding(...) returns: {found!r:.200}")
    if not isinstance(found.title, str) or not found.title:
        raise TypeError(f'"title" must be a sentence: {found.title!r}')
    for name in ("severity", "confidence"):
        if getattr(found, name) not in _SEVERITIES:
            raise ValueError(f'"{name}" must be "high", "medium" or "low": {getattr(found, name)!r}')
    if found.win_ns is not None:
        _check_number("win_ns", found.win_ns, most=step_ns * _ROUNDED + 1)
    if found.win_bytes is not None:
        _check_number("win_bytes", found.win_bytes)
    if found.coverage is not None:
        _check_number("coverage", found.coverage, most=_ROUNDED)
    if not (found.fix is None or isinstance(found.fix, Fix)):
        raise TypeError(f'"fix" must be a Fix or None: {found.fix!r:.200}')
    if not isinstance(found.where, Where) or not _is_place(found.where):
        raise TypeError(f'"where" must be a Where with fields of its types: {found.where!r:.200}')
    if not isinstance(found.evidence, tuple):
        raise TypeError(f'"evidence" must be a tuple: {found.evidence!r:.200}')
    for each in found.evidence:
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


def _finished(facts: TraceFacts, by: Rule, found: Finding) -> Finding:
    """Return a finding with the name of its rule and, if it rests on inflated times, a statement of that."""
    found = replace(found, rule=by.name)
    stretch = facts.stretch
    if not by.on_cpu or stretch is None or not stretch.differs or stretch.ratio <= _STRETCHED:
        return found
    inflated = Evidence(
        "stretch", stretch.ratio, "1", "Times on the CPU are inflated: step in the window / step outside."
    )
    title = f"{found.title} (inflated: recording made steps {stretch:.2f} times as long)"
    return replace(found, title=title, evidence=(*found.evidence, inflated), confidence="low")


def _replayed(facts: TraceFacts, found: Finding, win: Win | None) -> Finding:
    """Return a finding with the time that a replay without its cause wins, if it may be worth more than 1 %."""
    if win is None or facts.share(win) <= _WORTH:
        return found
    return replace(found, replayed_ns=facts.replayed_ns(win))
