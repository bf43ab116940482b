"""Trees of names: equal names below one node are one node, and what is left out stays in the sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instrument.page.tree import nodes_of, pruned, totals

events = st.lists(st.tuples(st.integers(-1, 10**6), st.integers(0, 3), st.integers(0, 100)), max_size=60)


def columns(drawn: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parents (of earlier events), keys and values."""
    parents = [parent % (row + 1) - 1 for row, (parent, _, _) in enumerate(drawn)]
    return (np.array(column, np.int64) for column in (parents, [k for _, k, _ in drawn], [v for *_, v in drawn]))


@given(events)
def test_same_paths_as_one_by_one(drawn: list[tuple[int, int, int]]) -> None:
    """The sum of each path of names is that of adding up event by event."""
    parents, keys, values = columns(drawn)
    node, parent, key = nodes_of(parents, keys)
    paths: list[tuple[int, ...]] = []
    expected: dict[tuple[int, ...], int] = {}
    for above, own, value in zip(parents.tolist(), keys.tolist(), values.tolist(), strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), own))
        expected[paths[-1]] = expected.get(paths[-1], 0) + value
    of_node: list[tuple[int, ...]] = []
    for above, own in zip(parent.tolist(), key.tolist(), strict=True):
        assert above < len(of_node)
        of_node.append((*(of_node[above] if above >= 0 else ()), own))
    assert len(set(of_node)) == len(of_node)
    found = dict.fromkeys(of_node, 0)
    for number, value in zip(node.tolist(), values.tolist(), strict=True):
        found[of_node[number]] += value
    assert found == expected


@given(events, st.integers(1, 20))
def test_pruned_keeps_sums(drawn: list[tuple[int, int, int]], most: int) -> None:
    """A pruned tree has the same whole, and each node it keeps the same total."""
    parents, keys, values = columns(drawn)
    node, parent, key = nodes_of(parents, keys)
    own = np.bincount(node, values, len(parent)).astype(np.int64) if len(node) else np.zeros(0, np.int64)
    tree = pruned(parent, key, (own, own * 2), most)
    assert (tree.parent < np.arange(len(tree.parent))).all()
    kept = tree.key >= 0
    assert kept.sum() <= max(most, 0) or len(parent) <= most
    assert tree.sums[0].sum() == own.sum()
    assert (tree.sums[1] == 2 * tree.sums[0]).all()
    assert kept.sum() + tree.joined.sum() == len(parent)
    before, after = totals(parent, own), totals(tree.parent, tree.sums[0])
    large = sorted(before.tolist(), reverse=True)[: int(kept.sum())]
    assert sorted(after[kept].tolist(), reverse=True) == large
