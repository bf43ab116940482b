"""Sets of intervals equal sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.tables.intervals import (
    Intervals,
    clip,
    covered_ns,
    merge_overlaps,
    overlap_ns,
    total_ns,
    union,
)

Pairs = list[tuple[int, int]]
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


def columns(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([start for start, _ in pairs], np.int64)
    return start, start + np.array([size for _, size in pairs], np.int64)


def points(pairs: Pairs) -> set[int]:
    return {at for start, size in pairs for at in range(start, start + size)}


def covered_points(intervals: Intervals) -> set[int]:
    starts, ends = (part.tolist() for part in intervals)
    edges = [edge for pair in zip(starts, ends, strict=True) for edge in pair]
    assert all(one < other for one, other in pairwise(edges)), "ascending, apart and not empty"
    return {at for start, end in zip(starts, ends, strict=True) for at in range(start, end)}


@given(PAIRS)
def test_union(pairs: Pairs) -> None:
    """Merged intervals cover the same time, in any order, even with empty ones."""
    result = merge_overlaps(*columns(pairs))
    assert covered_points(result) == points(pairs)
    assert total_ns(result) == len(points(pairs))


@given(PAIRS, PAIRS)
def test_two_sets(one: Pairs, other: Pairs) -> None:
    """The union of two sets, and the length of their intersection, are right."""
    first, second = merge_overlaps(*columns(one)), merge_overlaps(*columns(other))
    assert covered_points(union(first, second)) == points(one) | points(other)
    assert overlap_ns(first, second) == overlap_ns(second, first) == len(points(one) & points(other))


@given(PAIRS, PAIRS)
def test_covered(one: Pairs, other: Pairs) -> None:
    """The covered part of each interval is right, also if intervals overlap."""
    result = covered_ns(merge_overlaps(*columns(one)), *columns(other)).tolist()
    assert result == [len(points(one) & points([pair])) for pair in other]


@given(PAIRS, st.integers(-5, 45), st.integers(-5, 45))
def test_clip(pairs: Pairs, start: int, end: int) -> None:
    """Clipping keeps the parts between two times."""
    assert covered_points(clip(merge_overlaps(*columns(pairs)), start, end)) == points(pairs) & set(
        range(start, end)
    )


def test_large_times() -> None:
    """Times since 1970 and later are exact."""
    start = np.array([2**62, 2**62 + 1], np.int64)
    assert total_ns(merge_overlaps(start, start + 3)) == 4
