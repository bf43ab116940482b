"""Prints all that is said of one trace, whichever profiler wrote it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ..diagnosis.collectives import Collectives
from ..diagnosis.metrics import metrics
from ..traces.ranks import TraceSet
from ..traces.summary import Timing, merge, summarize
from ..traces.trace import Trace
from .gpu import render_gpu
from .plain import line
from .ranks import render_ranks
from .terminal import render, render_lost


def render_trace(
    trace: Trace, collectives: Collectives, *, timing: Timing | None = None, console: Console
) -> None:
    """Print where the time of one trace went: regions, operators, the GPU; then what could not be read.

    Args:
        trace: Any trace.
        collectives: Which kernels communicate.
        timing: What the loop that recorded it knows of the run.
        console: Where to print.
    """
    render(summarize(trace, timing), files=[], folder=trace.path.parent, console=console)
    render_gpu(metrics(trace, collectives), console=console)
    render_lost(trace.lost, console=console)


def render_set(
    traces: TraceSet, collectives: Collectives, *, timing: Timing | None = None, console: Console
) -> None:
    """Print the ranks of a job side by side, then the trace of the lowest, whose loop knows the ``timing``."""
    render_ranks(traces, collectives, console=console)
    rank, trace = next(iter(traces.items()))
    line(console, f"Rank {rank}" if traces.world_size > 1 else "", bold=True, space=traces.world_size > 1)
    render_trace(trace, collectives, timing=timing, console=console)


def render_windows(windows: Sequence[Trace], collectives: Collectives, *, console: Console) -> None:
    """Print several windows of one process as if they were one; the GPU's time is that of the last."""
    if len(windows) == 1:
        render_trace(windows[0], collectives, console=console)
        return
    summary = merge([summarize(trace) for trace in windows])
    render(summary, files=[], folder=windows[0].path.parent, console=console)
    numbers = metrics(windows[-1], collectives)
    if numbers["gpu_events"]:
        line(console, f"The last of {len(windows)} windows", bold=True, space=True)
        render_gpu(numbers, console=console)
    for trace in windows:
        render_lost(trace.lost, console=console)
