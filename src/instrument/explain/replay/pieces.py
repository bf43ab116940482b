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
    waits, are timed one by one.

    Attributes:
        of_node: the number of the piece of each node; pieces are numbered in the order of their first nodes.
        launching: for each piece, the piece that launches its work; 0 for those of threads.
        in_order: the nodes in the order of their thread or stream, piece by piece.
        first: whether each of `in_order` is the first of its piece.
        chained: for each of `in_order`, the edge from the node before it in its piece; -1 for the first.
        launched: for each of `in_order`, the edge from its launch, or -1.
        entries: the other edges to first nodes, in the order of their pieces.
    """

    of_node: Array
    launching: Array
    in_order: Array
    first: Array
    chained: Array
    launched: Array
    entries: Array


def pieces_of(edges: Edges, lane: Array) -> Pieces:
    """Return the nodes in pieces.

    Args:
        edges: the edges, in the order of their targets.
        lane: a number for the thread or stream of each node, of which that of node 0 is the lowest.
    """
    nodes = len(lane)
    chain, launch = (np.full(nodes, -1) for _ in range(2))
    chains, launches = np.isin(edges.kind, (ON_CPU, CALLED, STREAM)), edges.kind == LAUNCHED
    chain[edges.target[chains]] = np.flatnonzero(chains)
    launch[edges.target[launches]] = np.flatnonzero(launches)
    held_up = np.ones(nodes, bool)
    held_up[edges.target[chains]] = False
    held_up[edges.target[~chains & ~launches]] = True

    in_order = np.argsort(lane, kind="stable")
    own_chain, own_launch = chain[in_order], launch[in_order]
    before = np.concatenate(([-1], in_order[:-1]))
    first = held_up[in_order] | (edges.source[own_chain] != before)
    first[0] = True

    of_node = _numbers(in_order, first)
    by = np.where(own_launch >= 0, of_node[edges.source[own_launch]], -1)
    known = np.maximum.accumulate(np.where((own_launch >= 0) | first, np.arange(nodes), 0))
    by = by[known]  # work without a launch of its own stays in the piece before it
    first[1:] |= by[1:] != by[:-1]
    of_node = _numbers(in_order, first)
    launching = np.zeros(int(first.sum()), np.int64)
    some = np.flatnonzero(own_launch >= 0)
    launching[of_node[in_order[some]]] = of_node[edges.source[own_launch[some]]]

    at_first = np.zeros(nodes, bool)
    at_first[in_order[first]] = True
    entries = np.flatnonzero(at_first[edges.target] & ~launches)
    entries = entries[np.argsort(of_node[edges.target[entries]], kind="stable")]
    return Pieces(of_node, launching, in_order, first, np.where(first, -1, own_chain), own_launch, entries)


def _numbers(in_order: Array, first: Array) -> Array:
    """Return the number of the piece of each node, in the order of the first nodes."""
    starts = in_order[first]
    rank = np.empty(len(starts), np.int64)
    rank[np.argsort(starts)] = np.arange(len(starts))
    numbers = np.empty(len(in_order), np.int64)
    numbers[in_order] = rank[np.cumsum(first) - 1]
    return numbers


def times_of(pieces: Pieces, edges: Edges, weight_ns: Array) -> Array:
    """Return the time of each node, the first at which all edges to it allow it; node 0 is at 0."""
    since_entry, since_launching = _delays(pieces, edges, weight_ns)
    source = edges.source[pieces.entries]
    of_source, weight = pieces.of_node[source], weight_ns[pieces.entries]
    entered = [NEVER] * len(pieces.launching)
    entered[0] = 0
    rows = zip(
        pieces.of_node[edges.target[pieces.entries]].tolist(),
        of_source.tolist(),
        (since_entry[source] + weight).tolist(),
        pieces.launching[of_source].tolist(),
        (since_launching[source] + weight).tolist(),
        strict=True,
    )
    for piece, before, ns, launching, launched_ns in rows:
        time = max(entered[before] + ns, entered[launching] + launched_ns)
        if time > entered[piece]:
            entered[piece] = time
    times = np.array(entered, np.int64)
    by_launch = times[pieces.launching][pieces.of_node] + since_launching
    found: Array = np.maximum(times[pieces.of_node] + since_entry, by_launch)
    return found


def _delays(pieces: Pieces, edges: Edges, weight_ns: Array) -> tuple[Array, Array]:
    """Return how much later each node is than the entry of its piece, and than that of the launching piece."""
    nodes, places = pieces.in_order, np.flatnonzero(pieces.first)
    of_place = np.cumsum(pieces.first) - 1
    passed = np.cumsum(np.where(pieces.first, 0, weight_ns[pieces.chained]))
    passed -= passed[places][of_place]
    since_entry = np.empty(len(nodes), np.int64)
    since_entry[nodes] = passed
    launched = np.flatnonzero((pieces.launched >= 0) & (weight_ns[pieces.launched] > NEVER))
    late = np.full(len(nodes), NEVER)
    edge = pieces.launched[launched]
    late[launched] = since_entry[edges.source[edge]] + weight_ns[edge] - passed[launched]
    since_launching = np.empty(len(nodes), np.int64)
    since_launching[nodes] = np.maximum(_highest_so_far(late, places, of_place) + passed, NEVER)
    return since_entry, since_launching


def _highest_so_far(values: Array, places: Array, of_place: Array) -> Array:
    """Return the running maximum of values in each part that begins at one of these places."""
    known = values > NEVER
    lowest = int(values[known].min(initial=0))
    values = np.where(known, values, lowest - 1)
    above = np.maximum.reduceat(values, places) - np.minimum.reduceat(values, places) + 1
    lift = (np.cumsum(above) - above - np.minimum.reduceat(values, places))[of_place]
    highest: Array = np.maximum.accumulate(values + lift) - lift
    return np.where(highest < lowest, NEVER, highest)
