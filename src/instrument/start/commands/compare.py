"""``instrument compare``: says whether a program became faster or slower between two recordings, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import cli

if TYPE_CHECKING:
    from ...explain.comparison.comparison import Comparison

_LIMIT = re.compile(r"slower=(\d+(?:\.\d+)?)%")
_FAILED, _UNDECIDED = 1, 2


def compare_command(
    before: str = cli.argument("BEFORE", "A file, or the folder of a run or of ranks."),
    after: str = cli.argument("AFTER", "The same after the change."),
    fail_on: str | None = cli.option(
        "slower=N%",
        "End with code 1 if the steps became slower by this much or more (slower=5%), with code 2 "
        "if the recordings cannot be compared or have too few steps to tell.",
    ),
    as_json: bool = cli.flag("--json", "Print the whole comparison as JSON."),
    as_html: Path | None = cli.HTML,
    steps_from: str | None = cli.STEPS_FROM,
    rank: int | None = cli.RANK,
    collectives: str = cli.COLLECTIVES,
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

    with cli.errors_reported():
        if as_json and as_html is not None:
            raise ValueError("--json and --html exclude each other")
        match = None if fail_on is None else _LIMIT.fullmatch(fail_on)
        if fail_on is not None and match is None:
            raise ValueError(f"--fail-on must be slower=N%, such as slower=5%: {fail_on!r}")
        change = compare(
            before, after, collectives=compile_collectives(collectives), steps_from=steps_from, rank=rank
        )
    if as_json:
        typer.echo(change.to_json())
    elif as_html is not None:
        cli.write_html(change.to_html, as_html)
    else:
        show(new_console(), comparison_report(change))
    if match is not None:
        _fail(change, float(match[1]) / 100)


def _fail(change: Comparison, limit: float) -> None:
    """End the command with an error if the steps became slower by ``limit``, or nobody can tell.

    Raises:
        typer.Exit: with code 1 or 2.
    """
    from ...explain.comparison.comparison import change_text, why_undecided

    if change.verdict == "not comparable":
        cli.print_message(f"not comparable: {'; '.join(change.reasons)}")
        raise typer.Exit(_UNDECIDED)
    if change.verdict == "slower" and (change.relative is None or change.relative >= limit):
        cli.print_message(f"slower: {change_text(change)}; --fail-on allows less than {100 * limit:g} %")
        raise typer.Exit(_FAILED)
    if why := why_undecided(change, limit):
        cli.print_message(f"cannot tell whether the steps are {100 * limit:g} % slower: {why}")
        raise typer.Exit(_UNDECIDED)


subcommand = cli.subcommand_of(compare_command)
