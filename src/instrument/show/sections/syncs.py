"""The page of synchronizations: each finding with its lines of code, its cost and its fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...base.findings import Site, SyncFinding
from ...base.printable import shown_lines, shown_name
from ...base.units import count, duration
from ...explain.waits.report import SyncReport
from ..page.document import document, summary_section
from ..text import syncs as texts

_AROUND = 3  # lines of code before and after


def page_of(reports: Sequence[tuple[str, SyncReport]]) -> str:
    """Return the text of the page.

    Args:
        reports: each report with what it is about: the script, the function or the trace; "" if that is not known.
    """
    alone = len(reports) == 1
    shown = [("" if alone else f"{target}: ", results) for target, results in reports]
    leads = [shown_name(prefix + texts.headline(results)) for prefix, results in shown]
    sections = [
        section | {"id": f"{section['id']}-{number}", "title": shown_name(f"{prefix}{section['title']}")}
        for number, (prefix, results) in enumerate(shown, 1)
        for section in _sections(results)
    ]
    name = reports[0][0] if alone else ""
    return document(shown_name(name or "Synchronizations"), "; ".join(leads), sections)


def _sections(results: SyncReport) -> Iterator[dict[str, Any]]:
    """Yield the summary, and a section for each kind of finding that the report has."""
    yield _summary(results)
    inside, outside = texts.inside_and_outside(results)
    groups = (
        ("findings", "Lines that wait", "", inside),
        ("outside", "Outside the steps", "A synchronization costs little there.", outside),
        ("allowed", "Allowed", "Comments, allow_sync or a file allow these.", results.allowed),
        ("not-covered", "Not covered", "This code could not be checked.", results.not_covered),
    )
    for name, title, note, findings in groups:
        if findings:
            shown = [_finding(results, finding) for finding in findings]
            yield {"id": name, "type": "sources", "title": title, "note": note, "findings": shown}


def _summary(results: SyncReport) -> dict[str, Any]:
    figures = [("lines that wait", count(len(results.syncs)))]
    if results.steps:
        figures += [
            ("synchronizations in most steps", count(results.typical(*results.syncs))),
            ("the most in a step", count(results.max_in_step(*results.syncs))),
            ("steps checked", count(results.steps)),
        ]
    blocked = [finding.blocked_ns for finding in results.syncs if finding.blocked_ns is not None]
    if blocked:
        figures.append(("time that the CPU waited", duration(sum(blocked))))
    return summary_section("Summary", figures, _notes(results))


def _notes(results: SyncReport) -> Iterator[str]:
    if results.ended is not None:
        yield texts.ended_text(results)
    yield from results.exceeded
    if results.dropped:
        yield texts.dropped_text(results)
    yield from (f"Coverage: {text}" for text in results.coverage)


def _finding(results: SyncReport, finding: SyncFinding) -> dict[str, Any]:
    site = finding.site or finding.via
    return {
        "severity": results.severity(finding),
        "place": shown_name(texts.place_text(finding)),
        "op": shown_name(finding.op),
        "cause": shown_name(finding.cause),
        "call": shown_name(texts.call_text(finding) if finding.covered else finding.cause),
        "cost": shown_name(texts.cost_text(results, finding)),
        "context": shown_name(texts.context_text(finding)),
        "allowed": None if finding.allowed is None else shown_name(finding.allowed),
        "code": _code(site) if site else [],
        "fix": finding.fix and {key: shown_lines(text) for key, text in vars(finding.fix).items()},
        "count": finding.count,
        "steps": len(results.pattern(finding).counts),
        "blocked_ns": finding.blocked_ns,
        "idle_ns": finding.idle_ns,
        "bytes": finding.bytes,
    }


def _code(site: Site) -> list[tuple[int, str, bool]]:
    """Return the lines around a line of code: number, text, and whether it is the line itself."""
    if not site.file.endswith(".py") and not site.file.startswith("<"):
        return []  # a trace may name any file of this machine, whose lines a page that is passed on must not hold
    lines = texts.source_lines(site, _AROUND)
    return [(number, shown_name(text), number == site.line) for number, text in lines.items()]
