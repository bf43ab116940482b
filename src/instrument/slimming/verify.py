"""Compares a slim trace with the trace that it was made from: metrics, verdict and findings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..diagnosis.diagnose import Diagnosis
from ..diagnosis.metrics import Metrics
from ..diagnosis.serialize import as_dict, plain

_ELSEWHERE = {"metrics", "findings", "path", "source", "left_out", "definitions", "version"}


def differences(before: Diagnosis, after: Diagnosis) -> tuple[str, ...]:
    """Return what differs between two diagnoses: metrics, findings and other parts, each in words.

    Metrics are compared with their windows and coverage, findings with rule, place, evidence, time to win and
    replayed time.
    """
    found = [
        f"metric {name}"
        for name in before.metrics
        if _metric(before.metrics, name) != _metric(after.metrics, name)
    ]
    one, two = as_dict(before), as_dict(after)
    parts = [name for name in one if name not in _ELSEWHERE and _text(one[name]) != _text(two[name])]
    missing = Counter(map(_text, one["findings"]))
    missing.subtract(map(_text, two["findings"]))
    for text, count in missing.items():
        if count:
            rule, which = json.loads(text)["rule"], "" if count > 0 else "new "
            found.append(f"{which}finding {rule}")
    if not any(missing.values()) and list(map(_text, one["findings"])) != list(map(_text, two["findings"])):
        found.append("the order of the findings")
    return tuple(dict.fromkeys([*found, *parts]))


def _metric(metrics: Metrics, name: str) -> str:
    return _text([metrics[name], metrics.about(name)])


def _text(value: Any) -> str:
    return json.dumps(value, default=plain, sort_keys=True)
