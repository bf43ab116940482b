"""The findings on a page, each with the time in the window at which it shows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ...base.findings import Finding, Where
from ...base.printable import shown_lines, shown_name
from ...explain.diagnosis.diagnosis import Diagnosis
from ...explain.metrics.idle import CAUSES
from ...explain.rules.rule import RULES
from ...explain.rules.trace_facts import TraceFacts
from ...read.tables.table import MEMCPY, Table
from ..text.diagnosis import value_of

_AROUND = 0.02  # of a step: what is shown around a place whose length is unknown
_CAUSES_OF_RULE: dict[str, tuple[str, ...]] = {
    "driver-allocation": ("allocation",),
    "garbage-collection": ("garbage_collection",),
    "initialization": ("initialization",),
    "input-wait": ("input",),
    "launch-latency": ("launch_latency",),
    "launch-overhead": ("launch_overhead",),
    "long-synchronization": ("synchronization",),
    "low-utilization": tuple(CAUSES),
    "unexplained-idle": ("other", "unknown"),
}
"""The causes of idle time that a rule is about."""


def span_of(facts: TraceFacts, found: Finding) -> tuple[int, int] | None:
    """Return where a finding shows in the timeline: start and end in ns from the start of the window.

    It is the longest idle gap of the cause, or the longest work of the class, that the rule is about; else the
    longest kernel that it names, the call of the operator or region at the time that the rule gave, the longest
    call of the region, or the step. None if it has no place in time.
    """
    where, trace, gpu = found.where, facts.trace, facts.gpu
    if found.rule in _CAUSES_OF_RULE:
        return _longest_gap(facts, _CAUSES_OF_RULE[found.rule])
    if found.rule == "exposed-communication":
        return _longest(facts, gpu.where(facts.communication))
    if found.rule == "exposed-copies":
        return _longest(facts, gpu.where(gpu.category == MEMCPY))
    if where.kernel:
        named = np.array([text == where.kernel for text in gpu.strings])
        return _longest(facts, gpu.where(named[gpu.short_name] | named[gpu.name]))
    if found.start_ns is not None:
        return _call_at(facts, where, found.start_ns)
    if where.region:
        return _longest(facts, trace.regions.where(facts.rows(trace.regions, where.region[-1])))
    if where.step is not None:
        return _longest(facts, trace.steps.where(trace.steps.number == where.step))
    return None


def _longest_gap(facts: TraceFacts, causes: Collection[str]) -> tuple[int, int] | None:
    """Return the idle gap with the most time of these causes; None if there is none."""
    if not facts.gpu:
        return None
    times = np.sum([facts.idle.by_cause[cause] for cause in causes], axis=0)
    if not times.any():
        return None
    gap, begin = int(np.argmax(times)), facts.window[0]
    return int(facts.idle.start_ns[gap]) - begin, int(facts.idle.end_ns[gap]) - begin


def _call_at(facts: TraceFacts, where: Where, start_ns: int) -> tuple[int, int]:
    """Return the shortest call of the operator or region of a place at a time; without one, a part of the step."""
    begin, trace = facts.window[0], facts.trace
    for table, names in ((trace.operators, (where.operator,)), (trace.regions, where.region[-1:])):
        events = table.where(facts.rows(table, *names))
        at = events.where((events.start_ns - begin <= start_ns) & (events.end_ns - begin > start_ns))
        if at:
            row = int(np.argmin(at.duration_ns))
            return int(at.start_ns[row]) - begin, int(at.end_ns[row]) - begin
    around = int(_AROUND * facts.step_ns)
    return start_ns - around, start_ns + around


def _longest(facts: TraceFacts, events: Table) -> tuple[int, int] | None:
    """Return the longest of these events that begins in the window."""
    begin, end = facts.window
    events = events.where((events.start_ns >= begin) & (events.start_ns < end))
    if not events:
        return None
    row = int(np.argmax(events.duration_ns))
    return int(events.start_ns[row]) - begin, int(events.end_ns[row]) - begin


def findings_section(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the findings in order, each with its texts and figures, and the rules that abstained."""
    worth = {id(found) for found in diagnosis.worth()}
    return {
        "id": "findings",
        "type": "findings",
        "title": "Findings",
        "nothing": diagnosis.nothing_found,
        "findings": [_finding(diagnosis, found) | {"worth": id(found) in worth} for found in diagnosis.findings],
        "abstained": [[rule, shown_name(reason)] for rule, reason in diagnosis.abstained.items()],
    }


def _finding(diagnosis: Diagnosis, found: Finding) -> dict[str, Any]:
    rule = RULES.get(found.rule)
    return {
        "title": shown_name(found.title),
        "rule": found.rule,
        "meaning": (rule.function.__doc__ or "").partition("\n")[0] if rule else "",
        "severity": found.severity,
        "confidence": found.confidence,
        "win_ns": found.win_ns,
        "replayed_ns": found.replayed_ns,
        "win_text": diagnosis.win_text(found),
        "place": shown_name(str(found.where)),
        "span": span_of(diagnosis.facts, found) if diagnosis.facts else None,
        "evidence": [
            [shown_name(diagnosis.definition(each)), shown_name(value_of(each))] for each in found.evidence
        ],
        "fix": found.fix and {key: shown_lines(text) for key, text in vars(found.fix).items()},
    }
