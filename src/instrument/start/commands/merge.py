"""`instrument merge`: writes one trace of several ranks, on one clock."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.units import counted, duration, listed, signed_duration
from .. import cli

if TYPE_CHECKING:
    from rich.console import Console

    from ...read.jobs.align import Clock
    from ...read.jobs.merge import MergedTrace

_STEPS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_AS_OPTIONS = {
    '"ranks"': "--ranks",
    '"steps"': "--steps",
    '"paths"': "RUN",
    "skip_unreadable=True": "--skip-unreadable",
}


def merge_command(
    run: list[str] = cli.argument("RUN...", "The folder of a run or of ranks, a pattern, or several files."),
    ranks: str | None = cli.option("RANKS", "The ranks, such as '0,7' (default: all that have a trace)."),
    steps: str | None = cli.option(
        "N-M",
        "The steps, such as '10-12' (default: all). Of the windows of a run, the last one with these "
        "steps is taken; by default the last one.",
    ),
    out: Path | None = cli.option(
        "FILE", "The file to write, gzipped if it ends in .gz (default: FOLDER.merged.json.gz beside FOLDER)."
    ),
    skip_unreadable: bool = cli.flag("--skip-unreadable", "Merge the other ranks if a file cannot be read."),
) -> None:
    """Write one trace of several ranks, on one clock, for Perfetto and chrome://tracing.

    The ranks stand below each other, as "rank 3: python" and "rank 3: GPU 0". The clocks are aligned by the ends
    of common collectives; without these, by the clock of the machine, or of several machines.

    The exit code is 1 if a trace cannot be read or the file cannot be written, and 2 for wrong arguments.
    """
    from ...read.jobs.merge import merge_traces
    from ...show.terminal.console import new_console
    from . import options

    with cli.errors_reported(names=_AS_OPTIONS):
        merged = merge_traces(
            run if len(run) > 1 else run[0],
            out,
            ranks=None if ranks is None else options.numbers(ranks),
            steps=None if steps is None else _range(steps),
            skip_unreadable=skip_unreadable,
        )
    _print(new_console(), merged)


def _range(text: str) -> tuple[int, int]:
    """Return the first and the last step of ``N-M``, or of ``N`` alone."""
    match = _STEPS.fullmatch(text)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ValueError(f"--steps must be N or N-M, such as 10-12: {text}")
    return int(match[1]), int(match[2] or match[1])


def _print(console: Console, merged: MergedTrace) -> None:
    from ...show.terminal.console import Table, print_line, print_wrapped, show

    rows = [
        [str(rank), clock.source, signed_duration(clock.offset_ns), _certainty(clock)]
        for rank, clock in merged.clocks.items()
    ]
    show(console, [Table(["rank", "clock by", "offset", "uncertain by"], rows)])
    what = f"{counted(merged.events, 'event')} of {counted(len(merged.files), 'rank')}"
    print_line(console, f"{merged.path} has {what}, in {merged.bytes / 1e6:,.2f} MB; open it at ui.perfetto.dev.")
    if any(clock.source == "epoch" for clock in merged.clocks.values()):
        print_wrapped(
            console,
            'Ranks with "epoch" have no collectives on a GPU in common with the others: they are aligned by the '
            "clocks of their machines, which may differ by more than a step.",
        )
    if any(clock.source == "unknown" for clock in merged.clocks.values()):
        print_wrapped(
            console,
            'The start of the clock of ranks with "unknown", or of the lowest rank, is missing or impossible: '
            "their times count from the same moment or, if that cannot be, begin with the same step.",
        )
    if merged.missing:
        print_wrapped(console, f"No trace of {counted(len(merged.missing), 'rank')}: {listed(merged.missing)}.")
    for rank, lost in merged.damaged.items():
        print_wrapped(console, f"The file of rank {rank} could not be read completely: {'; '.join(lost.reasons)}.")
    for path, reason in {**merged.failed, **merged.left_out}.items():
        print_wrapped(console, f"Left out: {path}: {reason}.")


def _certainty(clock: Clock) -> str:
    if clock.source != "collectives":
        return "" if clock.is_sure else "unknown"
    return f"{duration(clock.spread_ns)} ({counted(clock.collectives, 'collective')})"


subcommand = cli.subcommand_of(merge_command)
