"""Where the time of a recorded window went, by region and by operator, from its trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .intervals import union
from .links import main_thread
from .table import Array, Table
from .trace import Trace

_DEEPEST = 100

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class RegionStat:
    """All calls of one region in one place.

    Attributes:
        path: The names of the regions around it, outermost first, and its own.
        calls: How many times it ran.
        cpu_ns: Their durations, added up.
        self_ns: The part of it that no region inside covers.
        gpu_ns: The GPU work launched in it, regions inside included; None where the trace has no GPU work.
    """

    path: tuple[str, ...]
    calls: int
    cpu_ns: int
    self_ns: int
    gpu_ns: int | None


@dataclass(frozen=True)
class OperatorStat:
    """All calls of one operator.

    Attributes:
        name: As PyTorch names it, ``aten::mm``.
        calls: How many times it ran.
        self_ns: Their time on the CPU, without the operators they called.
        gpu_ns: The GPU work they launched themselves; None where the trace has no GPU work.
    """

    name: str
    calls: int
    self_ns: int
    gpu_ns: int | None


@dataclass(frozen=True)
class Summary:
    """Where the time of the recorded steps went.

    GPU time is the sum of the durations of kernels, copies and fills: work that overlaps counts twice. It
    belongs to the regions it was launched in: that of the outermost ones and the unattributed make the total.

    Attributes:
        steps: How many steps were recorded; 0 where the trace marks none.
        step_ns: Their durations on the CPU, added up; without steps, from the first event to the last.
        regions: As a tree in order of first call: each region is followed by those inside it.
        operators: By their own time, longest first.
        gpu_total_ns: All GPU work; None where the trace has none.
        gpu_unattributed_ns: The GPU work that was launched in no region, or before the window.
    """

    steps: int
    step_ns: int
    regions: tuple[RegionStat, ...]
    operators: tuple[OperatorStat, ...]
    gpu_total_ns: int | None
    gpu_unattributed_ns: int | None


def summarize(trace: Trace) -> Summary:
    """Say where the time of one trace went.

    GPU work belongs to the region open where and when it was launched. On a thread with none open, such as
    those that run the backward pass on CUDA, it belongs to the one then open on the thread of the steps,
    which waits for them. Of a whole run, as other profilers than torch's record it, only what began or was
    launched in a step counts, if steps are marked.
    """
    gpu = trace.gpu.where(_counts(trace))
    by_path: dict[tuple[str, ...], list[int]] = {}
    gpu_ns = _charged(gpu, "region", len(trace.regions))
    main = main_thread(trace.steps, trace.regions)
    for path, *values in _tree(trace.regions, gpu_ns, main, _in_steps(trace, trace.regions.start_ns)):
        _add(by_path, path, 1, *values)

    operators = trace.operators
    chosen = _in_steps(trace, operators.start_ns)
    columns = [_self_ns(operators)[chosen], _charged(gpu, "operator", len(operators))[chosen]]
    codes, rows = np.unique(operators.name[chosen], return_inverse=True)
    calls, *sums = [np.bincount(rows, column, len(codes)) for column in (None, *columns)]
    by_name = {
        trace.words[code]: [int(value) for value in values]
        for code, *values in zip(codes.tolist(), calls, *sums, strict=True)
    }
    total = int(gpu.duration_ns.sum())
    nowhere = int(gpu.duration_ns[gpu.region < 0].sum())
    return _summary(len(trace.steps), _step_ns(trace), by_path, by_name, (total, nowhere) if trace.gpu else None)


def merge(summaries: Sequence[Summary]) -> Summary:
    """Add up several windows of one run; none at all make an empty summary."""
    by_path: dict[tuple[str, ...], list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for summary in summaries:
        for region in summary.regions:
            _add(by_path, region.path, region.calls, region.cpu_ns, region.self_ns, region.gpu_ns or 0)
        for operator in summary.operators:
            _add(by_name, operator.name, operator.calls, operator.self_ns, operator.gpu_ns or 0)
    gpu = None
    if any(summary.gpu_total_ns is not None for summary in summaries):
        gpu = sum(s.gpu_total_ns or 0 for s in summaries), sum(s.gpu_unattributed_ns or 0 for s in summaries)
    return _summary(sum(s.steps for s in summaries), sum(s.step_ns for s in summaries), by_path, by_name, gpu)


def _add(table: dict[_Key, list[int]], key: _Key, *values: int) -> None:
    row = table.setdefault(key, [0] * len(values))
    for column, value in enumerate(values):
        row[column] += value


def _summary(
    steps: int,
    step_ns: int,
    by_path: dict[tuple[str, ...], list[int]],
    by_name: dict[str, list[int]],
    gpu: tuple[int, int] | None,
) -> Summary:
    """The rows of the tables, which end with their GPU time, as statistics in order."""
    inside: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in by_path:
        inside.setdefault(path[:-1], []).append(path)
    tree, open_ = [], inside.get((), [])[::-1]
    while open_:
        tree.append(open_.pop())
        open_ += inside.get(tree[-1], [])[::-1]
    regions = tuple(
        RegionStat(path, calls, cpu_ns, self_ns, gpu_ns if gpu else None)
        for path in tree
        for calls, cpu_ns, self_ns, gpu_ns in [by_path[path]]
    )
    operators = tuple(
        OperatorStat(name, calls, self_ns, gpu_ns if gpu else None)
        for name, (calls, self_ns, gpu_ns) in sorted(by_name.items(), key=lambda item: -item[1][1])
    )
    return Summary(steps, step_ns, regions, operators, *(gpu or (None, None)))


def _step_ns(trace: Trace) -> int:
    """The durations of the steps, added up; without any, from the first event to the last."""
    if trace.steps:
        return int(trace.steps.duration_ns.sum())
    tables = [table for table in (trace.operators, trace.regions, trace.runtime, trace.gpu) if table]
    if not tables:
        return 0
    return int(max(table.end_ns.max() for table in tables) - min(table.start_ns[0] for table in tables))


def _in_steps(trace: Trace, times_ns: Array) -> Array:
    """Which times are in a step; all of them, where none is marked or no more than a window was recorded."""
    if not trace.steps or trace.format == "kineto":
        return np.ones(len(times_ns), bool)
    starts, ends = union(trace.steps.start_ns, trace.steps.end_ns)
    rows = np.searchsorted(starts, times_ns, "right") - 1
    inside: Array = (rows >= 0) & (times_ns < ends[rows])
    return inside


def _counts(trace: Trace) -> Array:
    """Which GPU work was launched in a step, or nobody knows where."""
    launched = trace.gpu.launch >= 0
    counts = ~launched
    counts[launched] = _in_steps(trace, trace.runtime.start_ns[trace.gpu.launch[launched]])
    return counts


def _charged(gpu: Table, link: str, rows: int) -> Array:
    """The GPU time that each row launched itself."""
    linked = gpu[link] >= 0
    return np.bincount(gpu[link][linked], gpu.duration_ns[linked], rows).astype(np.int64)  # exact up to 104 days


def _self_ns(rows: Table) -> Array:
    """The part of each duration that no row inside covers; children that overlap count once."""
    order = np.lexsort((rows.start_ns, rows.parent))
    order = order[rows.parent[order] >= 0]
    parent, start, end = rows.parent[order], rows.start_ns[order], rows.end_ns[order]
    covers = end - start
    siblings = np.flatnonzero((parent[1:] == parent[:-1]) & (start[1:] < end[:-1])) + 1
    for parent_row in np.unique(parent[siblings]).tolist():
        group = slice(*np.searchsorted(parent, (parent_row, parent_row + 1)))
        reach = np.maximum.accumulate(np.concatenate((start[group][:1], end[group][:-1])))
        covers[group] = np.maximum(end[group] - np.maximum(start[group], reach), 0)
    return rows.duration_ns - np.bincount(parent, covers, len(rows)).astype(np.int64)


def _tree(rows: Table, gpu_ns: Array, main: int, chosen: Array) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
    """Each chosen row as path, duration, self time and GPU time with the rows inside; the main thread first.

    What is nested deeper than anybody reads is left to what is around it.
    """
    inclusive, parents, counts = gpu_ns.tolist(), rows.parent.tolist(), chosen.tolist()
    for row in reversed(range(len(parents))):
        if parents[row] >= 0:
            inclusive[parents[row]] += inclusive[row]
    names, durations, self_ns = rows.text("name"), rows.duration_ns.tolist(), _self_ns(rows).tolist()
    paths: list[tuple[str, ...]] = []
    shown = []
    for name, parent, counted in zip(names, parents, counts, strict=True):
        around = paths[parent] if parent >= 0 and counts[parent] else ()
        paths.append((*around, name) if len(around) < _DEEPEST else around)
        shown.append(counted and len(around) < _DEEPEST)
    for row in np.argsort(rows.thread != main, kind="stable").tolist():
        if shown[row]:
            yield paths[row], durations[row], self_ns[row], inclusive[row]
