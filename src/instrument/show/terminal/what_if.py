"""Prints a prediction and the critical path."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.units import counted, duration
from ...explain.replay.critical_path import CriticalPath
from ...explain.replay.what_if import WhatIf
from ..text.lines import line
from .console import Block, Table

_MAX_ROWS = 10


def what_if_report(guess: WhatIf) -> Iterator[Block]:
    """Yield the predicted step, the error of the replay, and the critical path."""
    yield str(guess)
    if guess.self_error is not None and guess.max_error is not None:
        error = f"{100 * guess.self_error:.2f} % (median of {counted(guess.steps, 'step')})"
        yield f"Error of the replay without a change: {error}, at most {100 * guess.max_error:.2f} %."
    if guess.critical_path:
        yield from _path(guess.critical_path, guess.steps)


def _path(path: CriticalPath, steps: int) -> Iterator[Block]:
    """Yield the critical path by class and region, and the work off it with its slack."""
    regions = [
        (f"{kind}: {' > '.join(region) or 'outside regions'}", ns)
        for (region, kind), ns in list(path.by_region().items())[:_MAX_ROWS]
    ]
    for title, parts in (
        ("critical path of a step (mean)", path.by_class().items()),
        ("its longest parts by region", regions),
    ):
        rows = [[name, duration(ns / steps), f"{100 * ns / max(path.total_ns, 1):.1f} %"] for name, ns in parts]
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
