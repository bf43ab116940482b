"""`Graph`: the events that a replay times, as nodes, and what each waits for, as edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...read.measures.launches import BlockedLaunches, find_blocked_launches
from ...read.measures.synchronizations import Synchronization, columns_of, find_synchronizations
from ...read.tables.intervals import Intervals, covered_ns, merge_overlaps, union
from ...read.tables.lanes import distinct_values, group_rows
from ...read.tables.steps import earlier_work, loop_thread, process_of_threads, whole_trace
from ...read.tables.table import Array, Table, table
from ...read.tables.trace import Trace
from ..metrics.idle import CHECKPOINT, EVALUATION, input_ranges, work_of_cpu
from . import gpu_waits
from .edges import ANCHORED, CALLED, EVENT, HANDED_OFF, LAUNCHED, ON_CPU, RETURNED, STREAM, Edges, edges, in_order
from .gpu_waits import RETURN_NS, GpuOrder, median
from .pieces import Pieces, pieces_of


@dataclass(frozen=True)
class LoopSteps:
    """The steps of a trace and the GPU work that belongs to them.

    Attributes:
        table: the steps; without any, the whole trace counts as one.
        of_work: for each row of `Trace.gpu`, the step that launched it, or -1.
        before: whether it was launched before the recording, and counts for nothing.
        of_process: the rows of the steps of each process, in order.
    """

    table: Table
    of_work: Array
    before: Array
    of_process: list[Array]

    def bounds(self, start_ns: Array, end_ns: Array, work_end_ns: Array) -> tuple[Array, Array]:
        """Return when each step starts and ends in ns; a step starts when the one before it in its process ends.

        A step ends, on the CPU and on the GPU, with all its work and that of the steps before it. Steps of
        different processes are independent. The first step starts when the GPU has done the work that was launched
        before the recording, if that is later.

        Args:
            start_ns: the start of each step on the CPU.
            end_ns: the end of each step on the CPU.
            work_end_ns: the end of each row of `Trace.gpu`.
        """
        ends = end_ns.copy()
        rows = np.flatnonzero(self.of_work >= 0)
        np.maximum.at(ends, self.of_work[rows], work_end_ns[rows])
        for steps in self.of_process:
            ends[steps] = np.maximum.accumulate(ends[steps])
        earlier = work_end_ns[self.before].max(initial=start_ns.min())
        starts: Array = np.where(earlier < ends, np.maximum(start_ns, earlier), start_ns)
        for steps in self.of_process:
            starts[steps[1:]] = ends[steps[:-1]]
        return starts, ends

    def recorded_bounds(self, trace: Trace) -> tuple[Array, Array]:
        """Return when each step started and ended in the recording of these steps."""
        return self.bounds(self.table.start_ns, self.table.end_ns, trace.gpu.end_ns)

    def on_cpu(self, start_ns: Array, end_ns: Array) -> Array:
        """Return the time on the CPU from the end of the step before, or the start of the first step, in ns."""
        lengths: Array = end_ns - start_ns
        for steps in self.of_process:
            lengths[steps[1:]] = np.diff(end_ns[steps])
        return lengths


def loop_steps(trace: Trace) -> LoopSteps:
    """Return the steps of a trace; without any, the whole trace is one."""
    steps, before = trace.steps or _whole_trace(trace), earlier_work(trace)
    return LoopSteps(
        steps,
        trace.gpu.step if trace.steps else np.where(before, -1, 0),
        before,
        [rows for _, rows in group_rows(process_of_threads(trace)[steps.thread])],
    )


def _whole_trace(trace: Trace) -> Table:
    """Return the whole trace as one step, which ends on the CPU with the last launch on the loop's thread."""
    (first, last), thread = whole_trace(trace), loop_thread(trace)
    if trace.gpu:
        launches = trace.runtime.where(trace.gpu.launch[trace.gpu.launch >= 0])
        own_ns = launches.start_ns[launches.thread == thread]
        last = int(own_ns[own_ns <= last].max(initial=first))
    columns = {"start_ns": first, "duration_ns": last - first, "thread": thread}
    return table("steps", {name: np.array([value]) for name, value in columns.items()}, trace.strings)


_QUIET_NS = 5_000
MAX_THREADS = 128
"""The number of threads above which hand-offs are not looked for."""


class Handoffs(NamedTuple):
    """The moments at which a thread goes on because another thread is done.

    Attributes:
        thread: the thread that goes on.
        time_ns: when it goes on.
        by_thread: the thread that it waited for.
        by_ns: the last event on that thread before.
    """

    thread: Array
    time_ns: Array
    by_thread: Array
    by_ns: Array


