"""The critical path: the chain of work and waits that determines the length of steps; as a lane, too."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...read.kineto.insert_events import (
    FIRST_LANE,
    check_copy,
    event_text,
    insert_events,
    microseconds,
    taken_lanes,
)
from ...read.measures.synchronizations import columns_of
from ...read.tables.intervals import Intervals, covered_ns, union
from ...read.tables.lanes import group_rows
from ...read.tables.nest import NestedRanges, rows_around
from ...read.tables.steps import main_thread
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from .edges import ANCHORED, CALLED, RETURNED, Edges
from .graph import Graph
from .replay import GPU_CLASSES, NO_TIMES, Change, Replay, Replayer, replay_changed, step_bounds

_FOREVER = 2**62

CLASSES = {
    "compute": "kernels that compute, and memsets",
    "communication": "kernels that communicate",
    "copies": "memcpys",
    "input": "the loop waits for its next batch",
    "synchronization": "returns of calls that waited for the GPU, and what the CPU did late because of them",
    "overhead": "work of the CPU, such as launches",
    "latency": "from a launch to the start of its work, and between pieces of GPU work",
    "other": "work that was launched before the recording",
}
"""The classes of the critical path, in words."""


class Segment(NamedTuple):
    """A part of the critical path.

    Attributes:
        kind: one of `CLASSES`.
        name: the kernel, memcpy or memset by its short name; empty for other classes.
        region: the names of the regions around, outermost first.
        start_ns: the recorded start.
        duration_ns: the duration in the replay.
        thread: the thread of the CPU's work; -1 for other classes.
        row: the row of `Trace.gpu`; -1 for other classes.
    """

    kind: str
    name: str
    region: tuple[str, ...]
    start_ns: int
    duration_ns: int
    thread: int
    row: int


class OffPath(NamedTuple):
    """GPU work of one name that is never on the critical path.

    Attributes:
        name: its short name.
        duration_ns: the sum of its durations.
        slack_ns: how much later any of it could end without making the steps longer.
    """

    name: str
    duration_ns: int
    slack_ns: int


class CriticalPath(NamedTuple):
    """The critical path of the recorded steps, and how far the other work is from it.

    Attributes:
        segments: its parts in order of time; their durations add up to ``total_ns``.
        total_ns: the time from the start of the first step to the end of the last.
        slack_ns: for each row of `Trace.gpu`, how much later it could end without making the steps longer; 0 on
            the critical path.
        off_path: the GPU work of the steps that is never on it, the longest first.
    """

    segments: tuple[Segment, ...]
    total_ns: int
    slack_ns: Array
    off_path: tuple[OffPath, ...]

    def __repr__(self) -> str:
        return f"<critical path of {self.total_ns:,} ns: {self.by_class()}>"

    def by_class(self) -> dict[str, int]:
        """Return the time of each class in ns, the longest first."""
        sums: Counter[str] = Counter()
        for segment in self.segments:
            sums[segment.kind] += segment.duration_ns
        return dict(sums.most_common())

    def by_region(self) -> dict[tuple[tuple[str, ...], str], int]:
        """Return the time of each pair of regions and class in ns, the longest first."""
        sums: Counter[tuple[tuple[str, ...], str]] = Counter()
        for segment in self.segments:
            sums[segment.region, segment.kind] += segment.duration_ns
        return dict(sums.most_common())


def critical_path(replayer: Replayer, change: Change | None = None) -> CriticalPath:
    """Return the critical path of the steps with a change; None for the steps as they were recorded."""
    graph = replayer.graph
    replayed = replay_changed(graph, change) if change else replayer.unchanged
    chain, total, end = longest_chain(graph, replayed)
    segments = _without_overlaps(_segments(graph, replayed, replayer.classes, chain))
    segments = _without_beginning(segments, sum(part.duration_ns for part in segments) - total)
    slack = _slack(graph, replayed, end)
    if change:
        steps = len(replayer.recorded_ns)
        waited_ns = steps * replayer.waits_for_workers_ns(change, replayer.step_ns(change), total / steps)
        segments += [Segment("input", "", (), graph.start_ns + end, waited_ns, -1, -1)] * bool(waited_ns)
        total += waited_ns
    return CriticalPath(tuple(segments), total, slack, tuple(_off_path(graph, slack)))


def longest_chain(graph: Graph, replayed: Replay) -> tuple[Array, int, int]:
    """Return the edges of the critical path in order of time, the length of the steps in ns, and when they end.

    The first edges may begin before the first step: the edges then take longer than the steps.
    """
    times = replayed.times_ns
    start, last = int(step_bounds(graph, times)[0].min()), _last_node(graph, times)
    return _binding_edges(replayed, last, start), int(times[last]) - start, int(times[last])


def _last_node(graph: Graph, times_ns: Array) -> int:
    """Return the node at which the last step ends, on the CPU or the GPU."""
    nodes = np.concatenate((graph.end_nodes, graph.work_nodes[graph.loop.of_work >= 0]))
    return int(nodes[np.argmax(times_ns[nodes])])


def _binding_edges(replayed: Replay, last: int, start_ns: int) -> Array:
    """Return the edges of the longest chain to a node in order of time, from a node no later than the start."""
    edges, weight, times, _ = replayed
    rows = np.flatnonzero(times[edges.source] + weight == times[edges.target])[::-1]
    binding = np.full(len(times), -1, np.int32)
    binding[edges.target[rows]] = rows
    # Python numbers of all of these take more memory than the graph.
    source_of, edge_of, time_of = edges.source.data, binding.data, times.data
    path, node = array("q"), last
    while node and time_of[node] > start_ns:
        path.append(edge_of[node])
        node = source_of[path[-1]]
    return np.array(path[::-1], np.int64)


class EdgeTimes(NamedTuple):
    """The times of the edges of a critical path in ns, by what they are; they add up.

    Attributes:
        late_ns: the delay before GPU work.
        input_ns: the CPU's wait for a batch.
        held_up_ns: the CPU's work that it could have done while it was blocked.
        own_ns: all else.
    """

    late_ns: Array
    input_ns: Array
    held_up_ns: Array
    own_ns: Array


def edge_times(graph: Graph, edges: Edges, removed: Mapping[int, Intervals], took: Array) -> EdgeTimes:
    """Return the times of the edges of a critical path, which take these times.

    Work of the CPU after it waited for the GPU is held up by that wait, up to the time that it was blocked: for so
    long, it could have run ahead. What waits for a batch is input all the same.
    """
    target = edges.target
    on_gpu, returns = graph.work[target] >= 0, np.isin(edges.kind, (CALLED, RETURNED))
    late = np.where(on_gpu, np.clip(edges.delay_ns, 0, np.maximum(took, 0)), 0)
    waited = np.where(on_gpu, 0, np.minimum(_in_batches(graph, edges, removed), took))
    blocked = np.zeros(len(graph.recorded_ns), np.int64)
    blocked[graph.return_nodes] = columns_of(graph.waits, "blocked_ns")[0]
    work = np.where(on_gpu | returns, 0, took - waited)
    # The lead grows by each wait, and work uses it up: it never falls below zero.
    more = np.where(returns & ~on_gpu, blocked[target], 0) - work
    lead = np.cumsum(more)
    lead = lead - np.minimum(np.minimum.accumulate(lead), 0)
    held_up = np.where(work != 0, np.concatenate(([0], lead[:-1])) - lead, 0)
    return EdgeTimes(late, waited, held_up, took - late - waited - held_up)


def _in_batches(graph: Graph, edges: Edges, removed: Mapping[int, Intervals]) -> Array:
    """Return for how long each edge waits for a batch, without the times that a change removes."""
    removed = {thread: removed[thread] for thread in graph.batches if thread in removed}
    rows = np.arange(len(edges.kind))
    either = {thread: union(times, removed.get(thread, NO_TIMES)) for thread, times in graph.batches.items()}
    return graph.inside_ns(edges, rows, either) - graph.inside_ns(edges, rows, removed)


def _segments(graph: Graph, replayed: Replay, classes: Array, chain: Array) -> Iterator[Segment]:
    """Yield the parts of a critical path: delays, GPU work, returns, and the work of the CPU by region."""
    edges, gpu, regions = replayed.edges.where(chain), graph.trace.gpu, graph.trace.regions
    cpu = _CpuWork(graph, replayed.removed)
    times = edge_times(graph, edges, replayed.removed, replayed.weight_ns[chain])
    for edge, (late, waited, held_up, ns) in enumerate(zip(*(column.tolist() for column in times), strict=True)):
        kind, target = int(edges.kind[edge]), int(edges.target[edge])
        row, until = int(graph.work[target]), int(graph.recorded_ns[target]) + graph.start_ns
        if row < 0 and kind in (CALLED, RETURNED):
            yield from cpu.waited(int(graph.thread[target]), until - ns, ns)
        elif row < 0:
            since, ended = int(edges.since_ns[edge]), int(edges.until_ns[edge])
            yield from cpu.worked(int(graph.thread[target]), since, max(ended, since), (waited, held_up, ns))
        else:
            region, begun = region_path(regions, int(gpu.region[row])), until - int(gpu.duration_ns[row])
            if late:
                what = "other" if kind == ANCHORED else "latency"
                yield Segment(what, "", region, begun - late, late, -1, -1)
            if ns:
                name = gpu.strings[gpu.short_name[row]]
                yield Segment(GPU_CLASSES[classes[row]], name, region, begun, ns, -1, row)


class _CpuWork:
    """Divides the CPU's time on a critical path by regions.

    Args:
        graph: the graph.
        removed: for each thread, the times that cost nothing.
    """

    def __init__(self, graph: Graph, removed: Mapping[int, Intervals]) -> None:
        self.regions, self.removed, self.batches = graph.trace.regions, removed, graph.batches
        starts, ends, thread = self.regions.start_ns, self.regions.end_ns, self.regions.thread
        self.nested = NestedRanges(starts, ends, thread)
        cuts = {number: [starts[rows], ends[rows]] for number, rows in group_rows(thread)}
        for number, times in self.batches.items():
            cuts.setdefault(number, []).extend(times)
        self.cuts = {number: np.unique(np.concatenate(times)) for number, times in cuts.items()}

    def waited(self, thread: int, since: int, ns: int) -> Iterator[Segment]:
        """Yield the return of a call that waited."""
        (row,) = self.nested.innermost_at(np.array([since]), np.array([thread])).tolist()
        yield Segment("synchronization", "", region_path(self.regions, row), since, ns, thread, -1)

    def worked(self, thread: int, since: int, until: int, times: tuple[int, int, int]) -> Iterator[Segment]:
        """Yield the parts of the work between two times, which take these times of `EdgeTimes` in the replay."""
        input_ns, left, own_ns = times
        own = self.cuts.get(thread, np.empty(0, np.int64))
        inside = own[np.searchsorted(own, since, "right") : np.searchsorted(own, until)]
        starts, ends = np.concatenate(([since], inside)), np.concatenate((inside, [until]))
        took = ends - starts - covered_ns(self.removed.get(thread, NO_TIMES), starts, ends)
        for_batch = covered_ns(self.batches.get(thread, NO_TIMES), starts, ends) > 0
        took[for_batch] = _scaled(took[for_batch], input_ns)
        took[~for_batch] = _scaled(took[~for_batch], left + own_ns)
        rows = self.nested.innermost_at(starts, np.full(len(starts), thread)).tolist()
        columns = (starts.tolist(), took.tolist(), for_batch.tolist(), rows)
        for start, ns, is_input, row in zip(*columns, strict=True):
            part = Segment("input", "", region_path(self.regions, row), start, ns, thread, -1)
            if is_input:
                yield part
                continue
            held_up = min(left, ns)
            left -= held_up
            yield part._replace(kind="synchronization", duration_ns=held_up)
            yield part._replace(kind="overhead", start_ns=start + held_up, duration_ns=ns - held_up)


def _scaled(times: Array, total: int) -> Array:
    """Return times in the same proportions that add up to a total."""
    if len(times) < 2:
        return np.full(len(times), total, np.int64)
    share = times if times.any() else np.ones_like(times)
    scaled: Array = np.diff(np.rint(np.cumsum(share) * (total / max(int(share.sum()), 1))), prepend=0)
    return scaled.astype(np.int64)


def _without_overlaps(segments: Iterable[Segment]) -> list[Segment]:
    """Shorten what still runs when the next part begins, such as a memcpy whose call returns before its end."""
    kept: list[Segment] = []
    for part in segments:
        while kept and part.duration_ns < 0:
            last = kept.pop()
            part = last._replace(duration_ns=last.duration_ns + part.duration_ns)
        kept.append(part)
    return [part for part in kept if part.duration_ns > 0]


def _without_beginning(segments: list[Segment], surplus_ns: int) -> list[Segment]:
    """Remove the beginning of a chain, which lies before the first step."""
    for number, part in enumerate(segments):
        removed = min(surplus_ns, part.duration_ns)
        surplus_ns -= removed
        if surplus_ns <= 0:
            first = part._replace(start_ns=part.start_ns + removed, duration_ns=part.duration_ns - removed)
            return [first, *segments[number + 1 :]]
    return segments


def _slack(graph: Graph, replayed: Replay, end_ns: int) -> Array:
    """Return how much later each work could end without a later end of the last step."""
    edges, weight, times, _ = replayed
    until = np.full(len(times), _FOREVER)
    until[graph.end_nodes] = until[graph.work_nodes[graph.loop.of_work >= 0]] = end_ns
    latest = until.tolist()
    rows = zip(edges.source.tolist()[::-1], edges.target.tolist()[::-1], weight.tolist()[::-1], strict=True)
    for source, target, took in rows:
        time = latest[target] - took
        if time < latest[source]:
            latest[source] = time
    slack: Array = np.clip(np.array(latest, np.int64) - times, 0, end_ns)[graph.work_nodes]
    return slack


def _off_path(graph: Graph, slack_ns: Array) -> list[OffPath]:
    gpu, rows = graph.trace.gpu, np.flatnonzero(graph.loop.of_work >= 0)
    by_name = [
        OffPath(gpu.strings[name], int(gpu.duration_ns[own].sum()), int(slack_ns[own].min()))
        for name, own in ((name, rows[places]) for name, places in group_rows(gpu.short_name[rows]))
    ]
    return sorted((work for work in by_name if work.slack_ns > 0), key=lambda work: -work.duration_ns)


def region_path(regions: Table, row: int) -> tuple[str, ...]:
    """Return the names of a region and those around it, outermost first; empty for row -1."""
    rows = rows_around(row, regions.parent)
    return tuple(regions.strings[regions.name[each]] for each in reversed(rows))


CATEGORY = "critical_path"
"""The category of the added events."""


def add_critical_path(trace: Trace, path: CriticalPath, out: Path) -> int:
    """Write a copy of the file of a trace with a lane for its critical path, and return the number of its parts.

    The lane belongs to the process of the loop. A copy is gzipped if ``out`` ends in ".gz"; an existing file is
    replaced once the copy is complete.

    Args:
        trace: the trace that `read_trace` returned; its file must not have changed.
        path: the critical path of the steps as they were recorded.
        out: the path of the copy.

    Raises:
        ValueError: the trace comes from another profiler, or has such a lane already; its file is missing; or
            ``out`` is the same file or cannot be replaced.
        OSError: the file cannot be read, or ``out`` cannot be written.
    """
    check_copy(trace, out, CATEGORY)
    insert_events(trace, out, _events(trace, path))
    return len(path.segments)


def _events(trace: Trace, path: CriticalPath) -> Iterator[str]:
    """Yield the events of the lane as JSON; a part ends at the latest where the next begins."""
    process, number = trace.threads[main_thread(trace)].process, FIRST_LANE
    while (process, number) in taken_lanes(trace):
        number += 1
    place = {"pid": process, "tid": number}
    since = microseconds(path.segments[0].start_ns if path.segments else 0)
    yield event_text({"ph": "M", "name": "thread_name"} | place, since, {"name": "critical path"})
    yield event_text({"ph": "M", "name": "thread_sort_index"} | place, since, {"sort_index": -1})
    following = [part.start_ns for part in path.segments[1:]]
    for part, start in zip(path.segments, [*following, None], strict=True):
        length = part.duration_ns if start is None else min(part.duration_ns, max(start - part.start_ns, 0))
        about = {"ph": "X", "cat": CATEGORY, "name": part.name or part.kind} | place
        times = f'{microseconds(part.start_ns)}, "dur": {microseconds(length)}'
        yield event_text(about, times, {"class": part.kind, "region": " > ".join(part.region)})
