"""The page of a comparison: the verdict, the steps of both sides, the parts of the difference, the findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...base.findings import Finding
from ...base.printable import shown_name
from ...base.units import duration, signed_duration
from ...explain.comparison.comparison import Comparison, Part, change_text, details, headline
from ...explain.comparison.step_parts import KINDS
from ..page.document import (
    WaterfallWords,
    document,
    samples_section,
    summary_section,
    table_section,
    waterfall_section,
)
from .diagnosis import BUSY_WORDS

_CLASSES = {"unassigned": "other", "cpu": "operator"}
"""The class, and so the color, of a kind of part; of all others, the kind itself."""

_WORDS = BUSY_WORDS | {"latency": "idle: launch latency", "cpu": "CPU"}
"""The words for a kind of part; of all others, "idle: " and the kind."""


def page_of(change: Comparison) -> str:
    """Return the text of the page."""
    before, after = (Path(each.path).name for each in (change.before, change.after))
    return document(
        shown_name(f"{before} → {after}"),
        shown_name(headline(change)),
        [_summary(change), _steps(change), _parts(change), _findings(change)],
    )


def _summary(change: Comparison) -> dict[str, Any]:
    what = "step" if change.have_steps else "trace"
    figures = [
        (f"{what} before", duration(change.before_ns)),
        (f"{what} after", duration(change.after_ns)),
        ("difference", signed_duration(change.delta_ns)),
        ("relative", change_text(change)),
    ]
    if change.p_value is not None and change.detectable is not None:
        figures += [("p-value", f"{change.p_value:.4f}"), ("detectable", f"{100 * change.detectable:.1f} %")]
    nothing = () if any(change.findings().values()) else ("No finding differs.",)
    return summary_section("Verdict", figures, (*details(change), *_recordings(change), *nothing))


def _recordings(change: Comparison) -> Iterator[str]:
    for name, diagnosis in (("Before", change.before), ("After", change.after)):
        rank = "" if diagnosis.rank is None else f", rank {diagnosis.rank}"
        yield f"{name}: {diagnosis.path}{rank}. {diagnosis.verdict}"


def _steps(change: Comparison) -> dict[str, Any] | None:
    if not change.have_steps:
        return None
    medians = (change.before_ns, change.after_ns)
    sides = zip(("before", "after"), change.lengths_ns, medians, strict=True)
    return samples_section("The steps", list(sides), detectable=change.detectable if change.before_ns else None)


def _parts(change: Comparison) -> dict[str, Any]:
    words = WaterfallWords(
        "ns",
        "calls",
        "The parts of the two median steps; the differences add up",
        {"Kind": "", "Region": "outside regions", "Operator": "no operator", "Kernel": "no kernel"},
        [[0, 1, 2, 3], [1, 0, 2, 3]],
        {kind: _kind(kind, text) for kind, text in KINDS.items()},
    )
    return waterfall_section(words, [_part(part) for part in change.parts])


def _kind(kind: str, definition: str) -> dict[str, str]:
    words = _WORDS.get(kind, f"idle: {kind}")
    return {"class": _CLASSES.get(kind, kind), "words": words, "definition": definition}


def _part(part: Part) -> list[Any]:
    names = (shown_name(" > ".join(part.region)), shown_name(part.operator), shown_name(part.kernel))
    return [part.kind, *names, part.before_ns, part.after_ns, part.before_calls, part.after_calls]


def _findings(change: Comparison) -> dict[str, Any] | None:
    columns = {
        "Change": "text", "Finding": "text", "To win": "ns", "Rule": "text", "Place": "text", "Fix": "text",
    }  # fmt: skip
    rows = [_finding(name, finding) for name, findings in change.findings().items() for finding in findings]
    caption = "What became of each finding, with the time per step that it would win on the side that shows it"
    return table_section("findings", "Findings that differ", caption, columns, rows)


def _finding(change: str, finding: Finding) -> list[Any]:
    texts = (finding.rule, str(finding.where), finding.fix.text if finding.fix else "")
    return [change.replace("_", " "), shown_name(finding.title), finding.likely_win_ns, *map(shown_name, texts)]
