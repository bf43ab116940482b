"""The zoom levels of a timeline show each slice once, by itself or merged, and never too many."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from instrument.read.charts.timeline import Slices, Zoom, packed, stacked, zoom_levels


def made(seed: int, count: int = 3000, rows: int = 3) -> Slices:
    """Return slices of very different lengths, without overlaps in a row."""
    random = np.random.default_rng(seed)
    columns = []
    for row in range(rows):
        gaps = random.integers(0, 100, count)
        lengths = np.maximum(random.pareto(0.7, count) * 20, 1).astype(np.int64)
        end = 1_000 + np.cumsum(gaps + np.minimum(lengths, 100_000))
        columns.append(
            (np.full(count, row), end - np.minimum(lengths, 100_000), end, random.integers(0, 4, count))
        )
    return Slices(*(np.concatenate(each) for each in zip(*columns, strict=True)))


def window_of(slices: Slices) -> tuple[int, int]:
    return 1_000, int(slices.end_ns.max())


def shown(zoom: Zoom, level: int) -> tuple[np.ndarray[Any, Any], list[Any]]:
    """Return the slices that a level shows one by one, and the merged ones, also of what it leaves out."""
    single = np.concatenate([each.single for each in zoom.levels[: level + 1]])
    merged = [zoom.levels[level].merged]
    if level >= zoom.whole:
        rest = zoom.levels[zoom.whole - 1].merged
        outside = np.ones(len(rest.row), bool)
        for start, end in zoom.detailed:
            outside &= (rest.start_ns < start) | (rest.start_ns >= end)
        merged.append(type(rest)(*(column[outside] for column in rest)))
    return single, merged


def test_nested_slices_lie_below() -> None:
    """The depth of nested slices is the number of those around them."""
    start, end = np.array([0, 1, 2, 5, 10, 10]), np.array([10, 5, 3, 6, 20, 12])
    assert stacked(start, end).tolist() == [0, 1, 2, 1, 0, 1]
    assert stacked(start[:0], end[:0]).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_depths_never_overlap(seed: int) -> None:
    """Slices of one depth do not overlap, nested or not."""
    random = np.random.default_rng(seed)
    start = np.sort(random.integers(0, 1000, 300))
    end = start + random.integers(1, 60, 300)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    depth = stacked(start, end)
    for each in np.unique(depth):
        rows = depth == each
        assert (start[rows][1:] >= end[rows][:-1]).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("detailed", [[], [(20_000, 60_000), (200_000, 260_000)]])
@pytest.mark.parametrize("most", [100, 2_000, 12_000, 100_000])
def test_levels_show_all(seed: int, detailed: list[tuple[int, int]], most: int) -> None:
    """Each level shows each slice once and covers the same time; slices as long as its resolution are single."""
    slices = made(seed)
    length = slices.end_ns - slices.start_ns
    zoom = zoom_levels(slices, window_of(slices), detailed, most)
    assert sum(map(len, zoom.levels)) <= most
    for level, (resolution, _, _) in enumerate(zoom.levels):
        single, merged = shown(zoom, level)
        assert len(np.unique(single)) == len(single)
        assert len(single) + sum(int(each.slices.sum()) for each in merged) == len(length)
        assert length[single].sum() + sum(int(each.covered_ns.sum()) for each in merged) == length.sum()
        if level < zoom.whole:
            assert set(np.flatnonzero(length >= resolution)) <= set(single.tolist())
        spans = [(slices.row[single], slices.start_ns[single], slices.end_ns[single])]
        spans += [(each.row, each.start_ns, each.end_ns) for each in merged]
        row, start, end = (np.concatenate(column) for column in zip(*spans, strict=True))
        order = np.lexsort((start, row))
        same = np.diff(row[order]) == 0
        assert (start[order][1:] >= end[order][:-1])[same].all()


def test_all_single_at_last() -> None:
    """With room for all, the last level merges nothing."""
    slices = made(0)
    zoom = zoom_levels(slices, window_of(slices), [(20_000, 60_000)], 100_000)
    assert len(zoom.levels[-1].merged.row) == 0
    assert (zoom.whole, zoom.detailed) == (len(zoom.levels), [])


def test_detailed_parts_get_more() -> None:
    """Of too many slices, those in the detailed parts are shown one by one."""
    slices, part = made(1, 20_000), (100_000, 160_000)
    zoom = zoom_levels(slices, window_of(slices), [part], 20_000)
    inside = np.flatnonzero((slices.start_ns >= part[0]) & (slices.start_ns < part[1]))
    single = np.concatenate([level.single for level in zoom.levels])
    assert zoom.detailed == [part] and zoom.whole < len(zoom.levels)
    assert set(inside.tolist()) <= set(single.tolist())
    assert len(single) < len(slices.row) / 2


def test_class_of_most() -> None:
    """A merged slice has the class that covers most of its time."""
    start = np.arange(0, 4000, 10)
    length = np.where(np.arange(400) % 4 == 0, 9, 2)
    slices = Slices(np.zeros(400, int), start, start + length, np.where(length == 9, 5, 1))
    zoom = zoom_levels(slices, (0, 1_000_000), [], 100)
    assert zoom.levels[0].merged.kind.tolist() == [5] * len(zoom.levels[0].merged.row)
    assert int(zoom.levels[0].merged.covered_ns.sum()) == length.sum()


def test_packed_columns() -> None:
    """The starts and ends of a row are the sums of its gaps and lengths."""
    slices = made(2, 200)
    zoom = zoom_levels(slices, window_of(slices), [], 10_000)
    levels = json.loads(msgspec.json.encode(packed(slices, zoom, 1_000, name=np.arange(600))))
    found = {}
    for level in levels:
        columns, at = level["single"], 0
        for row, count in enumerate(columns["rows"]):
            time = 1_000
            for place in range(at, at + count):
                start = time + columns["gap"][place]
                time = start + columns["length"][place]
                found[columns["name"][place]] = (row, start, time)
            at += count
    expected = zip(slices.row.tolist(), slices.start_ns.tolist(), slices.end_ns.tolist(), strict=True)
    assert found == dict(enumerate(expected))
