"""Replays a trace, unchanged or with a `Change`: the time of each event, and the lengths of the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...read.tables.intervals import Intervals, covered_ns, union
from ...read.tables.lanes import group_rows
from ...read.tables.steps import has_cpu, launched_before
from ...read.tables.table import MEMCPY, Array, Table
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, communication_mask
from .edges import CALLED, EVENT, HANDED_OFF, LAUNCHED, ON_CPU, RETURNED, STREAM, Edges
from .graph import Graph, graph_of, loop_steps, times_by_thread
from .loader import SlowLoader, slow_loader
from .pieces import NEVER, times_of

_NOTHING: Mapping[int, Intervals] = MappingProxyType({})


class Replay(NamedTuple):
    """One replay of a graph.

    Attributes:
        edges: the edges.
        weight_ns: the time of each edge: its delay, the CPU's work in between, and the duration of its target.
        times_ns: the time of each node.
        removed: for each thread, the times during which the CPU's work costs nothing.
    """

    edges: Edges
    weight_ns: Array
    times_ns: Array
    removed: Mapping[int, Intervals] = _NOTHING


def replay(graph: Graph, edges: Edges, weight_ns: Array, removed: Mapping[int, Intervals] = _NOTHING) -> Replay:
    """Return the replay of a graph with these edges: each node happens as soon as all edges to it allow."""
    pieces = graph.pieces if edges is graph.edges else graph.pieces_with(edges)
    return Replay(edges, weight_ns, times_of(pieces, weight_ns), removed)


def step_bounds(graph: Graph, times_ns: Array) -> tuple[Array, Array]:
    """Return when each step starts and ends in a replay; see `LoopSteps.bounds`."""
    return graph.loop.bounds(times_ns[graph.start_nodes], times_ns[graph.end_nodes], times_ns[graph.work_nodes])


def step_lengths(graph: Graph, times_ns: Array) -> Array:
    """Return the lengths of the steps in ns: from the end of the step before, or the start of the first step."""
    starts, ends = step_bounds(graph, times_ns)
    lengths: Array = ends - starts
    return lengths


NO_TIMES: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))
"""No interval."""


class SavedWork(NamedTuple):
    """A part of the CPU's work that is saved.

    Attributes:
        part: the part, at most 1; below 0, the work takes longer.
        times: for each thread, the times that count; None for all.
        but: where all count, the times that do not; None for those in which the loop waits for a batch.
    """

    part: float
    times: Mapping[int, Intervals] | None = None
    but: Mapping[int, Intervals] | None = None


@dataclass(frozen=True)
class Change:
    """What would cost less than recorded.

    Attributes:
        cpu: for each thread, the times during which its work costs nothing and it waits for nothing. The same
            holds for threads that work in its place meanwhile, such as autograd's.
        saved: the part of its duration that each row of `Trace.gpu` saves; None if none saves any. Work that saves
            all of it also needs no launch.
        asynchronous: the synchronizations that no longer wait, as numbers in `Graph.waits`.
        overlapped: a mask of the GPU work that other work no longer waits for; None for no work.
        work_saved: what the CPU saves of its own work; it still waits for the GPU. Each entry saves a part of what
            the earlier ones leave.
        delays_saved: the part that is saved of the delays before GPU work: after its launch, after the work before
            it, and after an event.
        least_ns: the least length of a step in ns: what loads its batches takes so long.
    """

    cpu: Mapping[int, Intervals] = field(default_factory=dict)
    saved: Array | None = None
    asynchronous: frozenset[int] = frozenset()
    overlapped: Array | None = None
    work_saved: tuple[SavedWork, ...] = ()
    delays_saved: float = 0.0
    least_ns: int = 0

    def __bool__(self) -> bool:
        parts = self.cpu, self.asynchronous, self.work_saved, self.delays_saved
        return any(parts) or self.saved is not None or self.overlapped is not None

    @property
    def slows(self) -> bool:
        """Whether any work takes longer."""
        longer = self.saved is not None and bool((self.saved < 0).any())
        return longer or any(each.part < 0 for each in self.work_saved)

    def __or__(self, other: Change) -> Change:
        """Return both changes at once."""
        return Change(
            _united(self.cpu, other.cpu),
            _both(self.saved, other.saved, lambda one, two: 1 - (1 - one) * (1 - two)),
            self.asynchronous | other.asynchronous,
            _both(self.overlapped, other.overlapped, np.logical_or),
            self.work_saved + other.work_saved,
            1 - (1 - self.delays_saved) * (1 - other.delays_saved),
            max(self.least_ns, other.least_ns),
        )


def _united(one: Mapping[int, Intervals], other: Mapping[int, Intervals]) -> dict[int, Intervals]:
    """Return the times of both for each thread."""
    threads = one.keys() | other.keys()
    return {number: union(one.get(number, NO_TIMES), other.get(number, NO_TIMES)) for number in threads}


def _both(one: Array | None, other: Array | None, joined: Callable[[Array, Array], Array]) -> Array | None:
    return other if one is None else one if other is None else joined(one, other)


def without_events(*tables: Table) -> Change:
    """Return the change in which the CPU spends no time in these events; those of unknown threads do not count."""
    return Change(times_by_thread(*tables))


def replay_changed(graph: Graph, change: Change) -> Replay:
    """Return the replay of a graph with a change."""
    edges, weight, kept = graph.edges, graph.weight_ns.copy(), np.ones(len(graph.edges.kind), bool)
    removed = _with_threads_in_its_place(graph, change.cpu)
    for thread, times in removed.items():
        _remove_cpu_work(graph, thread, times, weight, kept)
    returns = np.zeros(len(graph.recorded_ns), bool)
    returns[graph.return_nodes[sorted(change.asynchronous)]] = True
    kept[returns[edges.target] & (edges.kind == RETURNED)] = False
    if change.saved is not None and len(change.saved):
        _shorten_work(graph, change.saved, weight, kept)
    for saved_work in change.work_saved:
        _save_work(graph, saved_work, removed, weight)
    if change.delays_saved:
        delayed = np.isin(edges.kind, (LAUNCHED, STREAM, EVENT)) & (edges.delay_ns > 0)
        weight[delayed] -= (edges.delay_ns[delayed] * change.delays_saved).astype(np.int64)
    if change.overlapped is None or not len(change.overlapped):
        weight[~kept] = NEVER
        return replay(graph, edges, weight, removed)
    rows, source = _overlap_work(graph, change.overlapped, kept)
    overlapping = edges.where(rows)._replace(source=source)
    return replay(graph, overlapping, weight[rows], removed)


def _with_threads_in_its_place(graph: Graph, cpu: Mapping[int, Intervals]) -> dict[int, Intervals]:
    """Add the threads that another thread waited for during the times of that thread."""
    edges, removed = graph.edges, dict(cpu)
    handed = edges.kind == HANDED_OFF
    by, to, until = graph.thread[edges.source[handed]], graph.thread[edges.target[handed]], edges.until_ns[handed]
    for thread, (starts, ends) in cpu.items():
        for other in np.unique(by[to == thread]).tolist():
            joined = until[(to == thread) & (by == other)]
            held = np.searchsorted(joined, ends, "right") > np.searchsorted(joined, starts)
            removed[other] = union(removed.get(other, NO_TIMES), (starts[held], ends[held]))
    return removed


def _remove_cpu_work(graph: Graph, thread: int, times: Intervals, weight: Array, kept: Array) -> None:
    """Let the work of a thread cost nothing at these times."""
    edges = graph.edges
    own = graph.thread[edges.target] == thread
    works = np.flatnonzero(own & ((edges.kind == ON_CPU) | (edges.kind == HANDED_OFF)))
    weight[works] -= covered_ns(times, edges.since_ns[works], edges.until_ns[works])
    returns = np.flatnonzero(own & ((edges.kind == CALLED) | (edges.kind == RETURNED)))
    at = graph.recorded_ns[edges.target[returns]] + graph.start_ns
    inside = returns[covered_ns(times, at - 1, at) > 0]
    weight[inside] = 0
    kept[inside[edges.kind[inside] == RETURNED]] = False


def _save_work(graph: Graph, saved: SavedWork, removed: Mapping[int, Intervals], weight: Array) -> None:
    """Let the CPU save a part of its work, of what earlier changes left of it."""
    edges = graph.edges
    works = np.flatnonzero((edges.kind == ON_CPU) | (edges.kind == HANDED_OFF))
    gone = graph.inside_ns(edges, works, removed)
    left = edges.until_ns[works] - edges.since_ns[works] - gone
    if saved.times is None:
        but = graph.batches if saved.but is None else saved.but
        inside = left + gone - graph.inside_ns(edges, works, _united(removed, but))
    else:
        times = _with_threads_in_its_place(graph, saved.times)
        inside = graph.inside_ns(edges, works, _united(removed, times)) - gone
    share = np.clip(inside / np.maximum(left, 1), 0, 1)
    weight[works] -= np.rint(weight[works] * share * saved.part).astype(np.int64)


def _shorten_work(graph: Graph, saved: Array, weight: Array, kept: Array) -> None:
    """Let GPU work save parts of its duration."""
    edges, gpu = graph.edges, graph.trace.gpu
    row = graph.work[edges.target]
    some = np.flatnonzero((row >= 0) & (saved[row] != 0))
    weight[some] -= np.rint(gpu.duration_ns[row[some]] * saved[row[some]]).astype(np.int64)
    if not (saved >= 1).any():
        return
    gone = (row >= 0) & (saved[row] >= 1)
    queued = np.zeros(len(gpu), bool)
    queued[row[gone & (edges.kind == STREAM)]] = True
    gone &= queued[row]
    weight[gone] = 0
    kept[gone & ((edges.kind == LAUNCHED) | (edges.kind == EVENT))] = False


def _overlap_work(graph: Graph, overlapped: Array, kept: Array) -> tuple[Array, Array]:
    """Let no other work wait for this work, neither on its own stream nor on another.

    Returns:
        The rows of the edges that are left, in order, and their sources. Where this work waits for other work on
        its stream, a row is there twice: it also waits for the last of this work before it.
    """
    edges, source = graph.edges, graph.edges.source.copy()
    others, same = (_before_on_stream(graph, among) for among in (~overlapped, overlapped))
    row, awaited = graph.work[edges.target], graph.work[edges.source]
    waits = (row >= 0) & (awaited >= 0)
    freed = waits & ~overlapped[row] & overlapped[awaited]
    on_stream = freed & (edges.kind == STREAM)
    source[on_stream] = graph.work_nodes[others[row[on_stream]]]
    kept &= ~freed | (on_stream & (others[row] >= 0))
    twice = np.flatnonzero(
        kept & waits & (edges.kind == STREAM) & overlapped[row] & ~overlapped[awaited] & (same[row] >= 0)
    )
    rows = np.concatenate((np.flatnonzero(kept), twice))
    sources = np.concatenate((source[kept], graph.work_nodes[same[row[twice]]]))
    order = np.argsort(rows, kind="stable")
    return rows[order], sources[order]


def _before_on_stream(graph: Graph, among: Array) -> Array:
    """Return for each row of GPU work the last one before it on its stream that is in a mask, or -1."""
    before = np.full(len(among), -1)
    for _, rows in group_rows(graph.order.stream):
        last = np.maximum.accumulate(np.where(among[rows], np.arange(len(rows)), -1))[:-1]
        before[rows[1:]] = np.where(last >= 0, rows[last], -1)
    return before


_MAX_ERROR = 0.05  # of a step, in the replay of the unchanged trace
_MAX_UNKNOWN = 0.1  # of the GPU work, without a known launch


def mean_ns(values: Array) -> int:
    """Return the mean of times in ns, rounded: what a loop takes, divided by its steps."""
    return round(float(np.mean(values)))


def lower_median(values: Array) -> int:
    """Return the median of integers; of an even number, the lower of the middle two."""
    return int(np.sort(values)[(len(values) - 1) // 2])


GPU_CLASSES = ("compute", "communication", "copies")
"""The classes of GPU work."""


class Replayer:
    """Replays one trace; the graph is built once.

    Args:
        trace: the trace.
        collectives: which kernels communicate, as in `instrument.metrics`.
    """

    def __init__(self, trace: Trace, collectives: Collectives = "auto") -> None:
        self.trace, self.collectives = trace, collectives

    @property
    def has_cpu(self) -> bool:
        """Whether the trace has events on a CPU thread; a graph can only be built from these."""
        return has_cpu(self.trace)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the trace."""
        return graph_of(self.trace)

    @cached_property
    def communication(self) -> Array:
        """A mask of the GPU work that communicates."""
        return communication_mask(self.trace.gpu, self.collectives)

    @cached_property
    def classes(self) -> Array:
        """The class of each row of `Trace.gpu`, as an index into `GPU_CLASSES`."""
        of_computer = np.where(self.trace.gpu.category == MEMCPY, 2, 0)
        return np.where(self.communication, 1, of_computer).astype(np.int8)

    @cached_property
    def unchanged(self) -> Replay:
        """The replay without a change."""
        return replay(self.graph, self.graph.edges, self.graph.weight_ns)

    @cached_property
    def recorded_ns(self) -> Array:
        """The recorded lengths of the steps in ns; see `LoopSteps.bounds`."""
        starts, ends = loop_steps(self.trace).recorded_bounds(self.trace)
        lengths: Array = ends - starts
        return lengths

    @cached_property
    def errors(self) -> Array:
        """For each step, |replayed - recorded| / recorded, without a change."""
        replayed = step_lengths(self.graph, self.unchanged.times_ns)
        errors: Array = np.abs(replayed - self.recorded_ns) / np.maximum(self.recorded_ns, 1)
        return errors

    @cached_property
    def abstained(self) -> str | None:
        """Why nothing is predicted; None if something can be."""
        if not self.has_cpu:
            return "the trace has no events on the CPU"
        if self.graph.incomplete:
            return self.graph.incomplete
        if launched_before(self.trace).any() and not self.graph.order.before.any():
            return "much of the GPU work was launched before the recording, and the trace has no steps"
        unknown, work = int(self.graph.order.unknown.sum()), len(self.trace.gpu)
        if unknown > _MAX_UNKNOWN * work:
            return f"the launches of {unknown:,} of {work:,} kernels, memcpys and memsets are not in the trace"
        error = float(np.median(self.errors))
        if error > _MAX_ERROR:
            return f"the replay without a change is {100 * error:.1f} % off, more than {100 * _MAX_ERROR:.0f} %"
        return None

    @cached_property
    def loader(self) -> SlowLoader | None:
        """The workers of the DataLoader, if they do not keep up."""
        return slow_loader(self.graph)

    def waits_for_workers_ns(self, change: Change, step_ns: int, path_ns: float) -> int:
        """Return how long a step of ``step_ns`` waits for the workers of a DataLoader beside what is replayed.

        Args:
            change: the change.
            step_ns: the length of a step with it.
            path_ns: that of its critical path in the replay, where waits for workers are as recorded.
        """
        slow = self.loader is not None and not self.loader.is_in(change.cpu)
        least_ns = max(change.least_ns, self.loader.step_ns if self.loader and slow else 0)
        return round(step_ns - path_ns) if path_ns < least_ns <= step_ns else 0

    def step_ns(self, change: Change) -> int:
        """Return the length of a step with a change in ns: the mean of the steps.

        Each step is as long as recorded, plus the difference between its replays with and without the change. In
        the long run, steps take no less than on the CPU, even if the GPU lags behind at first; nor less than the
        workers of a DataLoader take for their batches; and no longer than recorded, if nothing becomes slower.
        """
        recorded = mean_ns(self.recorded_ns)
        if self.loader and not self.loader.is_in(change.cpu):
            in_time = Change(self.loader.waits)  # the waits grow or shrink with the rest of the step
            before, after = (max(self._mean_ns(each), self.loader.step_ns) for each in (in_time, in_time | change))
            predicted = after + max(recorded - before, 0)
        else:
            predicted = self._mean_ns(change)
        predicted = max(predicted, change.least_ns)
        return predicted if change.slows else min(predicted, recorded)

    def _mean_ns(self, change: Change) -> int:
        """Return the mean of the steps with a change; waits for workers that do not keep up are as recorded."""
        graph, before, after = self.graph, self.unchanged.times_ns, replay_changed(self.graph, change).times_ns
        longer = step_lengths(graph, after) - step_lengths(graph, before)
        lengths = np.maximum(self.recorded_ns + longer, 0)
        for steps in graph.loop.of_process:
            lengths[steps[0]] -= self._not_yet_ahead(after, lengths, steps)
        predicted = mean_ns(lengths)
        if change.slows:
            return predicted
        return max(predicted, mean_ns(graph.loop.on_cpu(after[graph.start_nodes], after[graph.end_nodes])))

    def _not_yet_ahead(self, after: Array, lengths: Array, steps: Array) -> int:
        """Return by how much the first of these steps is longer because nothing changed before it, in ns.

        With the change, the GPU would still work for the steps before the recording when it begins, as it does for
        each step when the next begins.
        """
        first, others, graph = int(steps[0]), steps[1:], self.graph
        if not len(others):
            return 0
        excess_before, excess = (int(each[first]) - mean_ns(each[others]) for each in (self.recorded_ns, lengths))
        ahead = step_bounds(graph, after)[1] - after[graph.end_nodes]
        return max(min(excess - max(excess_before, 0), int(ahead[first])), 0)
