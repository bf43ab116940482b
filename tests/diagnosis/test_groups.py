"""Totals by group equal those computed from sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.metrics.tables import GroupedEvents, ancestor_pairs, sum_by_group, unique_codes

EVENTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=10).map(sorted)


@given(EVENTS, st.data())
def test_totals(events: list[tuple[int, int]], data: st.DataObject) -> None:
    """Count, sum, covered time and extent are right, also for repeated events and empty groups."""
    place = st.tuples(st.integers(0, len(events) - 1), st.integers(0, 3))
    pairs = data.draw(st.lists(place, max_size=20))
    start = np.array([start for start, _ in events])
    end = start + np.array([size for _, size in events])
    rows, groups = (np.array([pair[part] for pair in pairs], np.int64) for part in (0, 1))
    cut = rows < data.draw(st.integers(0, len(events)))
    result = GroupedEvents(start, end).totals([(rows[cut], groups[cut]), (rows[~cut], groups[~cut])], 5)
    for group in range(5):
        inside = [events[row] for row in {row for row, other in pairs if other == group}]
        busy = {at for begin, size in inside for at in range(begin, begin + size)}
        extent = max(b + s for b, s in inside) - min(b for b, _ in inside) if inside else 0
        expected = [len(inside), sum(size for _, size in inside), len(busy), extent]
        assert expected == [int(part[group]) for part in (result.count, result.sum, result.busy, result.extent)]


def test_totals_of_huge_times() -> None:
    """Extreme times in many groups do not overflow."""
    start = np.array([0, 2**62])
    result = GroupedEvents(start, start + 5).totals([(np.array([0, 1, 0, 1]), np.array([0, 0, 900, 900]))], 1000)
    assert result.busy[[0, 900]].tolist() == [10, 10]
    assert result.extent[900] == 2**62 + 5


def test_ancestor_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is paired with all its ancestors, in parts of any size."""
    for pairs in (1, 3, 1 << 20):
        monkeypatch.setattr("instrument.explain.metrics.tables._PAIRS", pairs)
        parts = list(ancestor_pairs(np.array([2, -1, 0]), np.array([-1, 0, 1])))
        found = [pair for events, above in parts for pair in zip(events.tolist(), above.tolist(), strict=True)]
        assert sorted(found) == [(0, 0), (0, 1), (0, 2), (2, 0)]
    assert list(ancestor_pairs(np.array([-1]), np.array([-1]))) == []


def test_unique_codes_and_sums() -> None:
    """Codes are numbered without gaps, and sums by group are exact beyond a float's precision."""
    names, of = unique_codes(np.array([5, 2, 5]))
    assert (names.tolist(), of.tolist()) == ([2, 5], [1, 0, 1])
    assert sum_by_group(np.array([2**60, 1, 1]), np.array([0, 0, 1]), 3).tolist() == [2**60 + 1, 1, 0]
    assert [len(part) for part in unique_codes(np.empty(0, np.int32))] == [0, 0]