def find_handoffs(trace: Trace, threads: Sequence[int], blocked: dict[int, Intervals]) -> Handoffs:
    """Return the hand-offs between threads.

    A thread waited for another if nothing starts or ends on it for 5 us or since the beginning, and the other
    thread has events during at least half of this time. Times in which the thread waits for the GPU do not count.
    The trace does not show locks and queues.

    Args:
        trace: the trace.
        threads: the threads; of more than `MAX_THREADS`, none is compared.
        blocked: the times during which each thread waits for the GPU.
    """
    edges = {thread: _edges(trace, thread) for thread in threads if len(threads) <= MAX_THREADS}
    first = min((int(own[0]) for own in edges.values() if len(own)), default=0)
    handoffs = [np.empty((4, 0), np.int64)]
    for thread, own in edges.items():
        own = np.concatenate(([first - 1], own))
        quiet = np.flatnonzero(np.diff(own) >= _QUIET_NS)
        since, until = own[quiet], own[quiet + 1]
        if thread in blocked:
            free = covered_ns(blocked[thread], since, until) == 0
            since, until = since[free], until[free]
        last, by = np.full(len(since), -1), np.full(len(since), -1)
        for other, times in edges.items():
            if other == thread or not len(times):
                continue
            begin = np.searchsorted(times, since, "right")
            final = np.searchsorted(times, until) - 1
            inside = final >= begin
            start, end = times[np.minimum(begin, len(times) - 1)], times[np.maximum(final, 0)]
            waits = inside & (2 * (end - start) >= until - since) & (end > last)
            last[waits], by[waits] = end[waits], other
        some = by >= 0
        handoffs.append(np.stack((np.full(int(some.sum()), thread), until[some], by[some], last[some])))
    return Handoffs(*np.concatenate(handoffs, axis=1))


def _edges(trace: Trace, thread: int) -> Array:
    """Return the times at which anything starts or ends on a thread, or a step ends."""
    tables = [table.where(table.thread == thread) for table in (trace.operators, trace.regions, trace.runtime)]
    steps = trace.steps.end_ns[trace.steps.thread == thread]
    return distinct_values(
        np.concatenate([steps, *(times for table in tables for times in (table.start_ns, table.end_ns))])
    )


RETURN, UNBLOCKED, JOIN, END, FORK, START, LAUNCH, SYNC = range(8)
"""Kinds of points, in the order of those at one time."""


class CpuPoints(NamedTuple):
    """Points on threads, in order of thread and time.

    Attributes:
        thread: the thread.
        time_ns: the recorded time.
        kind: what happens: a step starts (START) or ends (END); a call launches work (LAUNCH) or begins to wait
            for the GPU (SYNC); such a call (RETURN) or a launch into a full queue (UNBLOCKED) goes on; the thread
            goes on after another one (JOIN), or lets another go on (FORK).
        of: the row of the step, of the call of `Trace.runtime`, of the synchronization, of the blocked launch, or
            of the hand-off.
        node: the node of each in the graph.
    """

    thread: Array
    time_ns: Array
    kind: Array
    of: Array
    node: Array

    def nodes(self, kind: int, count: int) -> Array:
        """Return the nodes of the points of a kind by what they belong to, for this many of these."""
        nodes, rows = np.zeros(count, np.int32), self.kind == kind
        nodes[self.of[rows]] = self.node[rows]
        return nodes


