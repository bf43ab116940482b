"""The longest outermost regions of a step, and the longest gaps in which no GPU works, each with its cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...base.findings import Where
from ...read.tables.nest import outermost_rows
from ..metrics.idle import CAUSES
from ..metrics.tables import sum_by_group, unique_codes
from ..rules.trace_facts import TraceFacts

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
    outermost = outermost_rows(gpu.region[work], regions.parent)
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


def _longer(row: RegionTimes) -> int:
    return -max(row.cpu_ns, row.gpu_ns)


_LISTED = 10
_LEAST = 0.001  # of the step


class IdleGap(NamedTuple):
    """A gap.

    Attributes:
        start_ns: when it begins, from the start of the window.
        duration_ns: how long it lasts.
        cause: the one of `instrument.explain.metrics.idle.CAUSES` that holds for most of it.
        where: the place of the call that launches the work after it, which is ``kernel``.
    """

    start_ns: int
    duration_ns: int
    cause: str
    where: Where


def longest_gaps(facts: TraceFacts) -> tuple[IdleGap, ...]:
    """Return the longest gaps of the window, at most ten, without those below a thousandth of a step."""
    idle, gpu = facts.idle, facts.gpu
    length = idle.end_ns - idle.start_ns
    order = np.argsort(-length, kind="stable")[:_LISTED]
    order = order[length[order] >= _LEAST * facts.step_ns]
    if not len(order):
        return ()
    causes = np.stack([idle.by_cause[cause][order] for cause in CAUSES])
    most = np.argmax(causes, axis=0)
    following = np.searchsorted(gpu.start_ns, idle.end_ns[order])
    ended_by = np.append(np.arange(len(gpu)), -1)[np.minimum(following, len(gpu))]
    places = facts.places_of(np.append(gpu.launch, -1)[ended_by])
    gaps = []
    for gap, cause, row, where in zip(order.tolist(), most.tolist(), ended_by.tolist(), places, strict=True):
        step = int(gpu.step[row]) if row >= 0 else -1
        where = where._replace(
            kernel=gpu.strings[gpu.short_name[row]] or gpu.strings[gpu.name[row]] if row >= 0 else "",
            step=int(facts.trace.steps.number[step]) if step >= 0 else None,
        )
        start = int(idle.start_ns[gap]) - facts.window[0]
        gaps.append(IdleGap(start, int(length[gap]), list(CAUSES)[cause], where))
    return tuple(gaps)
