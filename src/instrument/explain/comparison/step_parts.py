"""Divides one step into parts that add up to it, to the nanosecond."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...base.trace_marks import STEP_PREFIX
from ...read.tables.intervals import merge_overlaps
from ...read.tables.nest import NestedRanges
from ...read.tables.steps import launched_before
from ...read.tables.table import MEMCPY, Array, Table
from ..diagnosis.verdict import PART_OF_CAUSE, PARTS
from ..metrics.idle import INPUT, SHORT_NS, idle_causes
from ..metrics.tables import sum_by_group
from ..replay.critical_path import region_path
from ..rules.trace_facts import TraceFacts

KINDS = PARTS | {
    "unassigned": "an idle GPU whose next work has no launch in the trace",
    "cpu": "work of the CPU, in a trace without GPU work",
}
"""The kinds of parts: those of a diagnosis, what cannot be assigned, and work of the CPU."""

_CLASSES = ("compute", "communication", "copies")


class Key(NamedTuple):
    """What a part of a step is.

    Attributes:
        kind: one of `KINDS`.
        region: the names of the regions, outermost first: those that launched GPU work, else those of the
            loop's thread.
        operator: the operator that launched GPU work, or the outermost one on the CPU; empty if there is none.
        kernel: the short name of the kernel, memcpy or memset; empty for other kinds.
    """

    kind: str
    region: tuple[str, ...]
    operator: str
    kernel: str


class Amount(NamedTuple):
    """How much of a step a part takes.

    Attributes:
        ns: its time.
        calls: the number of kernels, memcpys and memsets, or of pieces of idle time or of the CPU's work.
    """

    ns: int
    calls: int


def step_parts(facts: TraceFacts, start_ns: int, end_ns: int) -> dict[Key, Amount]:
    """Return the parts of the time between two moments; their times add up to it.

    Each moment belongs to one part. If GPU work runs, it is the work of the first class that runs: compute (with
    memsets), communication, copies; of several, the one that started first. Else it belongs to the cause of idle
    time, as in a diagnosis, and to the region of the loop's thread at the start of the gap. In a trace without
    GPU work, it belongs to the innermost region and the outermost operator on the loop's thread.
    """
    amounts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    pieces = _of_gpu if facts.trace.gpu else _of_cpu
    for key, ns, calls in pieces(facts, start_ns, end_ns):
        amounts[key][0] += ns
        amounts[key][1] += calls
    return {key: Amount(*numbers) for key, numbers in amounts.items()}


def _of_gpu(facts: TraceFacts, start_ns: int, end_ns: int) -> Iterator[tuple[Key, int, int]]:
    gpu, operators = facts.trace.gpu, facts.trace.operators
    rows = np.flatnonzero((gpu.start_ns < end_ns) & (gpu.end_ns > start_ns))
    starts, ends = np.maximum(gpu.start_ns[rows], start_ns), np.minimum(gpu.end_ns[rows], end_ns)
    rank = np.where(gpu.category[rows] == MEMCPY, 2, facts.replayer.communication[rows].astype(int))
    ns = _exclusive_ns(starts, ends, rank)
    names = np.append(operators.name, 0)[gpu.operator[rows]]  # 0 is the empty string
    codes = np.stack((rank, gpu.region[rows], names, gpu.short_name[rows]))
    kinds, of, calls = np.unique(codes, axis=1, return_inverse=True, return_counts=True)
    sums = sum_by_group(ns, of.reshape(-1), kinds.shape[1])
    columns = (column.tolist() for column in (*kinds, sums, calls))
    for kind, region, name, kernel, total, count in zip(*columns, strict=True):
        path = _path(facts.trace.regions, region)
        yield Key(_CLASSES[kind], path, facts.trace.strings[name], gpu.strings[kernel]), total, count
    idle = idle_causes(facts.trace, merge_overlaps(starts, ends), (start_ns, end_ns), facts.waits)
    following = np.searchsorted(gpu.start_ns, idle.end_ns)
    at, early = _regions_at(facts, idle.start_ns), np.append(launched_before(facts.trace), False)[following]
    for cause, times in idle.by_cause.items():
        for gap in np.flatnonzero(times).tolist():
            kind = "unassigned" if cause == "unknown" else PART_OF_CAUSE[cause]
            if kind == "unassigned" and early[gap]:  # launched in time, as before the recording
                kind = "latency" if idle.end_ns[gap] - idle.start_ns[gap] < SHORT_NS else "other"
            yield Key(kind, at[gap], "", ""), int(times[gap]), 1


def _exclusive_ns(starts: Array, ends: Array, rank: Array) -> Array:
    """Return how long each interval, in order of start, is the first of those that are open, by rank and start."""
    shown = ends - starts
    reach = np.maximum.accumulate(ends)
    overlap = np.zeros(len(starts), bool)
    overlap[1:] = starts[1:] < reach[:-1]
    overlap[:-1] |= overlap[1:]
    rows = np.flatnonzero(overlap)
    shown[rows] = _by_priority(*(column[rows].tolist() for column in (starts, ends, rank)))
    return shown


def _by_priority(starts: list[int], ends: list[int], rank: list[int]) -> list[int]:
    shown = [0] * len(starts)
    edges = [(time, 0, row) for row, time in enumerate(ends)] + [(time, 1, row) for row, time in enumerate(starts)]
    open_: list[tuple[int, int, int]] = []
    before = 0
    for time, begins, row in sorted(edges):
        while open_ and ends[open_[0][2]] <= before:
            heapq.heappop(open_)
        if open_:
            shown[open_[0][2]] += time - before
        before = time
        if begins:
            heapq.heappush(open_, (rank[row], starts[row], row))
    return shown


def _of_cpu(facts: TraceFacts, start_ns: int, end_ns: int) -> Iterator[tuple[Key, int, int]]:
    main, trace = facts.main_thread, facts.trace
    regions = trace.regions.where(trace.regions.thread == main)
    outer = trace.operators.where((trace.operators.thread == main) & (trace.operators.parent < 0))
    edges = [times for table in (regions, outer) for times in (table.start_ns, table.end_ns)]
    times = np.unique(np.clip(np.concatenate([*edges, [start_ns, end_ns]]), start_ns, end_ns))
    at = _regions_at(facts, times[:-1])
    operators = NestedRanges(outer.start_ns, outer.end_ns).innermost_at(times[:-1]).tolist()
    names = outer.text("name")
    for path, row, ns in zip(at, operators, np.diff(times).tolist(), strict=True):
        name = names[row] if row >= 0 else ""
        waits = INPUT.search(name) or any(map(INPUT.search, path))
        yield Key("input" if waits else "cpu", path, name, ""), ns, 1


def _regions_at(facts: TraceFacts, times_ns: Array) -> list[tuple[str, ...]]:
    """Return the regions that are open on the loop's thread at each time."""
    regions = facts.trace.regions
    nested = NestedRanges(regions.start_ns, regions.end_ns, regions.thread)
    rows = nested.innermost_at(times_ns, np.full(len(times_ns), facts.main_thread)).tolist()
    paths = {row: _path(regions, row) for row in set(rows)}
    return [paths[row] for row in rows]


def _path(regions: Table, row: int) -> tuple[str, ...]:
    return tuple(name for name in region_path(regions, row) if not name.startswith(STEP_PREFIX))
