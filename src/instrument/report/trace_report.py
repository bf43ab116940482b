"""Prints all that is said of one trace, whichever profiler wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from ..diagnosis.metrics import metrics_of
from ..traces.communication import Collectives
from ..traces.ranks import TraceSet
from ..traces.summary import merge, summarize
from ..traces.timing import Timing
from ..traces.trace import Trace
from .console import line
from .gpu import Graphs, launched_graphs, render_gpu, render_graphs
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
    render_windows([(trace, timing)], collectives, console=console)


def render_windows(
    windows: Iterable[tuple[Trace, Timing | None]],
    collectives: Collectives,
    *,
    hidden: Sequence[str] = (),
    console: Console,
) -> None:
    """Print several windows of one process as if they were one; the GPU's time is that of the last.

    Args:
        windows: The trace of each, one at least, with what the loop that recorded it knows of the run.
        collectives: Which kernels communicate.
        hidden: Regions that were not recorded because they are inside compiled code.
        console: Where to print.
    """
    summaries, lost, graphs = [], [], Graphs()
    for trace, timing in windows:
        summaries.append(summarize(trace, timing, collectives))
        lost.append(trace.lost)
        graphs += launched_graphs(trace)
    several = len(summaries) > 1
    summary = merge(summaries) if several else summaries[0]
    render(summary, files=[], folder=trace.path.parent, hidden=hidden, console=console)
    numbers = metrics_of(trace, collectives, summaries[-1].lengths)
    if several and numbers["gpu_events"]:
        line(console, f"The last of {len(summaries)} windows", bold=True, space=True)
    render_gpu(numbers, console=console)
    render_graphs(graphs, console=console)
    for one in lost:
        render_lost(one, console=console)


def render_set(
    traces: TraceSet,
    collectives: Collectives,
    *,
    windows: Iterable[tuple[Trace, Timing | None]] = (),
    title: str = "",
    hidden: Sequence[str] = (),
    console: Console,
) -> None:
    """Print the ranks of a job side by side, then the lowest: its trace, or all of its ``windows`` if given.

    Args:
        traces: One window of each rank.
        collectives: Which kernels communicate.
        windows: As `render_windows` takes them.
        title: What the windows are; by default the trace of the rank.
        hidden: As `render_windows` takes them.
        console: Where to print.
    """
    several = traces.world_size > 1
    render_ranks(traces, collectives, title=title, console=console)
    rank, trace = next(iter(traces.items()))
    heading = f"Rank {rank}{', ' * bool(title)}{title}" if several else ""
    line(console, heading, bold=True, space=several)
    render_windows(windows or [(trace, None)], collectives, hidden=hidden, console=console)
