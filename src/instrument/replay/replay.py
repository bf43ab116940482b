"""Replays a graph: the time of each event, and the lengths of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..traces.intervals import Intervals
from ..traces.lanes import group_rows
from ..traces.step_content import process_of_threads
from ..traces.table import Array
from .edges import Edges
from .graph import Graph

_LONG_AGO = -(2**62)
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


def weights(graph: Graph) -> Array:
    """Return the recorded time of each edge in ns."""
    found: Array = graph.edges.delay_ns + graph.edges.until_ns - graph.edges.since_ns
    work = graph.work[graph.edges.target]
    on_gpu = work >= 0
    found[on_gpu] += graph.trace.gpu.duration_ns[work[on_gpu]]
    return found


def replay(graph: Graph, edges: Edges, weight_ns: Array, removed: Mapping[int, Intervals] = _NOTHING) -> Replay:
    """Return the replay of a graph with these edges: each node happens as soon as all edges to it allow."""
    times = [_LONG_AGO] * len(graph.recorded_ns)
    times[0] = 0
    rows = zip(edges.source.tolist(), edges.target.tolist(), weight_ns.tolist(), strict=True)
    for source, target, weight in rows:
        time = times[source] + weight
        if time > times[target]:
            times[target] = time
    return Replay(edges, weight_ns, np.array(times, np.int64), removed)


def step_ends(graph: Graph, times_ns: Array) -> Array:
    """Return when each step ends: on the CPU and on the GPU, with all its work and that of the steps before it.

    Steps of different processes are independent.
    """
    ends = times_ns[graph.end_nodes]
    of = np.flatnonzero(graph.step_of_work >= 0)
    np.maximum.at(ends, graph.step_of_work[of], times_ns[graph.work_nodes[of]])
    for rows in _by_process(graph):
        ends[rows] = np.maximum.accumulate(ends[rows])
    return ends


def step_lengths(graph: Graph, times_ns: Array) -> Array:
    """Return the lengths of the steps in ns: from the end of the step before, or the start of the first step."""
    starts, ends = step_bounds(graph, times_ns)
    lengths: Array = ends - starts
    return lengths


def step_bounds(graph: Graph, times_ns: Array) -> tuple[Array, Array]:
    """Return when each step starts and ends in ns; a step starts when the one before it in its process ends.

    The first step starts when the GPU has done the work that was launched before the recording, if that is later.
    """
    starts, ends = times_ns[graph.start_nodes], step_ends(graph, times_ns)
    earlier = times_ns[graph.work_nodes[graph.order.before]].max(initial=0)
    starts = np.where(earlier < ends, np.maximum(starts, earlier), starts)
    for rows in _by_process(graph):
        starts[rows[1:]] = ends[rows[:-1]]
    return starts, ends


def steps_on_cpu(graph: Graph, times_ns: Array) -> Array:
    """Return the time on the CPU from the end of the step before, or the start of the first step, in ns."""
    ends = times_ns[graph.end_nodes]
    lengths: Array = ends - times_ns[graph.start_nodes]
    for rows in _by_process(graph):
        lengths[rows[1:]] = np.diff(ends[rows])
    return lengths


def _by_process(graph: Graph) -> list[Array]:
    """Return the rows of the steps of each process, in order."""
    return [rows for _, rows in group_rows(process_of_threads(graph.trace)[graph.steps.thread])]
