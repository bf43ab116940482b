"""Compares a slim trace with the trace that it was made from: metrics, verdict and findings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..diagnosis.diagnose import Diagnosis
from ..diagnosis.metrics import Metrics
from ..diagnosis.serialize import as_dict, plain

_ELSEWHERE = {"metrics", "findings", "path", "source", "left_out", "definitions", "version"}
_SITE = "site"  # its line is known where the source of the named file is
_WORDS = {"rule", "severity", "confidence"}  # keys of a finding whose texts are no names of the trace


def differences(before: Diagnosis, after: Diagnosis, *, numbers_only: bool = False) -> tuple[str, ...]:
    """Return what differs between two diagnoses: metrics, findings and other parts, each in words.

    Metrics are compared with their windows and coverage, findings with rule, place, evidence, time to win and
    replayed time.

    Args:
        before: the diagnosis of the trace.
        after: the diagnosis of the slim trace.
        numbers_only: whether names, and the order of rows that follows from names, may differ.
    """
    one, two = as_dict(before), as_dict(after)
    metrics = before.metrics, after.metrics
    pairs = {f"metric {name}": (_metric(metrics[0], name), _metric(metrics[1], name)) for name in metrics[0]}
    pairs |= {name: (one[name], two[name]) for name in one if name not in _ELSEWHERE}
    strip = _without_names if numbers_only else lambda value: value
    found = [name for name, values in pairs.items() if _text(strip(values[0])) != _text(strip(values[1]))]
    return (*found, *_findings(*([_text(strip(found)) for found in each["findings"]] for each in (one, two))))


def _findings(before: list[str], after: list[str]) -> list[str]:
    count = Counter(before)
    count.subtract(after)
    changed = [(json.loads(text)["rule"], more) for text, more in count.items() if more]
    found = [f"finding {rule}" if more > 0 else f"new finding {rule}" for rule, more in changed]
    return found or ["order of the findings"] * (before != after)


def _metric(metrics: Metrics, name: str) -> Any:
    return [metrics[name], metrics.about(name)]


def _without_names(value: Any) -> Any:
    """Return a value without texts and lines, with lists of rows in an order that does not follow from names."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key in _WORDS}
        sites = {key: each is not None for key, each in value.items() if key == _SITE}
        return {key: _without_names(each) for key, each in value.items()} | kept | sites
    if isinstance(value, (list, tuple)):
        parts = [_without_names(each) for each in value]
        return sorted(parts, key=_text) if all(isinstance(each, dict) for each in parts) else parts
    return "" if isinstance(value, str) else value


def _text(value: Any) -> str:
    return json.dumps(value, default=plain, sort_keys=True)
