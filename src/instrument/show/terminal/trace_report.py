"""Prints the report on a trace with its GPUs' time, on windows, on the ranks of a job, or on measured kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from ...base.printable import shell_line
from ...base.units import count, counted, duration, percent
from ...explain.diagnosis.verdict import verdict_text, with_steps_of_run
from ...explain.metrics.metrics import Metrics
from ...explain.rules.trace_facts import TraceFacts
from ...read.jobs.ranks import TraceSet
from ...read.measures.launches import GRAPH_LAUNCH
from ...read.measures.summary import merge, summarize
from ...read.measures.timing import Timing
from ...read.profilers.nsight import MeasuredKernel
from ...read.tables.trace import MODULE_PREFIX, Trace, UnreadDevice
from ...read.tables.work_classes import Collectives
from ..text.lines import line
from .console import Block, Table, heading, more, show
from .ranks import rank_table
from .summary import losses, print_summary, unread

_GRAPH = re.compile(r"^CUDA graph \d+$")
_KERNELS = 10
_GPUS = 16
_LITTLE, _SHOWN = 0.01, 0.001  # of the window
_PARTS = (
    ("compute_ns", "compute"),
    ("exposed_comm_ns", "exposed communication"),
    ("exposed_memcpy_ns", "exposed memcpys"),
    ("idle_ns", "idle"),
)


@dataclass(frozen=True)
class Graphs:
    """Counts of graph launches whose kernels or operators the trace lacks.

    Attributes:
        whole: Launches that nsys traced as a whole, without their kernels.
        launches: Launches whose kernels belong to no operator.
        kernels: The kernels of those launches.
    """

    whole: int = 0
    launches: int = 0
    kernels: int = 0

    def __add__(self, other: Graphs) -> Graphs:
        """Return the sums over both."""
        return Graphs(self.whole + other.whole, self.launches + other.launches, self.kernels + other.kernels)


def count_graph_launches(trace: Trace) -> Graphs:
    """Count graph launches without kernels (Nsight Systems), and graph kernels without an operator (Kineto)."""
    if trace.format == "nsight systems":
        return Graphs(whole=int(trace.kernels.matching("name", _GRAPH).sum()))
    kernels = trace.kernels
    alone = kernels.launch[(kernels.launch >= 0) & (kernels.operator < 0)]
    alone = alone[trace.runtime.matching("name", GRAPH_LAUNCH)[alone]]
    return Graphs(launches=len(np.unique(alone)), kernels=len(alone))


def graph_launches(graphs: Graphs) -> Iterator[Block]:
    """Yield which details of graph launches are missing, and how to record them."""
    if graphs.whole:
        yield line()
        yield line(f"CUDA graph launches traced as a whole: {count(graphs.whole)}. To record the kernels in them:")
        yield line("  instrument run --profiler nsys --option=--cuda-graph-trace=node ...")
    if graphs.kernels:
        kernels = counted(graphs.kernels, "kernel")
        launches = counted(graphs.launches, "graph launch", "graph launches")
        yield line()
        yield (
            f"{kernels} from {launches} belong to no operator, because a graph runs its kernels without the "
            "operators that were captured. They count toward the region around the launch. To see their "
            "operators, record a run without CUDA graphs."
        )


def gpu_time(facts: TraceFacts) -> Iterator[Block]:
    """Yield how the GPU spent its time, why it idled, and the kernels and modules with the most GPU time.

    Nothing for a trace without GPU work.
    """
    numbers = facts.metrics
    if not numbers["gpu_events"]:
        return
    gpus = sum(gpu["device"] >= 0 for gpu in numbers["per_gpu"])
    yield line()
    yield from _parts(numbers, gpus)
    yield from _idle_causes(facts)
    yield from filter(None, [facts.counters_text])
    kernels = numbers["kernel_table"]
    rows = [
        [kernel["short_name"], count(kernel["count"]), duration(kernel["sum_ns"]), f"{100 * kernel['share']:.1f}"]
        for kernel in kernels[:_KERNELS]
        if kernel["share"] is not None
    ]
    if rows:
        yield Table(["kernel" + f" (all {gpus} GPUs)" * (gpus > 1), "calls", "GPU", "% kernels"], rows)
    yield from more(len(kernels) - _KERNELS, "more kernel")
    modules = [row for row in numbers["module_table"] if row["gpu_ns"]]
    if modules:  # a trace with Python stacks knows them
        rows = [
            [
                row["name"].removeprefix(MODULE_PREFIX),
                count(row["calls"]),
                duration(row["cpu_ns"]),
                duration(row["gpu_ns"]),
            ]
            for row in modules[:_KERNELS]
        ]
        yield line()
        yield Table(["module, with those inside it", "calls", "CPU", "GPU"], rows)
    yield from more(len(modules) - _KERNELS, "more module")


def _idle_causes(facts: TraceFacts) -> Iterator[Block]:
    """Yield what the CPU did while the GPU idled; nothing if it hardly idled."""
    causes = facts.idle.totals() if facts.gpu else {}
    idle_ns = sum(causes.values())
    if idle_ns < _LITTLE * facts.window_ns:
        return
    parts = ", ".join(
        f"{cause.replace('_', ' ')} {percent(ns, facts.window_ns)} %"
        for cause, ns in causes.items()
        if ns >= _SHOWN * facts.window_ns
    )
    where = "the steps" if facts.trace.steps else "the recording"
    yield f"Idle by cause, of {duration(facts.window_ns)} of {where}: {parts}"


def _parts(numbers: Metrics, gpus: int) -> Iterator[Block]:
    """Yield the shares in a sentence; of several GPUs, in a table."""
    whole = numbers["span_ns"]
    span = f"{duration(whole)} from the first start to the last end of"
    shown = [(name, word) for name, word in _PARTS if name != "exposed_comm_ns" or numbers["comm_ns"]]
    if gpus < 2:
        parts = ", ".join(f"{word} {percent(numbers[name], whole)} %" for name, word in shown)
        yield f"GPU, {span} its work: {parts}"
        return
    yield f"{gpus} GPUs, {span} their work:"
    rows = [
        ["?" if gpu["device"] < 0 else str(gpu["device"]), duration(gpu["work_ns"])]
        + [percent(gpu[name], whole) for name, _ in shown]
        for gpu in numbers["per_gpu"][:_GPUS]
    ]
    yield Table(["GPU", "work", *(f"{word} %" for _, word in shown)], rows)
    yield from more(len(numbers["per_gpu"]) - _GPUS, "more GPU")
    yield line()


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
    devices: dict[str, UnreadDevice] = {}
    for trace, timing in windows:
        devices |= trace.unread_devices
        summaries.append(summarize(trace, timing, collectives))
        lost.append(trace.lost)
        graphs += count_graph_launches(trace)
    several = len(summaries) > 1
    timing = with_steps_of_run(summaries[-1].timing, trace.path)
    facts = TraceFacts(trace, collectives, timing, lengths=summaries[-1].lengths)
    if facts.gpu:
        show(console, ["The last window: " * several + verdict_text(facts)])
    summary = merge(summaries) if several else summaries[0]
    print_summary(
        summary,
        files=[],
        folder=trace.path.parent,
        hidden=hidden,
        expand=expand,
        below_verdict=facts.step_waits is not None,
        console=console,
    )
    if timing is not None and timing.lengths is not None:
        show(console, [line(f"The run: {sentence}.") for sentence in timing.lengths.sentences()])
    if several and trace.gpu:
        show(console, heading(f"The last of {len(summaries)} windows"))
    show(console, [*gpu_time(facts), *graph_launches(graphs)])
    show(console, [*(block for one in lost for block in losses(one)), *unread(devices)])


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
    show(console, rank_table(traces, collectives, title=title))
    rank = next(iter(traces)) if rank is None else rank
    trace = traces[rank]
    title = f"Rank {rank}{', ' * bool(title)}{title}"
    show(console, heading(title) if several else [line()])
    print_windows(windows or [(trace, None)], collectives, hidden=hidden, expand=expand, console=console)


_MAX_KERNELS = 30
_COLUMNS = ("region / kernel", "calls", "GPU", "SM %", "memory %", "occupancy %")
_SHARES = ("sm", "memory", "occupancy")


def measured_kernels(kernels: Sequence[MeasuredKernel], report: Path) -> Iterator[Block]:
    """Yield a table of the regions, longest first, and the kernels in each; shares are weighted by duration.

    Args:
        kernels: the kernels.
        report: the report of Nsight Compute that lists all of them.
    """
    if not kernels:
        yield line("No kernel was measured.")
        return
    total = sum(kernel.duration_ns for kernel in kernels)
    launches = counted(len(kernels), "launch", "launches")
    yield line(f"How well kernels use the GPU: {launches}, {duration(total)} alone", "bold")
    rows, indents = [], []
    for region, inside in _group_kernels(kernels, lambda kernel: " > ".join(kernel.region) or "(in no region)"):
        groups = _group_kernels(inside, lambda kernel: kernel.name)
        rows += [_cells(region, inside), *(_cells(*group) for group in groups)]
        indents += [0, *[2] * len(groups)]
    yield Table(_COLUMNS, rows[:_MAX_KERNELS], indents[:_MAX_KERNELS])
    how = f"; all kernels: {shell_line(['ncu', '--import', str(report)])}"
    yield from more(len(rows) - _MAX_KERNELS, "more line", how)


def _group_kernels(
    kernels: Sequence[MeasuredKernel], key: Callable[[MeasuredKernel], str]
) -> list[tuple[str, list[MeasuredKernel]]]:
    groups: dict[str, list[MeasuredKernel]] = defaultdict(list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    return sorted(groups.items(), key=lambda item: -sum(kernel.duration_ns for kernel in item[1]))


def _cells(name: str, kernels: Sequence[MeasuredKernel]) -> list[str]:
    whole = sum(kernel.duration_ns for kernel in kernels)
    return [name, count(len(kernels)), duration(whole), *(_mean(kernels, share) for share in _SHARES)]


def _mean(kernels: Sequence[MeasuredKernel], share: str) -> str:
    pairs = [(kernel.duration_ns, getattr(kernel, share)) for kernel in kernels]
    weight = sum(ns for ns, value in pairs if value is not None)
    return f"{sum(ns * value for ns, value in pairs if value is not None) / weight:.1f}" if weight else "-"
