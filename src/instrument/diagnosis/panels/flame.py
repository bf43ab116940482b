"""The flame graph: regions, modules, operators and kernels by nesting, with their time on the CPU and the GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...page.names import shown_name
from ...page.tree import nodes_of, pruned
from ...traces.intervals import merge_overlaps, total_ns
from ...traces.lanes import group_rows
from ...traces.nest import NestedRanges
from ...traces.table import MEMCPY, Array, Table
from ..diagnosis_data import DiagnosisData
from ..trace_facts import TraceFacts

_MAX_NODES = 4000
_MODULE = re.compile(r"^nn\.Module: ")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|(?:^|[\W_])backward(?:$|[\W_])", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#")
KINDS = ("thread", "region", "module", "operator", "compute", "communication", "copies")
"""The kinds of nodes; the last three are kernels with memsets, those that communicate, and memcpys."""

_THREAD, _REGION, _MODULES, _OPERATOR, _WORK = range(5)

_UNKNOWN = "launched by no recorded call"


def flame_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the tree of a step; None without operators and regions.

    Each node has its time without the nodes inside it: on its thread (``cpu``), and of the GPU work that it
    launched (``gpu``; only kernels, memcpys and memsets have some). The times of all nodes of the main thread add
    up to the time of the steps, the GPU times to the sum of the durations of all GPU work of the window.
    """
    facts = diagnosis.facts
    if facts is None or not (facts.trace.operators or facts.trace.regions):
        return None
    names, parent, key, kind, cpu, gpu, calls = _nodes(facts)
    backward = _backward(parent, key, kind, names)
    size = len(KINDS)
    code = (key * 2 + backward) * size + kind
    tree = pruned(parent, code, (cpu, gpu, calls), _MAX_NODES)
    known = tree.key >= 0
    used, of = np.unique(tree.key[known] // (2 * size), return_inverse=True)
    name = np.full(len(tree.key), -1)
    name[known] = of
    return {
        "id": "flame",
        "type": "flame",
        "title": "Flame graph",
        "kinds": KINDS,
        "steps": diagnosis.steps,
        "each": diagnosis.each_step,
        "names": [shown_name(names[number]) for number in used.tolist()],
        "parent": tree.parent.tolist(),
        "name": name.tolist(),
        "kind": np.where(known, tree.key % size, -1).tolist(),
        "backward": np.where(known, tree.key // size % 2, 0).tolist(),
        "joined": tree.joined.tolist(),
        "cpu": tree.sums[0].tolist(),
        "gpu": tree.sums[1].tolist(),
        "calls": tree.sums[2].tolist(),
    }


def _nodes(facts: TraceFacts) -> tuple[list[str], Array, Array, Array, Array, Array, Array]:
    """Return names, and for each node its parent, number of its name, kind, CPU and GPU time, and calls."""
    trace, (begin, end) = facts.trace, facts.recorded
    ranges, kinds = _ranges(facts)
    start = np.clip(ranges.start_ns, begin, end)
    length = np.clip(ranges.end_ns, begin, end) - start
    nested = NestedRanges(ranges.start_ns, ranges.end_ns, ranges.thread)
    threads = np.unique(ranges.thread)
    names = [*trace.strings, *(_thread_name(facts, number) for number in threads.tolist()), _UNKNOWN]
    of_thread = np.searchsorted(threads, ranges.thread)
    # The events: a root for each thread, a root for work of unknown origin, the ranges, and the GPU work.
    first, count = len(threads) + 1, len(ranges)
    parents = np.where(nested.parents >= 0, nested.parents + first, of_thread)
    work = facts.gpu
    launched = _innermost(facts, nested, first)
    key = np.concatenate(
        (
            np.arange(len(threads)) + len(trace.strings), [len(names) - 1], ranges.name,
            np.where(work.short_name > 0, work.short_name, work.name),
        )
    )  # fmt: skip
    of_work = _WORK + np.where(work.category == MEMCPY, 2, facts.communication.astype(np.int64))
    kind = np.concatenate((np.full(first, _THREAD), kinds, of_work))
    above = np.concatenate((np.full(first, -1), parents, launched))
    node, parent, code = nodes_of(above, key.astype(np.int64) * len(KINDS) + kind)
    inside = np.zeros(first + count, np.int64)
    np.add.at(inside, parents, length)
    spent = np.concatenate((_thread_ns(facts, ranges, threads, start, length), [0], length))
    cpu = np.concatenate((spent - inside, np.zeros(len(work), np.int64)))
    gpu = np.concatenate((np.zeros(first + count, np.int64), work.duration_ns))
    calls = np.ones(len(key), np.int64)
    calls[:first] = 0
    sums = []
    for values in (cpu, gpu, calls):
        total = np.zeros(len(parent), np.int64)
        np.add.at(total, node, values)
        sums.append(total)
    return names, parent, code // len(KINDS), code % len(KINDS), sums[0], sums[1], sums[2]


def _ranges(facts: TraceFacts) -> tuple[Table, Array]:
    """Return the regions, modules and operators of the window, in order of start, and the kind of each."""
    trace, (begin, end) = facts.trace, facts.recorded
    modules = trace.frames.where(trace.frames.matching("name", _MODULE))
    regions = trace.regions.where(~trace.regions.matching("name", _STEP))
    parts = [(regions, _REGION), (modules, _MODULES), (trace.operators, _OPERATOR)]
    columns = {
        name: np.concatenate([table[name] for table, _ in parts])
        for name in ("start_ns", "duration_ns", "name", "thread")
    }
    kinds = np.concatenate([np.full(len(table), kind) for table, kind in parts])
    merged = Table(columns, trace.strings)
    seen = (merged.start_ns < end) & (merged.end_ns > begin) & (merged.thread >= 0)
    order = np.lexsort((kinds[seen], -merged.duration_ns[seen], merged.start_ns[seen]))
    rows = np.flatnonzero(seen)[order]
    return merged.where(rows), kinds[rows]


def _innermost(facts: TraceFacts, nested: NestedRanges, first: int) -> Array:
    """Return the event inside which each GPU work was launched: a range, or the root of unknown origin."""
    work, runtime = facts.gpu, facts.trace.runtime
    found = np.full(len(work), first - 1)
    known = np.flatnonzero(work.launch >= 0)
    calls = work.launch[known]
    rows = nested.innermost_at(runtime.start_ns[calls], runtime.thread[calls])
    found[known[rows >= 0]] = rows[rows >= 0] + first
    return found


def _thread_ns(facts: TraceFacts, ranges: Table, threads: Array, start: Array, length: Array) -> Array:
    """Return the time of each thread: of the main thread the whole window, of others the time inside any range."""
    by_thread = dict(group_rows(ranges.thread))
    found = []
    for number in threads.tolist():
        rows = by_thread[number]
        busy = total_ns(merge_overlaps(start[rows], start[rows] + length[rows]))
        found.append(facts.recorded[1] - facts.recorded[0] if number == facts.main_thread else busy)
    return np.array(found, np.int64)


def _thread_name(facts: TraceFacts, number: int) -> str:
    thread = facts.trace.threads[number]
    if number == facts.main_thread:
        return "main thread"
    return f"autograd thread {thread.thread}" if thread.autograd else thread.name or f"thread {thread.thread}"


def _backward(parent: Array, key: Array, kind: Array, names: list[str]) -> Array:
    """Return whether each node belongs to the backward pass: by its name, its thread, or a node above it."""
    by_name = {number: _BACKWARD.search(names[number][:200]) is not None for number in np.unique(key).tolist()}
    found = [
        (kind_ < _WORK and by_name[number]) or (kind_ == _THREAD and names[number].startswith("autograd thread"))
        for number, kind_ in zip(key.tolist(), kind.tolist(), strict=True)
    ]
    for node, above in enumerate(parent.tolist()):
        found[node] = found[node] or (above >= 0 and found[above])
    return np.array(found, np.int64)
