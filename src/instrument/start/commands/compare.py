"""``instrument compare``: says whether a program became faster or slower between two recordings, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .command import (
    COLLECTIVES,
    HTML,
    RANK,
    STEPS_FROM,
    argument,
    errors_reported,
    flag,
    option,
    print_message,
    subcommand_of,
    write_html,
)

if TYPE_CHECKING:
    from ...explain.comparison.comparison import Comparison

_LIMIT = re.compile(r"slower=(\d+(?:\.\d+)?)%")
_FAILED, _NOT_COMPARABLE = 1, 2


def compare_command(
    before: str = argument("BEFORE", "A file, or the folder of a run or of ranks."),
    after: str = argument("AFTER", "The same after the change."),
    fail_on: str | None = option(
        "slower=N%",
        "End with code 1 if the steps became slower by this much or more (slower=5%), with code 2 "
        "if the recordings cannot be compared.",
    ),
    as_json: bool = flag("--json", "Print the whole comparison as JSON."),
    as_html: Path | None = HTML,
    steps_from: str | None = STEPS_FROM,
    rank: int | None = RANK,
    collectives: str = COLLECTIVES,
) -> None:
    """Say whether the steps of a program became faster or slower, and which parts of a step changed.

    The steps are the sample: only a difference that is larger than chance is a change. The parts of the difference
    between the two median steps add up to it. --html writes one file, which needs no network, with
    the steps as dots and the parts as a waterfall.
    """
    from ...explain.comparison.comparison import compare
    from ...read.tables.work_classes import compile_collectives
    from ...show.terminal.changes import comparison_report
    from ...show.terminal.console import new_console, show

    with errors_reported():
        if as_json and as_html is not None:
            raise ValueError("--json and --html exclude each other")
        limit = _limit(fail_on)
        change = compare(
            before, after, collectives=compile_collectives(collectives), steps_from=steps_from, rank=rank
        )
    if as_json:
        typer.echo(change.to_json())
    elif as_html is not None:
        write_html(change.to_html, as_html)
    else:
        show(new_console(), comparison_report(change))
    if limit is not None:
        _fail(change, limit)


def _limit(text: str | None) -> float | None:
    """Return the relative change of ``slower=N%``."""
    if text is None:
        return None
    match = _LIMIT.fullmatch(text)
    if not match:
        raise ValueError(f"--fail-on must be slower=N%, such as slower=5%: {text!r}")
    return float(match[1]) / 100


def _fail(change: Comparison, limit: float) -> None:
    """End the command with an error if the steps became slower, or cannot be compared.

    Raises:
        typer.Exit: with code 1 or 2.
    """
    from ...explain.comparison.comparison_data import change_text

    if change.verdict == "not comparable":
        print_message(f"not comparable: {'; '.join(change.reasons)}")
        raise typer.Exit(_NOT_COMPARABLE)
    if change.verdict == "slower" and (change.relative is None or change.relative >= limit):
        print_message(f"slower: {change_text(change)}; --fail-on allows less than {100 * limit:g} %")
        raise typer.Exit(_FAILED)
    if change.detectable is None or change.detectable > limit:
        seen = "no" if change.detectable is None else f"only a {100 * change.detectable:.1f} %"
        print_message(
            f"{seen} change is sure to be seen in so few steps; --fail-on has a limit of {100 * limit:g} %"
        )


subcommand = subcommand_of(compare_command)
