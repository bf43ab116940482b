"""Rows become a tree whose sums are exact, however many nodes are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.charts.flame import JOINED, Tree, tree_of


def made(parents: list[int], keys: list[int], values: list[int], most: int = 100) -> Tree:
    column = np.array(values, np.int64).reshape(-1, 1)
    return tree_of(np.array(parents, np.int64), np.array(keys, np.int64), column, np.ones_like(column), most)


def totals(tree: Tree) -> list[int]:
    found = tree.own[:, 0].tolist()
    order = range(len(found))
    for node in sorted(order, key=lambda node: -depth(tree, node)):
        if tree.parent[node] >= 0:
            found[tree.parent[node]] += found[node]
    return found


def depth(tree: Tree, node: int) -> int:
    return 0 if node < 0 else 1 + depth(tree, int(tree.parent[node]))


def test_same_path_is_one_node() -> None:
    """Rows below the same node with the same key are one node, with the sums of their values and counts."""
    tree = made([-1, 0, 0, -1, 3], [7, 1, 2, 7, 1], [5, 10, 1, 6, 20])
    assert tree.parent.tolist() == [-1, 0, 0]
    assert tree.key.tolist() == [7, 1, 2]
    assert tree.own[:, 0].tolist() == [11, 30, 1]
    assert tree.counts[:, 0].tolist() == [2, 2, 1]


def test_parents_may_come_later() -> None:
    """The row above a row may come after it."""
    tree = made([1, -1], [3, 4], [1, 2])
    assert (tree.parent.tolist(), tree.key.tolist()) == ([-1, 0], [4, 3])


def test_small_nodes_are_joined() -> None:
    """Nodes that are not kept are one node below each node above; nodes without value are left out."""
    tree = made([-1, 0, 0, 0, 3, 0], [0, 1, 2, 3, 4, 5], [0, 100, 3, 1, 2, 0], most=2)
    assert tree.key.tolist() == [0, 1, JOINED]
    assert tree.own[:, 0].tolist() == [0, 100, 6]
    assert tree.joined.tolist() == [0, 0, 2]
    assert totals(tree)[0] == 106


def test_outermost_nodes_are_joined() -> None:
    """Outermost nodes that are not kept are one outermost node."""
    tree = made([-1, -1, -1], [0, 1, 2], [5, 2, 1], most=1)
    assert (tree.parent.tolist(), tree.own[:, 0].tolist(), tree.joined.tolist()) == ([-1, -1], [5, 3], [0, 2])


def test_empty() -> None:
    """No rows make a tree without nodes."""
    assert len(made([], [], []).parent) == 0


def test_deep() -> None:
    """A path of many rows takes time in proportion to its length."""
    count = 20_000
    tree = made(list(range(-1, count - 1)), [0] * count, [1] * count, most=count)
    assert tree.parent.tolist() == list(range(-1, count - 1))


@pytest.mark.fuzz
@given(st.data())
def test_sums(data: st.DataObject) -> None:
    """The sum is that of the rows, a parent comes first, and at most twice as many nodes are left."""
    count = data.draw(st.integers(1, 30))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(count)]
    keys = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    values = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    most = data.draw(st.integers(1, 12))
    tree = made(parents, keys, values, most)
    assert tree.own.sum() == sum(values)
    assert (tree.parent < np.arange(len(tree.parent))).all()
    assert len(tree.parent) <= 2 * most + 1
