"""`Graph`: the events that a replay times, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..traces.blocked_launches import BlockedLaunches, find_blocked_launches
from ..traces.intervals import Intervals, merge_overlaps
from ..traces.lanes import group_rows
from ..traces.synchronizations import Synchronization, find_synchronizations
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .cpu_points import END, FORK, JOIN, LAUNCH, RETURN, START, SYNC, UNBLOCKED, CpuPoints, cpu_points
from .delays import RETURN_NS, measure_delays, median
from .edges import ANCHORED, CALLED, EVENT, HANDED_OFF, LAUNCHED, ON_CPU, RETURNED, STREAM, Edges, edges, in_order
from .gpu_order import GpuOrder, gpu_order
from .handoffs import MAX_THREADS, Handoffs, find_handoffs
from .loop_steps import LoopSteps, loop_steps
from .stream_waits import find_event_waits, find_stream_waits
from .sync_targets import MAX_PAIRS, find_sync_targets, work_ended_by

_LONGEST_CALL_NS = 50_000  # of a call that has nothing to wait for; a longer one waits for something unknown


@dataclass(frozen=True)
class Graph:
    """The events that a replay times, as nodes, and what each waits for, as edges from earlier nodes.

    Nodes are points on threads and ends of GPU work. Node 0 is the start of the recording.

    Attributes:
        trace: the trace.
        loop: the steps and their work.
        waits: the synchronizations.
        order: the order of the GPU work.
        edges: the edges.
        start_ns: the start of the recording.
        recorded_ns: the recorded time of each node after it.
        thread: the thread of each node; -1 for GPU work.
        work: the row of the GPU work that ends at each node, or -1.
        work_nodes: the node of each row of `Trace.gpu`.
        start_nodes: the node of the start of each step.
        end_nodes: the node of the end of each step on the CPU.
        return_nodes: the node at which each synchronization returns.
        incomplete: what the graph lacks because the trace has too much of something; empty if it lacks nothing.
    """

    trace: Trace
    loop: LoopSteps
    waits: list[Synchronization]
    order: GpuOrder
    edges: Edges
    start_ns: int
    recorded_ns: Array
    thread: Array
    work: Array
    work_nodes: Array
    start_nodes: Array
    end_nodes: Array
    return_nodes: Array
    incomplete: str


class _Points:
    """The points on threads with their nodes.

    Attributes:
        points: the points.
        node: the node of each.
    """

    def __init__(self, points: CpuPoints, node: Array) -> None:
        self.points, self.node = points, node

    def nodes(self, kind: int, count: int) -> Array:
        """Return the nodes of the points of a kind by what they belong to, for this many of these."""
        found, rows = np.zeros(count, np.int64), self.points.kind == kind
        found[self.points.of[rows]] = self.node[rows]
        return found


def build_graph(trace: Trace) -> Graph:
    """Return the graph of a trace with a `loop_thread`; without steps, the whole trace counts as one step."""
    loop = loop_steps(trace)
    steps, gpu, order, full = loop.table, trace.gpu, gpu_order(trace), find_blocked_launches(trace)
    waits = [wait for wait in find_synchronizations(trace) if wait.thread >= 0 and wait.blocked_ns > 0]
    threads = _threads(trace, steps, waits)
    handoffs = find_handoffs(trace, threads, _blocked(waits))
    points = cpu_points(trace, steps, waits, full, handoffs)

    times = np.concatenate((points.time_ns, order.queued_ns))
    kinds = np.concatenate((points.kind, np.full(len(gpu), SYNC + 1)))
    ties = np.concatenate((np.zeros(len(points.kind), np.int64), gpu.start_ns))
    node = np.empty(len(times), np.int64)
    node[np.lexsort((ties, kinds, times))] = np.arange(1, len(times) + 1)
    on_cpu, work_nodes = _Points(points, node[: len(points.kind)]), node[len(points.kind) :]
    recorded = np.concatenate((points.time_ns, gpu.end_ns))
    start = int(min(points.time_ns.min(), gpu.start_ns.min(initial=points.time_ns.min())))
    parts = (
        *_cpu_edges(on_cpu, handoffs, full, start),
        *_gpu_edges(trace, order, on_cpu, work_nodes, start),
        *_return_edges(trace, waits, order, full, on_cpu, work_nodes),
    )
    return Graph(
        trace,
        loop,
        waits,
        order,
        in_order(parts),
        start,
        _by_node(node, recorded - start, 0),
        _by_node(node, np.concatenate((points.thread, np.full(len(gpu), -1))), -1),
        _by_node(node, np.concatenate((np.full(len(points.kind), -1), np.arange(len(gpu)))), -1),
        work_nodes,
        on_cpu.nodes(START, len(steps)),
        on_cpu.nodes(END, len(steps)),
        on_cpu.nodes(RETURN, len(waits)),
        _incomplete(len(threads), len(waits), int(order.stream.max(initial=0)) + 1),
    )


def _incomplete(threads: int, waits: int, streams: int) -> str:
    if threads > MAX_THREADS:
        return f"{threads:,} threads launch work or wait for the GPU, more than {MAX_THREADS}"
    if waits * streams > MAX_PAIRS:
        return f"the trace has {waits:,} synchronizations and {streams:,} streams"
    return ""


def _by_node(node: Array, values: Array, of_start: int) -> Array:
    found = np.full(len(node) + 1, of_start, np.int64)
    found[node] = values
    return found


def _threads(trace: Trace, steps: Table, waits: Sequence[Synchronization]) -> list[int]:
    """Return the threads that run steps, launch work or wait for the GPU."""
    launching = trace.runtime.thread[trace.gpu.launch[trace.gpu.launch >= 0]]
    waiting = np.array([wait.thread for wait in waits], np.int64)
    return [
        number for number in np.unique(np.concatenate((steps.thread, launching, waiting))).tolist() if number >= 0
    ]


def _blocked(waits: Sequence[Synchronization]) -> dict[int, Intervals]:
    """Return the times during which each thread waits for the GPU."""
    times = np.array([(wait.thread, wait.start_ns, wait.start_ns + wait.blocked_ns) for wait in waits], np.int64)
    thread, start, end = times.reshape(-1, 3).T
    return {number: merge_overlaps(start[rows], end[rows]) for number, rows in group_rows(thread)}


def _cpu_edges(on_cpu: _Points, handoffs: Handoffs, full: BlockedLaunches, start_ns: int) -> Iterator[Edges]:
    """Yield the edges between points on threads."""
    points, node = on_cpu.points, on_cpu.node
    first = np.ones(len(node), bool)
    first[1:] = points.thread[1:] != points.thread[:-1]
    begin = first & (points.kind != JOIN)
    yield edges(ANCHORED, 0, node[begin], points.time_ns[begin] - start_ns)
    after = np.flatnonzero(~first & (points.kind != JOIN) & (points.kind != RETURN))
    until = points.time_ns[after]
    blocked = points.kind[after] == UNBLOCKED
    since = points.time_ns[after - 1]
    until[blocked] = np.maximum(full.start_ns[points.of[after[blocked]]], since[blocked])
    yield edges(ON_CPU, node[after - 1], node[after], 0, since, until)
    count = len(handoffs.thread)
    forks, joins = on_cpu.nodes(FORK, count), on_cpu.nodes(JOIN, count)
    yield edges(HANDED_OFF, forks, joins, 0, handoffs.by_ns, handoffs.time_ns)


def _gpu_edges(
    trace: Trace, order: GpuOrder, on_cpu: _Points, work_nodes: Array, start_ns: int
) -> Iterator[Edges]:
    """Yield the edges to the ends of GPU work."""
    gpu, event_waits = trace.gpu, find_event_waits(trace, order)
    delays = measure_delays(trace, order, event_waits[:, 0])
    launch_nodes = on_cpu.nodes(LAUNCH, len(trace.runtime))
    launched = np.flatnonzero((gpu.launch >= 0) & ~order.same_launch)
    yield edges(LAUNCHED, launch_nodes[gpu.launch[launched]], work_nodes[launched], delays.launch[launched])
    queued = np.flatnonzero((order.previous >= 0) & ~order.before)
    yield edges(STREAM, work_nodes[order.previous[queued]], work_nodes[queued], delays.stream[queued])
    first = np.flatnonzero(order.before | ((order.previous < 0) & (gpu.launch < 0)))
    yield edges(ANCHORED, 0, work_nodes[first], gpu.start_ns[first] - start_ns)
    work, target, delay = find_stream_waits(trace, order, delays, event_waits)
    yield edges(EVENT, work_nodes[target], work_nodes[work], delay)


def _return_edges(
    trace: Trace,
    waits: Sequence[Synchronization],
    order: GpuOrder,
    full: BlockedLaunches,
    on_cpu: _Points,
    work_nodes: Array,
) -> Iterator[Edges]:
    """Yield the edges to the returns of calls that wait for the GPU."""
    sync, work = find_sync_targets(trace, waits, order)
    began, returned = (
        np.array(times, np.int64)
        for times in ([wait.start_ns for wait in waits], [wait.start_ns + wait.blocked_ns for wait in waits])
    )
    done = began.copy()
    np.maximum.at(done, sync, trace.gpu.end_ns[work])
    blocked, (after, alone) = done > began, np.full((2, len(waits)), RETURN_NS)
    _, call = np.unique([f"{wait.kind} {wait.call}" for wait in waits], return_inverse=True)
    for _, rows in group_rows(call):
        some, others = rows[blocked[rows]], rows[~blocked[rows]]
        after[rows] = median((returned - done)[some], RETURN_NS)
        alone[rows] = min(median((returned - began)[others], RETURN_NS), _LONGEST_CALL_NS)
    nodes, calls = on_cpu.nodes(RETURN, len(waits)), on_cpu.nodes(SYNC, len(waits))
    yield edges(CALLED, calls, nodes, alone)
    yield edges(RETURNED, work_nodes[work], nodes[sync], after[sync])
    freed = work_ended_by(trace, order, full.end_ns, full.start_ns)
    some = np.flatnonzero(freed >= 0)
    delay = median((full.end_ns - trace.gpu.end_ns[freed])[some], 0) if len(some) else 0
    yield edges(RETURNED, work_nodes[freed[some]], on_cpu.nodes(UNBLOCKED, len(full.end_ns))[some], delay)
