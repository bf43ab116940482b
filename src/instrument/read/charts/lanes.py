"""Reduces the slices of a timeline to zoom levels, so that a page shows a million of them with little data."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..tables.table import Array

_CELLS = 2000  # of the coarsest level: about one for each pixel of a screen
_CELL = 4  # resolutions: the slices of a merged one begin within this time
_FINER = 4  # factor of the resolution from level to level


class Slices(NamedTuple):
    """Slices in rows; those of a row are in order of start and do not overlap.

    Attributes:
        row: the row of each slice, in ascending order.
        start_ns: its start.
        end_ns: its end, later than its start.
        kind: the number of its class.
    """

    row: Array
    start_ns: Array
    end_ns: Array
    kind: Array


class Merged(NamedTuple):
    """Runs of slices that a level shows as one.

    Attributes:
        row: the row of each run.
        start_ns: the start of its first slice.
        end_ns: the end of its last.
        slices: its number of slices.
        covered_ns: the sum of their lengths.
        kind: the class with the largest part of this sum.
    """

    row: Array
    start_ns: Array
    end_ns: Array
    slices: Array
    covered_ns: Array
    kind: Array


class Level(NamedTuple):
    """What a zoom level adds to those above it, whose single slices it shows as well.

    Attributes:
        resolution_ns: slices at least as long are shown one by one.
        single: the numbers of the slices that this level is the first to show one by one.
        merged: the others, which replace the merged slices of the level above.
    """

    resolution_ns: int
    single: Array
    merged: Merged

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self.single) + len(self.merged.row)


class Zoom(NamedTuple):
    """Zoom levels, the coarsest first.

    Attributes:
        levels: the levels.
        whole: how many of them cover the whole window; the others cover the detailed parts.
        detailed: the parts of the window with more levels.
    """

    levels: list[Level]
    whole: int
    detailed: list[tuple[int, int]]


def stacked(start_ns: Array, end_ns: Array) -> Array:
    """Return a depth for each slice of a lane, so that those of one depth do not overlap.

    Nested slices lie below those around them. If some overlap without being nested, each slice of the lane takes
    the first depth that is free.

    Args:
        start_ns: the starts, ascending; of equal starts, the longest slice first.
        end_ns: the ends, each later than its start.
    """
    depth = np.arange(len(start_ns)) - np.searchsorted(np.sort(end_ns), start_ns, "right")
    order = np.lexsort((start_ns, depth))
    one, next_ = order[:-1], order[1:]
    if ((depth[one] == depth[next_]) & (start_ns[next_] < end_ns[one])).any():
        return np.array(_first_free(start_ns.tolist(), end_ns.tolist()), np.int64)
    return depth


def _first_free(starts: list[int], ends: list[int]) -> list[int]:
    taken: list[tuple[int, int]] = []  # heap of ends and depths
    free: list[int] = []  # heap of depths
    depths = []
    for start, end in zip(starts, ends, strict=True):
        while taken and taken[0][0] <= start:
            heappush(free, heappop(taken)[1])
        depths.append(heappop(free) if free else len(taken))
        heappush(taken, (end, depths[-1]))
    return depths


def zoom_levels(slices: Slices, window: tuple[int, int], detailed: Sequence[tuple[int, int]], most: int) -> Zoom:
    """Return the zoom levels of a timeline.

    Args:
        slices: all slices.
        window: the time that the coarsest level shows.
        detailed: parts of the window, none or disjoint, that get finer levels than the rest: half of ``most`` is
            theirs, unless that is enough for all slices.
        most: how many slices all levels may have together; at least a few for each row.
    """
    part = np.full(len(slices.row), -1, np.int8)
    for number, (start, end) in enumerate(detailed):
        part[(slices.start_ns >= start) & (slices.start_ns < end)] = number
    halved = len(detailed) > 0 and 2 * len(slices.row) > most
    levels: list[Level] = []
    left = _add_levels(levels, slices, part, np.arange(len(slices.row)), window, most // 2 if halved else most)
    whole = len(levels)
    if halved:
        _add_levels(levels, slices, part, left[part[left] >= 0], window, most)
    return Zoom(levels, whole, list(detailed) if len(levels) > whole else [])


def _add_levels(
    levels: list[Level], slices: Slices, part: Array, left: Array, window: tuple[int, int], most: int
) -> Array:
    """Add levels of the slices ``left`` as long as all levels together have at most ``most`` slices.

    Returns:
        The slices that no level shows one by one.
    """
    span = window[1] - window[0]
    resolution = levels[-1].resolution_ns // _FINER if levels else max(span // _CELLS, 1)
    used = sum(map(len, levels))
    while len(left):
        level, rest = _level(slices, part, left, resolution, window[0])
        if used + len(level) > most:
            if levels or resolution > span:
                break
            resolution *= _FINER
            continue
        levels.append(level)
        left, used, resolution = rest, used + len(level), resolution // _FINER
    return left


def _level(slices: Slices, part: Array, left: Array, resolution: int, low: int) -> tuple[Level, Array]:
    """Return a level, and which of the slices that were left it merges."""
    short = (slices.end_ns[left] - slices.start_ns[left]) < resolution
    some = left[short]
    row, start, end = slices.row[some], slices.start_ns[some], slices.end_ns[some]
    new = np.zeros(len(some), bool)
    new[:1] = True
    # A run also ends at a slice that is shown by itself: the numbers of its neighbors are not adjacent.
    for key in (some - np.arange(len(some)), row, (start - low) // max(_CELL * resolution, 1), part[some]):
        new[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(new)
    counts = np.diff(first, append=len(some))
    alone = np.repeat(counts == 1, counts)
    several = counts > 1
    begin, last = first[several], (first + counts - 1)[several]
    covered, kind = _covered(end - start, slices.kind[some], first, several)
    merged = Merged(row[begin], start[begin], end[last], counts[several], covered, kind)
    single = np.sort(np.concatenate((left[~short], some[alone])))
    return Level(resolution, single, merged), some[~alone]


def _covered(length: Array, kind: Array, first: Array, several: Array) -> tuple[Array, Array]:
    """Return the sum of the lengths of each run of several slices, and the class with most of it."""
    most, of, total = (np.zeros(int(several.sum()), np.int64) for _ in range(3))
    for each in np.unique(kind).tolist():
        covered = np.add.reduceat(np.where(kind == each, length, 0), first)[several]
        of[covered > most] = each
        most, total = np.maximum(most, covered), total + covered
    return total, of


def packed(slices: Slices, zoom: Zoom, low_ns: int, **columns: Array) -> list[dict[str, Any]]:
    """Return the levels as columns of small integers, which compress well.

    A level has the number of slices of each row (``rows``) and, one after the other, their gap since the end of
    the slice before them (of the first in a row, since ``low_ns``) and their length; of single slices also
    ``columns``, of merged ones the rest of `Merged`. The columns are JSON, since lists take ten times the memory.

    Args:
        slices: all slices.
        zoom: the levels.
        low_ns: the time that the page counts from.
        **columns: more columns of `slices`.
    """
    rows = int(slices.row.max(initial=-1)) + 1

    def level_of(resolution: int, single: Array, merged: Merged) -> dict[str, Any]:
        own = slices.row[single], slices.start_ns[single], slices.end_ns[single]
        added = {name: column[single] for name, column in columns.items()}
        counts = {"slices": merged.slices, "covered": merged.covered_ns, "kind": merged.kind}
        return {
            "resolution_ns": resolution,
            "single": _as_json(_times(*own, rows, low_ns) | added),
            "merged": _as_json(_times(merged.row, merged.start_ns, merged.end_ns, rows, low_ns) | counts),
        }

    return [level_of(*level) for level in zoom.levels]


def _times(row: Array, start: Array, end: Array, rows: int, low: int) -> dict[str, Array]:
    before = np.full(len(row), low)
    before[1:] = np.where(row[1:] == row[:-1], end[:-1], low)
    return {"rows": np.bincount(row, minlength=rows), "gap": start - before, "length": end - start}


def _as_json(columns: dict[str, Array]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(column.tolist())) for name, column in columns.items()}
