"""Prints what a change did, as a comparison of two recordings, and what one would do, as a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.units import counted, duration, signed_duration
from ...explain.comparison.comparison import CHANGES, Comparison, Part, details, headline
from ...explain.replay.critical_path import CriticalPath
from ...explain.replay.what_if import WhatIf
from ..text.lines import line
from .console import Block, Table

_MAX_PARTS = 12  # of a difference
_MAX_ROWS = 10  # of a critical path
_WORTH = 0.01  # of the difference: smaller parts are not shown


def comparison_report(change: Comparison) -> Iterator[Block]:
    """Yield the verdict, the parts of the difference, and the findings that differ."""
    yield headline(change)
    yield from details(change)
    for name, side in (("before", change.before), ("after", change.after)):
        if side.source:
            yield f"Compared, {name}: {side.source}."
    if change.delta_ns:
        yield from _parts(change)
    for name, findings in change.findings().items():
        if findings:
            yield line()
            yield CHANGES[name]
            yield from (f"- {each.title} ({each.rule})" for each in findings)


def _parts(change: Comparison) -> Iterator[Block]:
    kinds = [[kind, signed_duration(ns)] for kind, ns in change.by_kind().items() if ns]
    yield line()
    yield Table([f"{signed_duration(change.delta_ns)} between the median steps", "difference"], kinds)
    least = _WORTH * abs(change.delta_ns)
    worth = [part for part in change.parts if part.ns and abs(part.ns) >= least][:_MAX_PARTS]
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


def what_if_report(guess: WhatIf) -> Iterator[Block]:
    """Yield the predicted step, the error of the replay, and the critical path."""
    yield str(guess)
    if guess.self_error is not None and guess.max_error is not None:
        error = f"{100 * guess.self_error:.2f} % (median of {counted(guess.steps, 'step')})"
        yield f"Error of the replay without a change: {error}, at most {100 * guess.max_error:.2f} %."
    if guess.critical_path and guess.step_ns is not None:
        what = "a step (mean)" if guess.has_steps else "the recording"
        yield from _path(guess.critical_path, guess.steps, guess.step_ns, what)


def _path(path: CriticalPath, steps: int, step_ns: int, what: str) -> Iterator[Block]:
    """Yield the critical path by class and region as parts of a step, and the work off it with its slack."""
    regions = [
        (f"{kind}: {' > '.join(region) or 'outside regions'}", ns)
        for (region, kind), ns in list(path.by_region().items())[:_MAX_ROWS]
    ]
    for title, parts in (
        (f"critical path of {what}", path.by_class().items()),
        ("its longest parts by region", regions),
    ):
        shares = [(name, ns / max(path.total_ns, 1)) for name, ns in parts]
        rows = [[name, duration(share * step_ns), f"{100 * share:.1f} %"] for name, share in shares]
        yield line()
        yield Table([title, "time", "share"], rows)
    off = [
        [work.name, duration(work.duration_ns / steps), duration(work.slack_ns)]
        for work in path.off_path[:_MAX_ROWS]
    ]
    if off:
        yield line()
        yield Table(["work that is never on it", "time", "slack"], off)
        yield line("Slack is the least time by which such work could end later without longer steps.")
