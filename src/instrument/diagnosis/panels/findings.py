"""The findings, each with the time in the window at which it shows."""

from __future__ import annotations

from typing import Any

from ...findings import Finding
from ...page.names import shown_lines, shown_name
from ..diagnosis_data import DiagnosisData
from ..markdown import value_of
from ..rule import RULES
from .spans import span_of


def findings_section(diagnosis: DiagnosisData) -> dict[str, Any]:
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
        "fix": found.fix and {key: shown_lines(text) for key, text in vars(found.fix).items()},
    }
