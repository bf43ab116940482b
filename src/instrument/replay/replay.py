"""Replays a graph: the time of each event, and the lengths of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..traces.intervals import Intervals
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


def step_bounds(graph: Graph, times_ns: Array) -> tuple[Array, Array]:
    """Return when each step starts and ends in a replay; see `LoopSteps.bounds`."""
    return graph.loop.bounds(times_ns[graph.start_nodes], times_ns[graph.end_nodes], times_ns[graph.work_nodes])


def step_lengths(graph: Graph, times_ns: Array) -> Array:
    """Return the lengths of the steps in ns: from the end of the step before, or the start of the first step."""
    starts, ends = step_bounds(graph, times_ns)
    lengths: Array = ends - starts
    return lengths


def steps_on_cpu(graph: Graph, times_ns: Array) -> Array:
    """Return the lengths of the steps on the CPU in a replay; see `LoopSteps.on_cpu`."""
    return graph.loop.on_cpu(times_ns[graph.start_nodes], times_ns[graph.end_nodes])