def cpu_points(
    trace: Trace, steps: Table, waits: Sequence[Synchronization], full: BlockedLaunches, handoffs: Handoffs
) -> CpuPoints:
    """Return the points of a trace, which have no nodes yet.

    Args:
        trace: the trace.
        steps: the steps.
        waits: the synchronizations.
        full: the launches that found the queue of the GPU full.
        handoffs: the hand-offs between threads.
    """
    runtime = trace.runtime
    launches = distinct_values(trace.gpu.launch[trace.gpu.launch >= 0])
    thread, began, took = columns_of(waits, "thread", "start_ns", "blocked_ns")
    parts = (
        (JOIN, handoffs.thread, handoffs.time_ns, None),
        (START, steps.thread, steps.start_ns, None),
        (LAUNCH, runtime.thread[launches], runtime.start_ns[launches], launches),
        (SYNC, thread, began, None),
        (RETURN, thread, began + took, None),
        (UNBLOCKED, full.thread, full.end_ns, None),
        (END, steps.thread, steps.end_ns, None),
        (FORK, handoffs.by_thread, handoffs.by_ns, None),
    )
    threads = np.concatenate([part[1] for part in parts]).astype(np.int32)
    times = np.concatenate([part[2] for part in parts]).astype(np.int64)
    kinds = np.concatenate([np.full(len(part[1]), part[0], np.int8) for part in parts])
    of = np.concatenate([np.arange(len(part[1])) if part[3] is None else part[3] for part in parts])
    order = np.lexsort((kinds, times, threads))
    of = of[order].astype(np.int32)
    return CpuPoints(threads[order], times[order], kinds[order], of, np.empty(0, np.int32))


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

    @cached_property
    def pieces(self) -> Pieces:
        """The nodes in pieces, for a fast replay."""
        return self.pieces_with(self.edges)

    @cached_property
    def weight_ns(self) -> Array:
        """The time of each edge; see `Replay`."""
        weight_ns: Array = self.edges.delay_ns + self.edges.until_ns - self.edges.since_ns
        work = self.work[self.edges.target]
        on_gpu = work >= 0
        weight_ns[on_gpu] += self.trace.gpu.duration_ns[work[on_gpu]]
        return weight_ns

    def pieces_with(self, edges: Edges) -> Pieces:
        """Return the nodes in pieces, with other edges."""
        streams = np.append(self.order.stream, 0)[self.work] + 1 + self.thread.max()
        return pieces_of(edges, np.where(self.work >= 0, streams, self.thread))

    @cached_property
    def batches(self) -> dict[int, Intervals]:
        """When the loop waits for its next batch, by thread."""
        return times_by_thread(*input_ranges(self.trace))

    @cached_property
    def not_launching(self) -> dict[int, Intervals]:
        """When each thread does what no CUDA graph makes cheaper.

        It waits for a batch, compiles, collects garbage, starts or waits for the driver, evaluates, or saves.
        """
        beside = [
            self.trace.regions.where(self.trace.regions.matching("name", name))
            for name in (EVALUATION, CHECKPOINT)
        ]
        return times_by_thread(*(each for tables in work_of_cpu(self.trace).values() for each in tables), *beside)

    def inside_ns(self, edges: Edges, rows: Array, times: Mapping[int, Intervals]) -> Array:
        """Return for how long the CPU's work of each of these edges is in the times of its thread, in ns."""
        inside, thread = np.zeros(len(rows), np.int64), self.thread[edges.target[rows]]
        for number, own_times in times.items():
            own = np.flatnonzero(thread == number)
            since, until = edges.since_ns[rows[own]], edges.until_ns[rows[own]]
            inside[own] = covered_ns(own_times, since, until)
        return inside


def times_by_thread(*tables: Table) -> dict[int, Intervals]:
    """Return when each thread is in any of these events; those of unknown threads do not count."""
    times: dict[int, Intervals] = {}
    for events in tables:
        for thread, rows in group_rows(events.thread):
            if thread >= 0:
                merged = merge_overlaps(events.start_ns[rows], events.end_ns[rows])
                times[thread] = union(times[thread], merged) if thread in times else merged
    return times


def graph_of(trace: Trace) -> Graph:
    """Return the graph of a trace with a `loop_thread`; without steps, the whole trace counts as one step."""
    loop = loop_steps(trace)
    steps, gpu, order, full = loop.table, trace.gpu, gpu_waits.gpu_order(trace), find_blocked_launches(trace)
    waits = [wait for wait in find_synchronizations(trace) if wait.thread >= 0 and wait.blocked_ns > 0]
    threads = _threads(trace, steps, waits)
    handoffs = find_handoffs(trace, threads, _blocked(waits))
    points = cpu_points(trace, steps, waits, full, handoffs)

    times = np.concatenate((points.time_ns, order.queued_ns))
    kinds = np.concatenate((points.kind, np.full(len(gpu), SYNC + 1, np.int8)))
    ties = np.concatenate((np.zeros(len(points.kind), np.int64), gpu.start_ns))
    node = np.empty(len(times), np.int32)
    node[np.lexsort((ties, kinds, times))] = np.arange(1, len(times) + 1)
    del times, kinds, ties
    points, work_nodes = points._replace(node=node[: len(points.kind)]), node[len(points.kind) :]
    start = int(min(points.time_ns.min(), gpu.start_ns.min(initial=points.time_ns.min())))
    recorded, (thread, work) = np.zeros(len(node) + 1, np.int64), np.full((2, len(node) + 1), -1, np.int32)
    recorded[node] = np.concatenate((points.time_ns, gpu.end_ns)) - start
    thread[points.node], work[work_nodes] = points.thread, np.arange(len(gpu))
    parts = (
        *_cpu_edges(points, handoffs, full, start),
        *_gpu_edges(trace, order, points, work_nodes, start),
        *_return_edges(trace, waits, order, full, points, work_nodes),
    )
    return Graph(
        trace,
        loop,
        waits,
        order,
        in_order(parts),
        start,
        recorded,
        thread,
        work,
        work_nodes,
        points.nodes(START, len(steps)),
        points.nodes(END, len(steps)),
        points.nodes(RETURN, len(waits)),
        _incomplete(len(threads), len(waits), int(order.stream.max(initial=0)) + 1),
    )


