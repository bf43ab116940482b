"""Prints a prediction and the critical path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.units import counted, duration
from ...explain.replay.critical_path import CriticalPath
from ...explain.replay.what_if import WhatIf
from .console import print_line, print_table, print_wrapped

if TYPE_CHECKING:
    from rich.console import Console

_MAX_ROWS = 10


def print_what_if(guess: WhatIf, *, console: Console) -> None:
    """Print the predicted step, the error of the replay, and the critical path."""
    print_wrapped(console, str(guess))
    if guess.self_error is not None and guess.max_error is not None:
        error = f"{100 * guess.self_error:.2f} % (median of {counted(guess.steps, 'step')})"
        print_wrapped(
            console, f"Error of the replay without a change: {error}, at most {100 * guess.max_error:.2f} %."
        )
    if guess.critical_path:
        _print_path(guess.critical_path, guess.steps, console)


def _print_path(path: CriticalPath, steps: int, console: Console) -> None:
    """Print the critical path by class and region, and the work off it with its slack."""
    whole = max(path.total_ns, 1)
    rows = [(0, kind, [duration(ns / steps), f"{100 * ns / whole:.1f} %"]) for kind, ns in path.by_class().items()]
    console.print()
    print_table(["critical path of a step (mean)", "time", "share"], rows, console)
    regions = [
        (
            0,
            f"{kind}: {' > '.join(region) or 'outside regions'}",
            [duration(ns / steps), f"{100 * ns / whole:.1f} %"],
        )
        for (region, kind), ns in list(path.by_region().items())[:_MAX_ROWS]
    ]
    console.print()
    print_table(["its longest parts by region", "time", "share"], regions, console)
    off = [
        (0, work.name, [duration(work.duration_ns / steps), duration(work.slack_ns)])
        for work in path.off_path[:_MAX_ROWS]
    ]
    if off:
        console.print()
        print_table(["work that is never on it", "time", "slack"], off, console)
        print_line(console, "Slack is the least time by which such work could end later without longer steps.")
