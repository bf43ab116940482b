"""The time of the outermost regions per step, on the CPU and of the GPU work that they launched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..traces.table import Array
from .groups import sum_by_group, unique_codes
from .trace_facts import TraceFacts

_NUMBER = re.compile(r"\d+")
_MAX_SEPARATE_REGIONS = 8  # whose names differ only in numbers


class RegionTimes(NamedTuple):
    """The times per step of the calls of a region that are inside no other region.

    Attributes:
        name: its name.
        cpu_ns: its time on the CPU during the steps.
        gpu_ns: the sum of the durations of the GPU work that it launched.
    """

    name: str
    cpu_ns: int
    gpu_ns: int


def outermost_regions(facts: TraceFacts) -> tuple[RegionTimes, ...]:
    """Return the times of the outermost regions that run during the steps, by name, the longest first."""
    regions, steps, gpu = facts.trace.regions, facts.trace.steps, facts.trace.gpu
    if not regions:
        return ()
    begin, end = regions.start_ns, regions.end_ns
    if steps:
        begin, end = np.maximum(begin, steps.start_ns.min()), np.minimum(end, steps.end_ns.max())
    cpu_ns = np.where(regions.parent < 0, np.maximum(end - begin, 0), 0)
    names, of = unique_codes(regions.name)
    work = np.flatnonzero(gpu.region >= 0)
    outermost = _outermost(regions.parent)[gpu.region[work]]
    inside = cpu_ns[outermost] > 0
    by_name = (
        sum_by_group(cpu_ns, of, len(names)),
        sum_by_group(gpu.duration_ns[work][inside], of[outermost[inside]], len(names)),
    )
    rows = [
        RegionTimes(regions.strings[code], facts.per_step(cpu), facts.per_step(on_gpu))
        for code, cpu, on_gpu in zip(names.tolist(), *(column.tolist() for column in by_name), strict=True)
        if cpu
    ]
    return tuple(sorted(rows, key=_longer))


def joined_regions(regions: Sequence[RegionTimes]) -> list[RegionTimes]:
    """Return the regions, the longest first; more than eight whose names differ only in numbers are one row."""
    patterns = Counter(_NUMBER.sub("*", region.name) for region in regions)
    rows: dict[str, RegionTimes] = {}
    for region in regions:
        pattern = _NUMBER.sub("*", region.name)
        name = pattern if patterns[pattern] > _MAX_SEPARATE_REGIONS else region.name
        _, cpu_ns, gpu_ns = rows.get(name, RegionTimes(name, 0, 0))
        rows[name] = RegionTimes(name, cpu_ns + region.cpu_ns, gpu_ns + region.gpu_ns)
    return sorted(rows.values(), key=_longer)


def _outermost(parent: Array) -> Array:
    """Return the row of the outermost region around each region, or the region itself."""
    row = np.arange(len(parent))
    while (inside := parent[row] >= 0).any():
        row[inside] = parent[row[inside]]
    return row


def _longer(row: RegionTimes) -> int:
    return -max(row.cpu_ns, row.gpu_ns)
