"""The command ``instrument``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import __version__
from .diagnosis.metrics import metrics
from .errors import TraceError
from .report.ranks import render_ranks
from .report.terminal import render, render_lost
from .traces.ranks import TraceSet
from .traces.read import read_trace
from .traces.summary import summarize as summary_of
from .traces.trace import Trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[bool, typer.Option("--version", callback=_version, help="Print the version.")] = False,
) -> None:
    """Read what profilers wrote."""


@app.command()
def summarize(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Files, '-', or folders and patterns of ranks.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers, exact, as JSON.")] = False,
    collectives: Annotated[
        str, typer.Option(help="Which kernels communicate: 'auto', or a regular expression of their names.")
    ] = "auto",
) -> None:
    """Say where the time of the recorded steps went, by region and by operator.

    TRACE is a trace of torch.profiler (.json, .json.gz), a report of Nsight Systems (.sqlite, .nsys-rep) or of
    rocprofv3 (.json, .db). A folder or a pattern holds the traces of the ranks of one job.
    """
    console, failed = Console(), False
    numbers: list[dict[str, Any]] = []
    for path in traces:
        try:
            trace = read_trace(path)
        except (TraceError, OSError) as error:
            typer.echo(f"instrument: {_sentence(error)}", err=True)
            failed = True
            continue
        if as_json:
            numbers += _numbers(trace, collectives)
        else:
            _print(trace, path, console)
    if numbers:
        typer.echo(json.dumps(numbers if len(numbers) > 1 or len(traces) > 1 else numbers[0], indent=2))
    if failed:
        raise typer.Exit(1)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def _numbers(trace: Trace | TraceSet, collectives: str) -> Iterator[dict[str, Any]]:
    for one in trace.values() if isinstance(trace, TraceSet) else [trace]:
        try:
            found = metrics(one, collectives)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--collectives") from None
        about = {"path": str(one.path), "format": one.format, "rank": one.rank, "world_size": one.world_size}
        yield about | found | {"coverage": _coverage(one), "lost": one.lost.reasons}


def _coverage(trace: Trace) -> dict[str, dict[str, int]]:
    return {link: vars(coverage) for link, coverage in trace.coverage.items()}


def _print(trace: Trace | TraceSet, path: str, console: Console) -> None:
    if isinstance(trace, TraceSet):
        render_ranks(trace, console=console)
        first = trace[trace.ranks[0]]
        console.print(f"\nRank {trace.ranks[0]}", style="bold", highlight=False)
        render(summary_of(first), files=[], folder=Path(), console=console)
        return
    files = [trace.path] if trace.format == "kineto" and path != "-" else []
    render(summary_of(trace), files=files, folder=trace.path.parent, console=console)
    render_lost(trace.lost, console=console)


def main() -> None:
    """Run the command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
