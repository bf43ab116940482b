"""Adds up nested events to a tree of names with few nodes, whose sums stay exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Tree(NamedTuple):
    """Nodes, each after its parent.

    Attributes:
        parent: the node above each, or -1.
        key: what each is, as given; -1 for a node that stands for the small ones below its parent.
        joined: for such a node, how many nodes it stands for; else 0.
        sums: for each value that was given, the sum over the events of the node itself, without the nodes below.
    """

    parent: Array
    key: Array
    joined: Array
    sums: tuple[Array, ...]


def nodes_of(parents: Array, keys: Array) -> tuple[Array, Array, Array]:
    """Return the tree of events: events with equal keys below the same node are one node.

    Args:
        parents: for each event, the number of the event around it, or -1.
        keys: what each event is: non-negative integers below 2**31.

    Returns:
        The node of each event; the parent of each node, or -1, before its children; the key of each node.
    """
    node = np.full(len(keys), -1, np.int64)
    above, key, count = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    rows = np.flatnonzero(parents < 0)
    children = np.argsort(parents, kind="stable")
    sorted_parents = parents[children]
    around = np.full(len(rows), -1, np.int64)
    while len(rows):
        pairs, of = np.unique((around + 1) << 31 | keys[rows].astype(np.int64), return_inverse=True)
        node[rows] = count + of
        above.append((pairs >> 31) - 1)
        key.append(pairs & ((1 << 31) - 1))
        count += len(pairs)
        first, last = (np.searchsorted(sorted_parents, rows, side) for side in ("left", "right"))
        counts = last - first
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        around, rows = np.repeat(node[rows], counts), children[places]
    return node, np.concatenate(above), np.concatenate(key)


def totals(parent: Array, own: Array) -> Array:
    """Return the sum of each node and all nodes below it."""
    found = own.tolist()
    above = parent.tolist()
    for node in range(len(found) - 1, -1, -1):
        if above[node] >= 0:
            found[above[node]] += found[node]
    return np.array(found, own.dtype)


def pruned(parent: Array, key: Array, sums: tuple[Array, ...], most: int) -> Tree:
    """Return the tree with at most about ``most`` nodes; the small ones below each node become one.

    A node counts as large as its largest share of the whole, with all nodes below it, in any of the values.

    Args:
        parent: the parent of each node, or -1; parents come first.
        key: what each node is.
        sums: for each value, the sum of each node without those below it.
        most: the number of nodes to keep; one more may come below each.
    """
    if len(parent) <= most:
        return Tree(parent, key, np.zeros(len(parent), np.int64), sums)
    share = np.zeros(len(parent))
    for value in sums:
        share = np.maximum(share, totals(parent, value) / max(value.sum(), 1))
    # Of equal shares, parents are kept first: a child is never larger than its parent.
    large = np.zeros(len(parent), bool)
    large[np.argsort(-share, kind="stable")[:most]] = True
    kept = np.flatnonzero(large)
    number = np.full(len(parent) + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    nearest = _nearest_kept(parent, large)
    small = np.flatnonzero(~large)
    below, of = np.unique(nearest[small], return_inverse=True)
    joined = np.concatenate((np.zeros(len(kept), np.int64), np.bincount(of)))
    return Tree(
        np.concatenate((number[parent[kept]], number[below])),
        np.concatenate((key[kept], np.full(len(below), -1))),
        joined,
        tuple(np.concatenate((value[kept], _summed(value[small], of, len(below)))) for value in sums),
    )


def _nearest_kept(parent: Array, large: Array) -> Array:
    """Return the nearest large node above each node, or -1."""
    nearest: Array = parent.copy()
    while len(rows := np.flatnonzero((nearest >= 0) & ~large[nearest])):
        nearest[rows] = parent[nearest[rows]]
    return nearest


def _summed(values: Array, of: Array, count: int) -> Array:
    found = np.zeros(count, values.dtype)
    np.add.at(found, of, values)
    return found
