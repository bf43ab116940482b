"""Sums up the time of a recorded window by region and by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import msgspec
import numpy as np

from ...base.trace_marks import UNRECORDED
from ..tables.autograd import MissingBackward
from ..tables.intervals import covered_ns, merge_overlaps, total_ns
from ..tables.lanes import group_rows
from ..tables.steps import (
    StepIndex,
    gpu_work,
    in_no_region_ns,
    main_thread,
    outside_ns,
    steps_ns,
    times_of_steps,
)
from ..tables.table import Array, Table
from ..tables.trace import Trace
from ..tables.work_classes import Collectives, count_gpus
from .step_lengths import StepLengths, merge_step_lengths, step_lengths
from .timing import Timing

_MAX_DEPTH = 100


@dataclass(frozen=True)
class RegionStat:
    """All calls of one region at one place of the tree.

    Attributes:
        path: The names of the regions around it, outermost first, and its own name.
        calls: The number of calls.
        cpu_ns: The sum of their durations, as far as they are in steps.
        self_ns: The part of this time that is not inside another region.
        gpu_ns: The durations of the GPU work launched in it and in the regions inside; None without GPU work.
        in_steps: The steps in which it ran, counted from 0; empty if the trace marks no steps.
        partial: Whether some calls are missing, because their forward ran before the modules had hooks.
    """

    path: tuple[str, ...]
    calls: int
    cpu_ns: int
    self_ns: int
    gpu_ns: int | None
    in_steps: frozenset[int] = frozenset()
    partial: bool = False

    @property
    def steps(self) -> int:
        """The number of steps in which it ran."""
        return len(self.in_steps)


@dataclass(frozen=True)
class OperatorStat:
    """All calls of one operator.

    Attributes:
        name: PyTorch's name for it, such as ``aten::mm``.
        calls: The number of calls.
        self_ns: Their time on the CPU, without the operators that they called.
        gpu_ns: The durations of the GPU work that they launched themselves; None without GPU work.
        steps: The number of steps in which it ran; 0 if the trace marks no steps.
    """

    name: str
    calls: int
    self_ns: int
    gpu_ns: int | None
    steps: int = 0


@dataclass(frozen=True)
class Summary:
    """The time of the recorded steps, by region and by operator.

    A step consists of the events that start in its range, on the threads of its process. GPU work belongs to the
    step and the regions that launched it; work that was launched before the recording is outside the steps. GPU
    time is the sum of the durations of kernels, memcpys and memsets, even if they run at the same time; it is the
    time of the outermost regions plus the unattributed time.

    Attributes:
        steps: The number of recorded steps; 0 if the trace marks none.
        step_ns: The sum of their durations on the CPU; without steps, the time from the first event to the last.
        regions: A tree in order of first call: each region is followed by the regions inside it.
        operators: The operators, longest own time first.
        gpu_total_ns: The GPU time of the steps; None without GPU work.
        gpu_unattributed_ns: The part of it that was launched outside regions, or whose launch is unknown.
        step_times_ns: The duration of each step.
        step_numbers: The number of each step; -1 if the trace does not say.
        no_region_ns: The time of the steps during which no region was open.
        outside_ns: The recorded time outside the steps.
        outside_gpu_ns: The GPU time that was launched outside the steps, or before the recording.
        before_gpu_ns: The GPU time that was launched before the recording.
        by_time_gpu_ns: The GPU time without a known launch, which counts toward the step in which it ran.
        overlap_ns: How long regions of one thread overlapped without nesting: the sum of the times that each
            region shares with the region before it.
        parallel_ns: How long outermost regions of several threads were open at the same time, counted for each
            thread but one.
        unplaced: The number of regions on autograd threads without a parent, because it is unclear which thread
            called their backward pass.
        unrecorded: The calls of regions on threads that torch.profiler did not record, by name.
        timing: The timing of the run from the manifest; None if there is none.
        lengths: The lengths of the steps on the CPU and on the GPU; None without a GPU.
        gpus: The number of GPUs that did the work.
        steps_from: The regions whose calls are the steps; "" for marked steps.
    """

    steps: int
    step_ns: int
    regions: tuple[RegionStat, ...]
    operators: tuple[OperatorStat, ...]
    gpu_total_ns: int | None
    gpu_unattributed_ns: int | None
    step_times_ns: tuple[int, ...] = ()
    step_numbers: tuple[int, ...] = ()
    no_region_ns: int = 0
    outside_ns: int = 0
    outside_gpu_ns: int = 0
    before_gpu_ns: int = 0
    by_time_gpu_ns: int = 0
    overlap_ns: int = 0
    parallel_ns: int = 0
    unplaced: int = 0
    unrecorded: Mapping[str, int] = field(default_factory=dict)
    timing: Timing | None = None
    lengths: StepLengths | None = None
    gpus: int = 0
    steps_from: str = ""

    @property
    def cut_steps(self) -> list[int]:
        """The steps that no window recorded whole; they count only if no other step is recorded."""
        return sorted(set(self.timing.cut_steps)) if self.timing else []

    @property
    def only_cut(self) -> bool:
        """Whether every recorded step was cut short."""
        return bool(self.step_numbers) and set(self.step_numbers) <= set(self.cut_steps)


@dataclass
class _Total:
    """One row of a table while it is summed up; ``by_step`` counts the calls of a region in each step."""

    calls: int = 0
    cpu_ns: int = 0
    self_ns: int = 0
    gpu_ns: int = 0
    steps: int = 0
    partial: bool = False
    by_step: Counter[int] = field(default_factory=Counter)

    def add(self, calls: int, cpu_ns: int, self_ns: int, gpu_ns: int, steps: int = 0) -> None:
        """Add calls and their times."""
        self.calls += calls
        self.cpu_ns += cpu_ns
        self.self_ns += self_ns
        self.gpu_ns += gpu_ns
        self.steps += steps

    def region(self, path: tuple[str, ...], *, has_gpu: bool) -> RegionStat:
        """Return the row of a region."""
        gpu_ns, steps = self.gpu_ns if has_gpu else None, frozenset(self.by_step)
        return RegionStat(path, self.calls, self.cpu_ns, self.self_ns, gpu_ns, steps, self.partial)


def summarize(trace: Trace, timing: Timing | None = None, collectives: Collectives = "auto") -> Summary:
    """Sum up the time of one trace; if steps are marked, the time of the steps.

    GPU work belongs to the region that is open on the launching thread at its launch or, if none is open there, to
    the region then open on the thread of the steps. The regions of autograd threads are inside the region that is
    open on the thread that waits for the backward pass.

    Args:
        trace: The trace.
        timing: The timing of the run around the trace.
        collectives: Which kernels communicate, as in `communication_mask`.
    """
    steps = StepIndex(trace)
    work = gpu_work(trace, steps)
    gpu = trace.gpu.where(work.counted)
    regions = trace.regions
    within = steps.rows_at(regions.start_ns, regions.thread)
    in_steps = _in_step_time(regions, trace)
    by_path: dict[tuple[str, ...], _Total] = {}
    gpu_ns = _time_by_row(gpu, "region", len(regions))
    for path, step, *values in _tree(in_steps, gpu_ns, main_thread(trace), within):
        by_path.setdefault(path, _Total()).add(1, *values)
        by_path[path].by_step[step] += 1
    missing = MissingBackward(trace, steps)
    for path, total in by_path.items():
        around = by_path.get(path[:-1])  # its parent comes first, and is partial as well
        total.partial = (around is not None and around.partial) or missing.lacks(path[-1], total.by_step)
        if not trace.steps:
            total.by_step.clear()

    gpu_total_ns = int(gpu.duration_ns.sum())
    attributed_ns = sum(total.gpu_ns for path, total in by_path.items() if len(path) == 1)
    outside_gpu_ns = int(trace.gpu.duration_ns.sum()) - gpu_total_ns
    return _summary(
        by_path,
        _by_name(trace, gpu, steps),
        (gpu_total_ns, gpu_total_ns - attributed_ns) if trace.gpu else None,
        step_ns=steps_ns(trace),
        step_times_ns=tuple(trace.steps.duration_ns.tolist()),
        step_numbers=tuple(trace.steps.number.tolist()),
        no_region_ns=in_no_region_ns(trace, regions.where(within >= 0)),
        outside_ns=outside_ns(trace),
        outside_gpu_ns=outside_gpu_ns,
        before_gpu_ns=int(trace.gpu.duration_ns[work.before].sum()),
        by_time_gpu_ns=int(trace.gpu.duration_ns[work.by_time & work.counted].sum()),
        overlap_ns=_overlap_ns(regions.where(within >= 0)),
        parallel_ns=_parallel_ns(regions, within >= 0),
        unplaced=trace.unplaced,
        unrecorded=_unrecorded(trace),
        timing=timing,
        lengths=step_lengths(trace, collectives),
        gpus=count_gpus(trace.gpu),
        steps_from=trace.steps_from,
    )


def _unrecorded(trace: Trace) -> dict[str, int]:
    try:
        return msgspec.convert(trace.metadata.get(UNRECORDED, {}), dict[str, int])
    except msgspec.ValidationError:  # another program's
        return {}


_ADDED = (
    "step_ns", "no_region_ns", "outside_ns", "outside_gpu_ns", "before_gpu_ns", "by_time_gpu_ns", "overlap_ns",
    "parallel_ns", "unplaced",
)  # fmt: skip


def merge(summaries: Sequence[Summary]) -> Summary:
    """Return the sum of several windows of one run; an empty summary without any."""
    whole = [s for s in summaries if not s.only_cut]
    timing = _timing(summaries, {number for s in whole for number in s.step_numbers})
    summaries = whole or summaries
    by_path: dict[tuple[str, ...], _Total] = {}
    by_name: dict[str, _Total] = {}
    first = 0  # the number of its first step
    for summary in summaries:
        for region in summary.regions:
            row = by_path.setdefault(region.path, _Total())
            row.add(region.calls, region.cpu_ns, region.self_ns, region.gpu_ns or 0)
            row.by_step.update(first + step for step in region.in_steps)
            row.partial |= region.partial
        first += summary.steps
        for operator in summary.operators:
            row = by_name.setdefault(operator.name, _Total())
            row.add(operator.calls, 0, operator.self_ns, operator.gpu_ns or 0, operator.steps)
    gpu = None
    if any(summary.gpu_total_ns is not None for summary in summaries):
        gpu = sum(s.gpu_total_ns or 0 for s in summaries), sum(s.gpu_unattributed_ns or 0 for s in summaries)
    return _summary(
        by_path,
        by_name,
        gpu,
        step_times_ns=tuple(ns for s in summaries for ns in s.step_times_ns),
        step_numbers=tuple(number for s in summaries for number in s.step_numbers),
        **{name: sum(getattr(s, name) for s in summaries) for name in _ADDED},
        unrecorded=sum((Counter(s.unrecorded) for s in summaries), Counter()),
        timing=timing,
        lengths=merge_step_lengths((s.lengths, s.step_times_ns) for s in summaries),
        gpus=max((s.gpus for s in summaries), default=0),
        steps_from=next((s.steps_from for s in summaries if s.steps_from), ""),
    )


def _timing(summaries: Sequence[Summary], recorded: set[int]) -> Timing | None:
    """Merge the timings; a step that was cut short in one window may be ``recorded`` whole in another."""
    timings = [s.timing for s in summaries if s.timing is not None]
    if not timings:
        return None
    timing = reduce(add, timings)
    return replace(timing, cut_steps=tuple(number for number in timing.cut_steps if number not in recorded))


def _summary(
    by_path: dict[tuple[str, ...], _Total], by_name: dict[str, _Total], gpu: tuple[int, int] | None, **rest: Any
) -> Summary:
    """Return the summary, with the rows of its tables in order."""
    inside: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in by_path:
        inside.setdefault(path[:-1], []).append(path)
    tree, open_ = [], inside.get((), [])[::-1]
    while open_:
        tree.append(open_.pop())
        open_ += inside.get(tree[-1], [])[::-1]
    regions = tuple(by_path[path].region(path, has_gpu=gpu is not None) for path in tree)
    operators = tuple(
        OperatorStat(name, row.calls, row.self_ns, row.gpu_ns if gpu else None, row.steps)
        for name, row in sorted(by_name.items(), key=lambda item: -item[1].self_ns)
    )
    total_ns, nowhere_ns = gpu or (None, None)
    return Summary(
        steps=len(rest["step_times_ns"]),
        regions=regions,
        operators=operators,
        gpu_total_ns=total_ns,
        gpu_unattributed_ns=nowhere_ns,
        **rest,
    )


def _by_name(trace: Trace, gpu: Table, steps: StepIndex) -> dict[str, _Total]:
    operators = trace.operators
    within = steps.rows_at(operators.start_ns, operators.thread)
    chosen = within >= 0
    columns = [_self_ns(operators)[chosen], _time_by_row(gpu, "operator", len(operators))[chosen]]
    codes, rows = np.unique(operators.name[chosen], return_inverse=True)
    calls, *sums = [np.bincount(rows, column, len(codes)) for column in (None, *columns)]
    pairs = np.unique(rows.astype(np.int64) * max(len(trace.steps), 1) + within[chosen])
    in_steps = np.bincount(pairs // max(len(trace.steps), 1), minlength=len(codes)) * bool(trace.steps)
    return {
        trace.strings[code]: _Total(int(calls), 0, int(self_ns), int(gpu_ns), int(count))
        for code, calls, self_ns, gpu_ns, count in zip(codes.tolist(), calls, *sums, in_steps, strict=True)
    }


def _time_by_row(gpu: Table, link: str, rows: int) -> Array:
    """Return the GPU time that each row launched itself."""
    linked = gpu[link] >= 0
    return np.bincount(gpu[link][linked], gpu.duration_ns[linked], rows).astype(np.int64)  # exact up to 104 days


def _in_step_time(rows: Table, trace: Trace) -> Table:
    """Return ``rows`` on a clock that runs in `times_of_steps` only: time after the last step does not count."""
    during = times_of_steps(trace)
    begin = np.full_like(rows.start_ns, during[0].min(initial=0))
    times = {
        "start_ns": covered_ns(during, begin, rows.start_ns),
        "duration_ns": covered_ns(during, rows.start_ns, rows.end_ns),
    }
    return Table({**rows, **times}, rows.strings)


def _overlap_ns(rows: Table) -> int:
    """Return `Summary.overlap_ns`: overlapping regions that do not nest have the same parent."""
    order = np.lexsort((rows.start_ns, rows.parent, rows.thread))
    thread, parent, start, end = (
        column[order] for column in (rows.thread, rows.parent, rows.start_ns, rows.end_ns)
    )
    beside = np.flatnonzero((thread[1:] == thread[:-1]) & (parent[1:] == parent[:-1]) & (start[1:] < end[:-1]))
    return int((np.minimum(end[beside], end[beside + 1]) - start[beside + 1]).sum())


def _parallel_ns(rows: Table, counted: Array) -> int:
    """Return `Summary.parallel_ns` of the ``counted`` rows."""
    outermost = rows.where(counted & ~((rows.parent >= 0) & counted[rows.parent]))
    start, end = outermost.start_ns, outermost.end_ns
    each = (merge_overlaps(start[own], end[own]) for _, own in group_rows(outermost.thread))
    return sum(map(total_ns, each)) - total_ns(merge_overlaps(start, end))


def _self_ns(rows: Table) -> Array:
    """Return the part of each duration that children do not cover; overlapping children count once.

    A child on another thread may end later than its parent.
    """
    order = np.lexsort((rows.start_ns, rows.parent))
    order = order[rows.parent[order] >= 0]
    parent, start = rows.parent[order], rows.start_ns[order]
    end = np.minimum(rows.end_ns[order], rows.end_ns[parent])
    covers = end - start
    siblings = np.flatnonzero((parent[1:] == parent[:-1]) & (start[1:] < end[:-1])) + 1
    for parent_row in np.unique(parent[siblings]).tolist():
        group = slice(*np.searchsorted(parent, (parent_row, parent_row + 1)))
        reach = np.maximum.accumulate(np.concatenate((start[group][:1], end[group][:-1])))
        covers[group] = np.maximum(end[group] - np.maximum(start[group], reach), 0)
    return rows.duration_ns - np.bincount(parent, covers, len(rows)).astype(np.int64)


def _tree(
    rows: Table, gpu_ns: Array, main: int, within: Array
) -> Iterator[tuple[tuple[str, ...], int, int, int, int]]:
    """Yield each row in a step, the main thread first: path, step, duration, self time and inclusive GPU time.

    Rows that are nested more than 100 deep count toward the rows around them.
    """
    inclusive, parents, counts = gpu_ns.tolist(), rows.parent.tolist(), (within >= 0).tolist()
    for row in reversed(range(len(parents))):
        if parents[row] >= 0:
            inclusive[parents[row]] += inclusive[row]
    names, durations, self_ns = rows.text("name"), rows.duration_ns.tolist(), _self_ns(rows).tolist()
    steps = within.tolist()
    paths: list[tuple[str, ...]] = []
    shown = []
    for name, parent, counted in zip(names, parents, counts, strict=True):
        around = paths[parent] if parent >= 0 and counts[parent] else ()
        paths.append((*around, name) if len(around) < _MAX_DEPTH else around)
        shown.append(counted and len(around) < _MAX_DEPTH)
    for row in np.argsort(rows.thread != main, kind="stable").tolist():
        if shown[row]:
            yield paths[row], steps[row], durations[row], self_ns[row], inclusive[row]
