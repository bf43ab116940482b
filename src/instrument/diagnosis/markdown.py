"""Renders a diagnosis as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..findings import Evidence, Finding
from ..printable import printable
from ..units import count, counted, duration
from .diagnosis_data import DiagnosisData

_MEGABYTE = 1e5  # from which sizes are given in MB
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def to_markdown(diagnosis: DiagnosisData) -> str:
    """Return what the terminal shows, with all evidence, as Markdown."""
    return "\n".join(_lines(diagnosis)) + "\n"


def _lines(diagnosis: DiagnosisData) -> Iterator[str]:
    if diagnosis.opened_text:
        yield _escaped(diagnosis.opened_text)
        yield ""
    yield f"**{_escaped(diagnosis.verdict)}**"
    yield ""
    if diagnosis.parts:
        yield f"| part of the {'step' if diagnosis.has_steps else 'window'} | time | share |"
        yield "|---|--:|--:|"
        for name, ns in diagnosis.parts.items():
            if ns:
                yield f"| {name} | {duration(ns)} | {100 * ns / diagnosis.step_ns:.1f} % |"
        yield ""
    texts = [diagnosis.coverage_text] if diagnosis.parts else []
    for text in (*texts, *diagnosis.source_texts, diagnosis.mfu_text, diagnosis.memory_text):
        if text:
            yield _escaped(text)
            yield ""
    worth = diagnosis.worth()
    for number, found in enumerate(worth, 1):
        yield from _finding(number, found, diagnosis)
    if not worth:
        yield _escaped(diagnosis.nothing_found)
        yield ""
    yield from _regions(diagnosis)
    yield from _gaps(diagnosis)
    if diagnosis.abstained:
        yield f"<sub>{counted(len(diagnosis.abstained), 'rule')} abstained for lack of evidence.</sub>"
    for text in diagnosis.rules_texts:
        yield f"<sub>{_escaped(text)}</sub>"


def _regions(diagnosis: DiagnosisData) -> Iterator[str]:
    if not diagnosis.regions:
        return
    gpu = diagnosis.has_gpu
    yield f"| longest regions, {diagnosis.each_step} | CPU |" + " GPU |" * gpu
    yield "|---|--:|" + "--:|" * gpu
    for name, cpu_ns, gpu_ns in diagnosis.longest_regions:
        yield f"| {_escaped(name)} | {duration(cpu_ns)} |" + f" {duration(gpu_ns)} |" * gpu
    yield ""
    if diagnosis.regions_note:
        yield _escaped(diagnosis.regions_note)
        yield ""


def _gaps(diagnosis: DiagnosisData) -> Iterator[str]:
    if shown := diagnosis.longest_gaps:
        yield "Longest idle gaps: length, start in the window, and cause"
        yield ""
        yield from (f"- {_escaped(text)}" for text in shown)
        yield ""


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
        return _bytes(value)
    return f"{count(value)} {evidence.unit}".removesuffix(" events")


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if not 0 < value < _MEGABYTE else f"{count(round(value))} bytes"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\n", " ")
