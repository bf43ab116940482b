"""Prints a comparison of two recordings."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.units import counted, duration, signed_duration
from ...explain.comparison.comparison import Comparison, Part, details, headline
from ..text.lines import line
from .console import Block, Table

_MAX_ROWS = 12
_WORTH = 0.01  # of the difference: smaller parts are not shown


def comparison_report(change: Comparison) -> Iterator[Block]:
    """Yield the verdict, the parts of the difference, and the findings that are gone and new."""
    yield headline(change)
    yield from details(change)
    if change.delta_ns:
        yield from _parts(change)
    for title, findings in (("Findings that are gone:", change.gone), ("New findings:", change.new)):
        if findings:
            yield line()
            yield title
            yield from (f"- {each.title} ({each.rule})" for each in findings)


def _parts(change: Comparison) -> Iterator[Block]:
    kinds = [[kind, signed_duration(ns)] for kind, ns in change.by_kind().items() if ns]
    yield line()
    yield Table([f"{signed_duration(change.delta_ns)} between the median steps", "difference"], kinds)
    least = _WORTH * abs(change.delta_ns)
    worth = [part for part in change.parts if part.ns and abs(part.ns) >= least][:_MAX_ROWS]
    rows = [
        [_name(part), duration(part.before_ns), duration(part.after_ns), signed_duration(part.ns), _calls(part)]
        for part in worth
    ]
    yield line()
    yield Table(["largest parts", "before", "after", "difference", "calls"], rows)
    rest = signed_duration(change.delta_ns - sum(part.ns for part in worth))
    if hidden := sum(1 for part in change.parts if part.ns) - len(worth):
        yield f"{counted(hidden, 'other part')}: {rest} together; see --json."


def _name(part: Part) -> str:
    names = [part.kernel, part.operator, " > ".join(part.region)]
    return f"{part.kind}: " + (", ".join(name for name in names if name) or "outside regions")


def _calls(part: Part) -> str:
    """Return how often GPU work is launched on each side."""
    if not part.kernel:
        return ""
    if part.change != "changed":
        return f"{part.change} ({max(part.before_calls, part.after_calls):,})"
    same = part.before_calls == part.after_calls
    return f"{part.after_calls:,}" if same else f"{part.before_calls:,} to {part.after_calls:,}"
