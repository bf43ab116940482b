"""Prints the whole report on a trace, on several windows of one process, or on the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from ..console import print_line, print_wrapped
from ..diagnosis.stretch import verdict_text, with_steps_of_run
from ..diagnosis.trace_facts import TraceFacts
from ..traces.communication import Collectives
from ..traces.ranks import TraceSet
from ..traces.summary import merge, summarize
from ..traces.timing import Timing
from ..traces.trace import Trace, UnreadDevice
from .gpu import Graphs, count_graph_launches, print_gpu_time, print_graph_launches
from .ranks import print_rank_table
from .summary import print_losses, print_summary, print_unread_devices


def print_trace(trace: Trace, collectives: Collectives, *, timing: Timing | None = None, console: Console) -> None:
    """Print the steps, regions, operators and GPU time of one trace, then what could not be read.

    Args:
        trace: Any trace.
        collectives: Which kernels communicate.
        timing: The steps around the window, from the manifest.
        console: Where to print.
    """
    print_windows([(trace, timing)], collectives, console=console)


def print_windows(
    windows: Iterable[tuple[Trace, Timing | None]],
    collectives: Collectives,
    *,
    hidden: Sequence[str] = (),
    expand: bool = False,
    console: Console,
) -> None:
    """Print the sum of several windows of one process; the GPU's time is from the last window.

    Args:
        windows: The trace of each window, at least one, and its timing from the manifest.
        collectives: Which kernels communicate.
        hidden: Regions that were not recorded because they are inside compiled code.
        expand: Print regions that differ only in the numbers in their names as one row each.
        console: Where to print.
    """
    summaries, lost, graphs = [], [], Graphs()
    unread: dict[str, UnreadDevice] = {}
    for trace, timing in windows:
        unread |= trace.unread_devices
        summaries.append(summarize(trace, timing, collectives))
        lost.append(trace.lost)
        graphs += count_graph_launches(trace)
    several = len(summaries) > 1
    timing = with_steps_of_run(summaries[-1].timing, trace.path)
    facts = TraceFacts(trace, collectives, timing, lengths=summaries[-1].lengths)
    if facts.gpu:
        of = "The last window: " * several
        print_wrapped(console, of + verdict_text(facts))
    summary = merge(summaries) if several else summaries[0]
    print_summary(summary, files=[], folder=trace.path.parent, hidden=hidden, expand=expand, console=console)
    if several and trace.gpu:
        print_line(console, f"The last of {len(summaries)} windows", bold=True, space=True)
    print_gpu_time(facts, console=console)
    print_graph_launches(graphs, console=console)
    for one in lost:
        print_losses(one, console=console)
    print_unread_devices(unread, console=console)


def print_trace_set(
    traces: TraceSet,
    collectives: Collectives,
    *,
    windows: Iterable[tuple[Trace, Timing | None]] = (),
    title: str = "",
    hidden: Sequence[str] = (),
    expand: bool = False,
    rank: int | None = None,
    console: Console,
) -> None:
    """Print the ranks of a job side by side, then one of them: its trace or, if given, its ``windows``.

    Args:
        traces: One window of each rank.
        collectives: Which kernels communicate.
        windows: As in `print_windows`.
        title: A name for the windows; by default the path of the trace.
        hidden: As in `print_windows`.
        expand: As in `print_windows`.
        rank: The rank to print; by default the lowest.
        console: Where to print.
    """
    several = traces.world_size > 1
    print_rank_table(traces, collectives, title=title, console=console)
    rank = next(iter(traces)) if rank is None else rank
    trace = traces[rank]
    heading = f"Rank {rank}{', ' * bool(title)}{title}" if several else ""
    print_line(console, heading, bold=True, space=several)
    print_windows(windows or [(trace, None)], collectives, hidden=hidden, expand=expand, console=console)