def _incomplete(threads: int, waits: int, streams: int) -> str:
    if threads > MAX_THREADS:
        return f"{threads:,} threads launch work or wait for the GPU, more than {MAX_THREADS}"
    if waits * streams > gpu_waits.MAX_PAIRS:
        return f"the trace has {waits:,} synchronizations and {streams:,} streams"
    return ""


def _threads(trace: Trace, steps: Table, waits: Sequence[Synchronization]) -> list[int]:
    """Return the threads that run steps, launch work or wait for the GPU."""
    launching = trace.runtime.thread[trace.gpu.launch[trace.gpu.launch >= 0]]
    threads = np.unique(np.concatenate((steps.thread, launching, *columns_of(waits, "thread"))))
    return [number for number in threads.tolist() if number >= 0]


def _blocked(waits: Sequence[Synchronization]) -> dict[int, Intervals]:
    """Return the times during which each thread waits for the GPU."""
    thread, start, took = columns_of(waits, "thread", "start_ns", "blocked_ns")
    return {number: merge_overlaps(start[rows], (start + took)[rows]) for number, rows in group_rows(thread)}


def _cpu_edges(points: CpuPoints, handoffs: Handoffs, full: BlockedLaunches, start_ns: int) -> Iterator[Edges]:
    """Yield the edges between points on threads."""
    node = points.node
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
    forks, joins = points.nodes(FORK, count), points.nodes(JOIN, count)
    yield edges(HANDED_OFF, forks, joins, 0, handoffs.by_ns, handoffs.time_ns)


def _gpu_edges(
    trace: Trace, order: GpuOrder, points: CpuPoints, work_nodes: Array, start_ns: int
) -> Iterator[Edges]:
    """Yield the edges to the ends of GPU work."""
    gpu, event_waits = trace.gpu, gpu_waits.find_event_waits(trace, order)
    delays = gpu_waits.measure_delays(trace, order, event_waits[:, 0])
    launch_nodes = points.nodes(LAUNCH, len(trace.runtime))
    launched = np.flatnonzero((gpu.launch >= 0) & ~order.same_launch)
    yield edges(LAUNCHED, launch_nodes[gpu.launch[launched]], work_nodes[launched], delays.launch[launched])
    queued = np.flatnonzero((order.previous >= 0) & ~order.before)
    yield edges(STREAM, work_nodes[order.previous[queued]], work_nodes[queued], delays.stream[queued])
    first = np.flatnonzero(order.before | ((order.previous < 0) & (gpu.launch < 0)))
    yield edges(ANCHORED, 0, work_nodes[first], gpu.start_ns[first] - start_ns)
    work, target, delay = gpu_waits.find_stream_waits(trace, order, delays, event_waits)
    yield edges(EVENT, work_nodes[target], work_nodes[work], delay)


def _return_edges(
    trace: Trace,
    waits: Sequence[Synchronization],
    order: GpuOrder,
    full: BlockedLaunches,
    points: CpuPoints,
    work_nodes: Array,
) -> Iterator[Edges]:
    """Yield the edges to the returns of calls that wait for the GPU."""
    sync, work = gpu_waits.find_sync_targets(trace, waits, order)
    began, took = columns_of(waits, "start_ns", "blocked_ns")
    done = began.copy()
    np.maximum.at(done, sync, trace.gpu.end_ns[work])
    blocked, (after, alone) = done > began, np.full((2, len(waits)), RETURN_NS)
    _, call = np.unique([f"{wait.kind} {wait.call}" for wait in waits], return_inverse=True)
    for _, rows in group_rows(call):
        some, others = rows[blocked[rows]], rows[~blocked[rows]]
        after[rows] = median((began + took - done)[some], RETURN_NS)
        alone[rows] = min(median(took[others], RETURN_NS), _LONGEST_CALL_NS)
    nodes, calls = points.nodes(RETURN, len(waits)), points.nodes(SYNC, len(waits))
    yield edges(CALLED, calls, nodes, alone)
    yield edges(RETURNED, work_nodes[work], nodes[sync], after[sync])
    freed = gpu_waits.work_ended_by(trace, order, full.end_ns, full.start_ns)
    some = np.flatnonzero(freed >= 0)
    delay = median((full.end_ns - trace.gpu.end_ns[freed])[some], 0) if len(some) else 0
    yield edges(RETURNED, work_nodes[freed[some]], points.nodes(UNBLOCKED, len(full.end_ns))[some], delay)
