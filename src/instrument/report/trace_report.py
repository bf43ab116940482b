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
from .console import print_line
from .gpu import Graphs, count_graph_launches, print_gpu_time, print_graph_launches
from .ranks import print_rank_table
from .summary import print_losses, print_summary


def print_trace(trace: Trace, collectives: Collectives, *, timing: Timing | None = None, console: Console) -> None:
    """Print where the time of one trace went: regions, operators, the GPU; then what could not be read.

    Args:
        trace: Any trace.
        collectives: Which kernels communicate.
        timing: What the loop that recorded it knows of the run.
        console: Where to print.
    """
    print_windows([(trace, timing)], collectives, console=console)


def print_windows(
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
        graphs += count_graph_launches(trace)
    several = len(summaries) > 1
    summary = merge(summaries) if several else summaries[0]
    print_summary(summary, files=[], folder=trace.path.parent, hidden=hidden, console=console)
    numbers = metrics_of(trace, collectives, summaries[-1].lengths)
    if several and numbers["gpu_events"]:
        print_line(console, f"The last of {len(summaries)} windows", bold=True, space=True)
    print_gpu_time(numbers, console=console)
    print_graph_launches(graphs, console=console)
    for one in lost:
        print_losses(one, console=console)


def print_trace_set(
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
        windows: As `print_windows` takes them.
        title: What the windows are; by default the trace of the rank.
        hidden: As `print_windows` takes them.
        console: Where to print.
    """
    several = traces.world_size > 1
    print_rank_table(traces, collectives, title=title, console=console)
    rank, trace = next(iter(traces.items()))
    heading = f"Rank {rank}{', ' * bool(title)}{title}" if several else ""
    print_line(console, heading, bold=True, space=several)
    print_windows(windows or [(trace, None)], collectives, hidden=hidden, console=console)
