"""`Pieces`: the nodes of a graph in chains that only their first node can hold up, to time all nodes at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...read.tables.table import Array
from .edges import CALLED, LAUNCHED, ON_CPU, STREAM, Edges

NEVER = -(2**60)
"""The time of what nothing leads to, and the weight of a removed edge; sums of a few fit into 64 bits."""


class Pieces(NamedTuple):
    """The nodes of a graph in pieces: parts of one thread or one stream.

    Only the first node of a piece waits for other pieces; the others wait for the node before them and, on the
    GPU, for their launches, which all belong to one piece of a thread. So two times are enough to know when each
    node happens: when the first node could happen without its launch, and when the launching piece begins. The
    delays after these are sums and maxima of whole columns; only pieces, of which there are about as many as
    waits, are timed one by one. Places are those of nodes in ``in_order``.

    Attributes:
        in_order: the nodes in the order of their thread or stream, piece by piece.
        first: the place of the first node of each piece.
        number: the number of each of these pieces, in the order of their first nodes.
        launching: for each piece by its number, the piece that launches its work; 0 for those of threads.
        chained: for each place, the edge from the node before it; meaningless at the first of a piece.
        launched: the places of launched work.
        launches: the edge from each launch.
        launched_from: the place of each launch.
        entries: the other edges to first nodes, in the order of their pieces.
        entered: the number of the piece that each of these leads to.
        entered_from: the place that it comes from.
        entered_by: the number of the piece that it comes from.
    """

    in_order: Array
    first: Array
    number: Array
    launching: Array
    chained: Array
    launched: Array
    launches: Array
    launched_from: Array
    entries: Array
    entered: Array
    entered_from: Array
    entered_by: Array


def pieces_of(edges: Edges, lane: Array) -> Pieces:
    """Return the nodes in pieces.

    Args:
        edges: the edges, in the order of their targets.
        lane: a number for the thread or stream of each node, of which that of node 0 is the lowest.
    """
    nodes = len(lane)
    chain, launch = np.full((2, nodes), -1, np.int32)
    is_chain, is_launch = np.isin(edges.kind, (ON_CPU, CALLED, STREAM)), edges.kind == LAUNCHED
    chain[edges.target[is_chain]] = np.flatnonzero(is_chain)
    launch[edges.target[is_launch]] = np.flatnonzero(is_launch)
    held_up = np.ones(nodes, bool)
    held_up[edges.target[is_chain]] = False
    held_up[edges.target[~is_chain & ~is_launch]] = True

    in_order = np.argsort(lane, kind="stable").astype(np.int32)
    place = np.empty(nodes, np.int32)
    place[in_order] = np.arange(nodes)
    chained, launches = chain[in_order], launch[in_order]
    launched = np.flatnonzero(launches >= 0).astype(np.int32)
    launches = launches[launched]
    launched_from = place[edges.source[launches]]

    begins = held_up[in_order]
    begins[1:] |= edges.source[chained[1:]] != in_order[:-1]
    begins[0] = True
    known, by = begins.copy(), np.full(nodes, -1)
    known[launched], by[launched] = True, np.cumsum(begins)[launched_from]
    by = by[np.maximum.accumulate(np.where(known, np.arange(nodes), 0))]
    begins[1:] |= by[1:] != by[:-1]  # work without a launch of its own stays in the piece before it

    first = np.flatnonzero(begins)
    number = np.empty(len(first), np.int64)
    number[np.argsort(in_order[first])] = np.arange(len(first))
    of_place = number[np.cumsum(begins) - 1]
    launching = np.zeros(len(first), np.int64)
    launching[of_place[launched]] = of_place[launched_from]

    entries = np.flatnonzero(begins[place[edges.target]] & ~is_launch)
    entered = of_place[place[edges.target[entries]]]
    order = np.argsort(entered, kind="stable")
    entries, entered = entries[order], entered[order]
    entered_from = place[edges.source[entries]]
    return Pieces(
        in_order,
        first,
        number,
        launching,
        chained,
        launched,
        launches,
        launched_from,
        entries,
        entered,
        entered_from,
        of_place[entered_from],
    )


def times_of(pieces: Pieces, weight_ns: Array) -> Array:
    """Return the time of each node, the first at which all edges to it allow it; node 0 is at 0."""
    since_entry, since_launching = _delays(pieces, weight_ns)
    weight = weight_ns[pieces.entries]
    begun = [NEVER] * len(pieces.first)
    begun[0] = 0
    rows = zip(
        pieces.entered.tolist(),
        pieces.entered_by.tolist(),
        (since_entry[pieces.entered_from] + weight).tolist(),
        pieces.launching[pieces.entered_by].tolist(),
        (since_launching[pieces.entered_from] + weight).tolist(),
        strict=True,
    )
    for piece, before, ns, launching, launched_ns in rows:
        time = max(begun[before] + ns, begun[launching] + launched_ns)
        if time > begun[piece]:
            begun[piece] = time
    begun_ns = np.array(begun, np.int64)
    since_entry += _spread(pieces, begun_ns[pieces.number])
    since_launching += _spread(pieces, begun_ns[pieces.launching[pieces.number]])
    times = np.empty(len(since_entry), np.int64)
    times[pieces.in_order] = np.maximum(since_entry, since_launching)
    return times


def _spread(pieces: Pieces, values: Array) -> Array:
    """Return the value of the piece of each place."""
    spread: Array = np.repeat(values, np.diff(pieces.first, append=len(pieces.in_order)))
    return spread


def _delays(pieces: Pieces, weight_ns: Array) -> tuple[Array, Array]:
    """Return how much later each place is than the entry of its piece, and than that of the launching piece."""
    passed = weight_ns[pieces.chained]
    passed[pieces.first] = 0
    passed = np.cumsum(passed, out=passed)
    passed -= _spread(pieces, passed[pieces.first])
    kept = weight_ns[pieces.launches] > NEVER
    at = pieces.launched[kept]
    late = np.full(len(passed), NEVER)
    late[at] = passed[pieces.launched_from[kept]] + weight_ns[pieces.launches[kept]] - passed[at]
    return passed, np.maximum(_highest_so_far(pieces, late) + passed, NEVER)


def _highest_so_far(pieces: Pieces, values: Array) -> Array:
    """Return the running maximum of the values in each piece."""
    known = values > NEVER
    lowest = int(values[known].min(initial=0))
    values[~known] = lowest - 1
    low = np.minimum.reduceat(values, pieces.first)
    above = np.maximum.reduceat(values, pieces.first) - low + 1
    lift = _spread(pieces, np.cumsum(above) - above - low)
    values += lift
    highest: Array = np.maximum.accumulate(values, out=values)
    highest -= lift
    highest[highest < lowest] = NEVER
    return highest
