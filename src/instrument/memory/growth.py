"""`growth_of`: memory that each step leaves behind, by the line that allocates it."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table
from .passes import Steps

LEAST_STEPS = 2  # complete ones: the first one sets up what stays


_STATE = re.compile("^optimizer_state$")


class Growth(NamedTuple):
    """Memory that several steps left behind.

    Attributes:
        line: the row in ``frames`` of the line that allocates it.
        steps: how many steps did so.
        bytes: how much is in use when the recorded events end.
        blocks: in how many blocks.
    """

    line: int
    steps: int
    bytes: int
    blocks: int


def growth_of(allocations: Table, uses: Table, steps: Steps, events: Table, device: int) -> list[Growth]:
    """Return the lines that grow from step to step, the largest first.

    A line grows if memory that it allocated in two complete steps or more, and in half of them, is in use when the
    events end, and if it had less in use half-way: a queue of the last batches does not grow. The state of an
    optimizer does not count: it is made once, if not in one step.

    Args:
        allocations: those of a `MemorySnapshot`.
        uses: what they are for, in rows beside them.
        steps: the steps of the GPU.
        events: the events.
        device: the GPU.
    """
    recorded = np.flatnonzero((allocations.device == device) & (allocations.begin >= 0) & (uses.line >= 0))
    state = uses.matching("category", _STATE)[recorded]
    rows = recorded[(allocations.end[recorded] >= len(events)) & ~state]
    rows = rows[steps.number[allocations.begin[rows]] < steps.complete]
    known = defaultdict[int, set[int]](set)
    sums = defaultdict[int, list[int]](lambda: [0, 0])
    columns = uses.line[rows], steps.number[allocations.begin[rows]], allocations.bytes[rows]
    for line, number, size in zip(*(column.tolist() for column in columns), strict=True):
        known[line].add(number)
        sums[line][0] += size
        sums[line][1] += 1
    least = max(LEAST_STEPS, steps.complete / 2)
    middle = (steps.complete + 1) // 2 - 1
    lines, recorded_allocations = uses.line[recorded], allocations.where(recorded)
    half, end = (_used_by_line(recorded_allocations, lines, steps, step) for step in (middle, steps.complete - 1))
    found = [
        Growth(line, len(own), *sums[line])
        for line, own in known.items()
        if len(own) >= least and end[line] > half[line]
    ]
    return sorted(found, key=lambda growth: -growth.bytes)


def _used_by_line(allocations: Table, lines: Array, steps: Steps, step: int) -> Array:
    """Return the bytes of ``allocations``, whose begins are recorded, in use at the end of ``step``, by line."""
    begun = steps.number[allocations.begin]
    ended = np.append(steps.number, step + 1)[np.minimum(allocations.end, len(steps.number))]
    there = (begun <= step) & (ended > step)
    used: Array = np.bincount(lines[there], allocations.bytes[there], int(lines.max(initial=0)) + 1)
    return used
