"""Joins regions whose names differ only in numbers, such as ``layer_0`` to ``layer_31``, into one row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..traces.summary import RegionStat

_MAX_SEPARATE_REGIONS = 8
_NUMBER = re.compile(r"\d+")
_Path = tuple[str, ...]


def join_numbered(regions: Sequence[RegionStat]) -> tuple[RegionStat, ...]:
    """Return the regions with one row for more than eight beside each other that differ only in numbers.

    The row is named "layer_*" and holds their sums, and so do the rows of the regions inside them.

    Args:
        regions: A tree, each region after the one around it.
    """
    levels: dict[int, list[RegionStat]] = defaultdict(list)
    for region in regions:
        levels[len(region.path)].append(region)
    joined: dict[_Path, _Path] = {(): ()}  # the path of the row for each path
    for depth in sorted(levels):
        names: dict[tuple[_Path, str], set[str]] = defaultdict(set)
        for region in levels[depth]:
            names[_key(region, joined)].add(region.path[-1])
        for region in levels[depth]:
            around, pattern = _key(region, joined)
            many = len(names[around, pattern]) > _MAX_SEPARATE_REGIONS
            joined[region.path] = (*around, pattern if many else region.path[-1])
    rows: dict[_Path, RegionStat] = {}
    for region in regions:
        path = joined[region.path]
        rows[path] = _sum(path, rows.get(path), region)
    return tuple(rows.values())


def _key(region: RegionStat, joined: dict[_Path, _Path]) -> tuple[_Path, str]:
    """Return the path of the row around a region, and its name with its numbers replaced."""
    return joined[region.path[:-1]], _NUMBER.sub("*", region.path[-1])


def _sum(path: _Path, row: RegionStat | None, region: RegionStat) -> RegionStat:
    if row is None:
        return replace(region, path=path)
    return RegionStat(
        path,
        row.calls + region.calls,
        row.cpu_ns + region.cpu_ns,
        row.self_ns + region.self_ns,
        None if row.gpu_ns is None else row.gpu_ns + (region.gpu_ns or 0),
        row.in_steps | region.in_steps,
        row.partial or region.partial,
    )
