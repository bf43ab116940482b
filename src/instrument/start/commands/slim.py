"""``instrument slim``: writes a smaller trace that gives the same metrics and findings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...base.units import counted
from .. import cli

if TYPE_CHECKING:
    from rich.console import Console

    from ...explain.slimming.slim import SlimTrace


def slim_command(
    trace: str = cli.argument("TRACE", "A trace of torch.profiler: .json or .json.gz."),
    out: Path | None = cli.option(
        "FILE",
        "The file to write, gzipped if its name ends in .gz; by default the name of TRACE with "
        ".slim.json.gz, beside it.",
    ),
    steps: int | None = cli.option(
        "N",
        "How many steps stay, from the middle of the recording; all numbers are then those of the steps.",
        min=1,
    ),
    anonymize: bool = cli.flag(
        "--anonymize",
        "Replace all words of names by stand-ins, but those that torch and libraries are known to use; "
        "all numbers stay.",
    ),
    key: str = cli.option(
        "KEY",
        "With --anonymize, a secret: files with the same KEY have the same stand-ins, and nobody without "
        "it can check a guessed name.",
        default="",
    ),
) -> None:
    """Write a smaller trace that gives the same metrics and findings.

    The new file is read back and diagnosed. What differs is listed, and the exit code is then 1, as when the
    trace cannot be read; it is 2 for options that are wrong or do not fit the trace.
    """
    from ...explain.slimming.slim import SUFFIX, slim
    from ...show.terminal.console import new_console

    with cli.errors_reported():
        if key and not anonymize:
            raise ValueError("--key needs --anonymize")
        if out is None and Path(trace).name.endswith(SUFFIX):
            raise ValueError(f"TRACE is a slim trace by its name, which would be replaced: pass --out: {trace}")
        slimmed = slim(trace, out, steps=steps, anonymize=anonymize, key=key)
    _print(new_console(), slimmed, anonymized=anonymize)
    if slimmed.changed:
        cli.print_message(f"these differ in {slimmed.path}: {', '.join(slimmed.changed)}")
        raise typer.Exit(1)


def _print(console: Console, slimmed: SlimTrace, *, anonymized: bool) -> None:
    from ...show.terminal.console import print_wrapped

    kept = f"{slimmed.events:,} of {counted(slimmed.source_events, 'event')}"
    size = f"{_size(slimmed.bytes)} instead of {_size(slimmed.source_bytes)}"
    print_wrapped(console, f"{slimmed.path} has {kept}, in {size}.")
    if slimmed.steps:
        few, of = slimmed.steps
        print_wrapped(console, f"It holds {few} of {counted(of, 'step')}: all numbers are those of these steps.")
    if not slimmed.changed:
        what = "All numbers of its metrics" if anonymized else "Metrics"
        print_wrapped(console, f"{what} and findings are the same.")


def _size(number: int) -> str:
    return f"{number / 1e6:,.2f} MB" if number >= 1e5 else f"{number / 1e3:,.1f} kB"


subcommand = cli.subcommand_of(slim_command)
