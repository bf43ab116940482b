"""Renders a diagnosis as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..findings import Evidence, Finding
from ..printable import printable
from ..units import count, duration
from .diagnosis_data import DiagnosisData

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def to_markdown(diagnosis: DiagnosisData) -> str:
    """Return the verdict, the parts of the step and the findings as Markdown."""
    return "\n".join(_lines(diagnosis)) + "\n"


def _lines(diagnosis: DiagnosisData) -> Iterator[str]:
    yield f"**{_escaped(diagnosis.verdict)}**"
    yield ""
    if diagnosis.parts:
        yield f"| part of the {'step' if diagnosis.has_steps else 'window'} | time | share |"
        yield "|---|--:|--:|"
        for name, ns in diagnosis.parts.items():
            if ns:
                yield f"| {name} | {duration(ns)} | {100 * ns / diagnosis.step_ns:.1f} % |"
        yield ""
    if diagnosis.memory_text:
        yield _escaped(diagnosis.memory_text)
        yield ""
    worth = diagnosis.worth()
    for number, found in enumerate(worth, 1):
        yield from _finding(number, found, diagnosis)
    if not worth:
        yield _escaped(diagnosis.nothing_found)
        yield ""
    if diagnosis.abstained:
        yield f"<sub>{len(diagnosis.abstained)} rules abstained for lack of evidence.</sub>"


def _finding(number: int, found: Finding, diagnosis: DiagnosisData) -> Iterator[str]:
    yield f"### {number}. {_escaped(found.title)}"
    yield ""
    place = str(found.where)
    yield f"`{found.rule}`, {found.severity}, confidence {found.confidence}" + (
        f"; at {_escaped(place)}" if place else ""
    )
    yield ""
    yield f"- To win: {_escaped(diagnosis.win_text(found))}"
    for each in found.evidence:
        yield f"- {_escaped(diagnosis.definition(each))}: {_escaped(value_of(each))}"
    if found.fix:
        yield ""
        yield _escaped(found.fix.text)
        if found.fix.after:
            before = [f"- {line}" for line in found.fix.before.splitlines()]
            after = [f"+ {line}" for line in found.fix.after.splitlines()]
            yield "\n".join(["```diff", *before, *after, "```"])
    yield ""


def value_of(evidence: Evidence) -> str:
    """Return the value with its unit, for people."""
    value = evidence.value
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if evidence.unit == "ns":
        return duration(value)
    if evidence.unit == "1":
        return f"{value:.2f}"
    if evidence.unit == "bytes/s":
        return f"{value / 1e9:,.1f} GB/s"
    if evidence.unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{count(value)} {evidence.unit}".removesuffix(" events")


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\n", " ")
