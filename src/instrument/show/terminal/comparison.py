"""Prints a comparison of two recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.units import counted, duration
from ...explain.comparison.comparison_data import ComparisonData, Part, details, headline
from .console import print_table, print_wrapped

if TYPE_CHECKING:
    from rich.console import Console

_MAX_ROWS = 12
_WORTH = 0.01  # of the difference: smaller parts are not shown


def print_comparison(change: ComparisonData, *, console: Console) -> None:
    """Print the verdict, the parts of the difference, and the findings that are gone and new."""
    print_wrapped(console, headline(change))
    for line in details(change):
        print_wrapped(console, line)
    if change.delta_ns:
        _print_parts(change, console)
    for title, findings in (("Findings that are gone:", change.gone), ("New findings:", change.new)):
        if findings:
            console.print()
            print_wrapped(console, title)
            for each in findings:
                print_wrapped(console, f"- {each.title} ({each.rule})")


def _print_parts(change: ComparisonData, console: Console) -> None:
    kinds = [(0, kind, [_signed(ns)]) for kind, ns in change.by_kind().items() if ns]
    console.print()
    print_table([f"{_signed(change.delta_ns)} between the median steps", "difference"], kinds, console)
    least = _WORTH * abs(change.delta_ns)
    worth = [part for part in change.parts if part.ns and abs(part.ns) >= least][:_MAX_ROWS]
    rows = [
        (0, _name(part), [duration(part.before_ns), duration(part.after_ns), _signed(part.ns), _calls(part)])
        for part in worth
    ]
    console.print()
    print_table(["largest parts", "before", "after", "difference", "calls"], rows, console)
    shown = sum(part.ns for part in worth)
    if hidden := sum(1 for part in change.parts if part.ns) - len(worth):
        print_wrapped(
            console, f"{counted(hidden, 'other part')}: {_signed(change.delta_ns - shown)} together; see --json."
        )


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


def _signed(ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"
