"""Merges rows with the same path into the nodes of a flame graph, and joins the smallest; all sums stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..tables.table import Array

JOINED = -1
"""The key of a node that stands for several small ones."""


class Tree(NamedTuple):
    """The nodes of a tree; a node comes after the node above it, and siblings are in order of their first row.

    The total of a node is its own value and the totals of the nodes below it.

    Attributes:
        parent: the node above, or -1.
        key: the key of the rows; `JOINED` for a node that stands for several small siblings.
        own: a row of values for each node, without those of the nodes below it.
        counts: a row of counts for each node.
        joined: how many siblings a node stands for; 0 for all but those with the key `JOINED`.
    """

    parent: Array
    key: Array
    own: Array
    counts: Array
    joined: Array


def tree_of(parents: Array, keys: Array, values: Array, counts: Array, most: int) -> Tree:
    """Return the tree of rows.

    Args:
        parents: for each row the row above it, or -1; without cycles.
        keys: what distinguishes rows below the same node, as integers from 0.
        values: a row of values for each row, as integers from 0, such as times. Nodes without any are left out.
        counts: a row of counts for each row.
        most: how many nodes are kept, those with the largest totals; below each, one node stands for all others.
    """
    nodes, parent, key = _merged(parents, keys)
    own, number = (np.zeros((len(parent), each.shape[1]), np.int64) for each in (values, counts))
    for sums, each in ((own, values), (number, counts)):
        for column in range(each.shape[1]):
            np.add.at(sums[:, column], nodes, each[:, column])
    total = own.copy()
    for level in reversed(list(_levels(parent))):
        inner = level[parent[level] >= 0]
        np.add.at(total, parent[inner], total[inner])
    return _pruned(Tree(parent, key, own, number, np.zeros(len(parent), np.int64)), total, most)


def _merged(parents: Array, keys: Array) -> tuple[Array, Array, Array]:
    """Return the node of each row, and the parent and the key of each node."""
    node_of = np.full(len(parents) + 1, -1)
    parent, key, count, base = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0, int(keys.max(initial=0)) + 1
    for rows in _levels(parents):
        paths = (node_of[parents[rows]] + 1) * base + keys[rows]
        found, first, which = np.unique(paths, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        node_of[rows] = count + place[which.reshape(-1)]
        parent.append(found[order] // base - 1)
        key.append(found[order] % base)
        count += len(found)
    return node_of[:-1], np.concatenate(parent), np.concatenate(key)


def _levels(parents: Array) -> Iterator[Array]:
    """Yield the rows of each depth, the outermost first."""
    order = np.argsort(parents, kind="stable")
    first = np.searchsorted(parents[order], np.arange(-1, len(parents) + 1))
    rows = np.array([-1])
    while len(rows):
        begin, size = first[rows + 1], first[rows + 2] - first[rows + 1]
        rows = order[np.repeat(begin - np.cumsum(size) + size, size) + np.arange(size.sum())]
        if len(rows):
            yield rows


def _pruned(tree: Tree, total: Array, most: int) -> Tree:
    """Return the tree of the largest nodes; below each of them, the others are joined into one."""
    size = total.sum(axis=1)
    largest = np.argsort(-size, kind="stable")[:most]  # a node above is never smaller, and comes first
    kept = np.zeros(len(size) + 1, bool)
    kept[largest] = size[largest] > 0
    kept[-1] = True  # what is above the outermost nodes
    left_out = np.flatnonzero(~kept[:-1] & kept[tree.parent] & (size > 0))
    below, of = np.unique(tree.parent[left_out], return_inverse=True)
    own, counts = (np.zeros((len(below), each.shape[1]), np.int64) for each in (tree.own, tree.counts))
    np.add.at(own, of.reshape(-1), total[left_out])
    np.add.at(counts, of.reshape(-1), tree.counts[left_out])
    rows = np.flatnonzero(kept[:-1])
    place = np.full(len(size) + 1, -1)
    place[rows] = np.arange(len(rows))
    return Tree(
        np.concatenate((place[tree.parent[rows]], place[below])),
        np.concatenate((tree.key[rows], np.full(len(below), JOINED))),
        np.concatenate((tree.own[rows], own)),
        np.concatenate((tree.counts[rows], counts)),
        np.concatenate((tree.joined[rows], np.bincount(of.reshape(-1), minlength=len(below)))),
    )


def packed_tree(tree: Tree, base: int, names: dict[int, int]) -> dict[str, Any]:
    """Return a tree as the script of the flame graph reads it.

    Args:
        tree: the tree. A key of it is a kind times ``base``, and a name.
        base: more than any name.
        names: the keys that the page has a text for, with their numbers; those of the tree are added.
    """
    keys = tree.key.tolist()
    return {
        "parent": tree.parent.tolist(),
        "name": [-1 if key == JOINED else names.setdefault(key, len(names)) for key in keys],
        "kind": [-1 if key == JOINED else key // base for key in keys],
        "joined": {node: count for node, count in enumerate(tree.joined.tolist()) if count},
        "values": tree.own.T.tolist(),
        "counts": tree.counts.T.tolist(),
    }
