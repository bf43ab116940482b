"""``instrument summarize``: where the time of the recorded steps went."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from ..diagnosis.collectives import Collectives, compiled
from ..diagnosis.metrics import metrics
from ..errors import TraceError
from ..report.plain import line
from ..report.terminal import render_files
from ..report.whole import render_set, render_trace
from ..traces.ranks import TraceSet
from ..traces.read import read_trace
from ..traces.summary import Timing
from ..traces.trace import Trace
from ..windows.manifest import entry_of
from .sentence import say, sentence


def summarize(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Files, '-', or folders and patterns of ranks.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers, exact, as JSON.")] = False,
    collectives: Annotated[
        str,
        typer.Option(
            help="Which kernels communicate: 'auto', or a regular expression of their names.", metavar="REGEX"
        ),
    ] = "auto",
) -> None:
    """Say where the time of the recorded steps went, by region and by operator.

    TRACE is a trace of torch.profiler (.json, .json.gz), a report of Nsight Systems (.sqlite, .nsys-rep) or of
    rocprofv3 (.json, .db). A folder or a pattern holds the traces of the ranks of one job.
    """
    try:
        pattern = compiled(collectives)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--collectives") from None
    console, failed, numbers = Console(), False, []
    for path in traces:
        try:
            trace = read_trace(path)
        except (TraceError, OSError) as error:
            say(sentence(error))
            failed = True
            continue
        failed = failed or (isinstance(trace, TraceSet) and bool(trace.failed))
        if as_json:
            numbers.append(_numbers(trace, pattern))
            continue
        if len(traces) > 1:
            line(console, path, bold=True, space=True)
        _print(trace, path, pattern, console)
    if numbers:
        typer.echo(json.dumps(numbers if len(traces) > 1 else numbers[0], indent=2))
    if failed:
        raise typer.Exit(1)


def _numbers(trace: Trace | TraceSet, collectives: Collectives) -> dict[str, Any]:
    if isinstance(trace, Trace):
        about: dict[str, Any] = {"path": str(trace.path), "format": trace.format, "rank": trace.rank}
        about["timing"] = (entry_of(trace.path) or {}).get("timing")
        coverage = {link: vars(part) for link, part in trace.coverage.items()}
        return about | metrics(trace, collectives) | {"coverage": coverage, "lost": vars(trace.lost)}
    return {
        "world_size": trace.world_size,
        "missing": trace.missing,
        "failed": {str(path): reason for path, reason in trace.failed.items()},
        "left_out": {str(path): held for path, held in trace.left_out.items()},
        "guessed": trace.guessed,
        "clocks": {rank: vars(clock) for rank, clock in trace.clocks.items()},
        "ranks": [_numbers(one, collectives) | {"rank": rank} for rank, one in trace.items()],
    }


def _print(trace: Trace | TraceSet, path: str, collectives: Collectives, console: Console) -> None:
    first = next(iter(trace.values())) if isinstance(trace, TraceSet) else trace
    timing = Timing.of(entry_of(first.path))
    if isinstance(trace, TraceSet):
        render_set(trace, collectives, timing=timing, console=console)
        trace = first
    else:
        render_trace(trace, collectives, timing=timing, console=console)
    if trace.format == "kineto" and path != "-":
        render_files([trace.path], trace.path.parent, console=console)
