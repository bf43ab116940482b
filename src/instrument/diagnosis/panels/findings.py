"""The findings, each with the time in the window at which it shows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ...findings import Finding
from ...page.names import shown_name
from ...traces.table import Table
from ..diagnosis_data import DiagnosisData
from ..idle_causes import CAUSES
from ..markdown import value_of
from ..rule import RULES
from ..trace_facts import TraceFacts

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


def findings_section(diagnosis: DiagnosisData) -> dict[str, Any]:
    """Return the findings in their order, with what a person reads of each, and the rules that abstained."""
    worth = {id(found) for found in diagnosis.worth()}
    return {
        "id": "findings",
        "type": "findings",
        "title": "Findings",
        "nothing": diagnosis.nothing_found,
        "findings": [_finding(diagnosis, found) | {"worth": id(found) in worth} for found in diagnosis.findings],
        "abstained": [[rule, shown_name(reason)] for rule, reason in diagnosis.abstained.items()],
    }


def _finding(diagnosis: DiagnosisData, found: Finding) -> dict[str, Any]:
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
        "fix": None if found.fix is None else vars(found.fix),
    }


def span_of(facts: TraceFacts, found: Finding) -> tuple[int, int] | None:
    """Return where a finding shows in the timeline: start and end in ns from the start of the window.

    It is the place that the rule gave; else the longest kernel, the longest call of the region, or the step that
    it names; else the longest idle gap of the cause that the rule is about. None if it has no place in time.
    """
    if found.start_ns is not None:
        around = int(_AROUND * facts.step_ns)
        return max(found.start_ns - around, 0), found.start_ns + 2 * around
    where, trace = found.where, facts.trace
    if where.kernel:
        named = np.array([text == where.kernel for text in facts.gpu.strings])
        rows = np.flatnonzero(named[facts.gpu.short_name] | named[facts.gpu.name])
        return _longest(facts, facts.gpu.where(rows))
    if where.region:
        return _longest(facts, trace.regions.where(facts.rows(trace.regions, where.region[-1])))
    if where.step is not None:
        return _longest(facts, trace.steps.where(trace.steps.number == where.step))
    return _longest_gap(facts, _CAUSES_OF_RULE.get(found.rule, ()))


def _longest_gap(facts: TraceFacts, causes: Collection[str]) -> tuple[int, int] | None:
    """Return the idle gap with the most time of these causes; None if there is none."""
    if not causes or not facts.gpu:
        return None
    times = np.sum([facts.idle.by_cause[cause] for cause in causes], axis=0)
    if not times.any():
        return None
    gap, begin = int(np.argmax(times)), facts.window[0]
    return int(facts.idle.start_ns[gap]) - begin, int(facts.idle.end_ns[gap]) - begin


def _longest(facts: TraceFacts, events: Table) -> tuple[int, int] | None:
    """Return the longest of these events that begins in the window."""
    begin, end = facts.window
    events = events.where((events.start_ns >= begin) & (events.start_ns < end))
    if not events:
        return None
    row = int(np.argmax(events.duration_ns))
    return int(events.start_ns[row]) - begin, int(events.end_ns[row]) - begin
