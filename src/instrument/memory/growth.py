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
    kept = (allocations.device == device) & (allocations.begin >= 0) & (allocations.end >= len(events))
    state = uses.matching("category", _STATE)
    rows = np.flatnonzero(kept & (uses.line >= 0) & ~state)
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
    half, end = (_used_by_line(allocations, uses, steps, device, step) for step in (middle, steps.complete - 1))
    found = [
        Growth(line, len(own), *sums[line])
        for line, own in known.items()
        if len(own) >= least and end[line] > half[line]
    ]
    return sorted(found, key=lambda growth: -growth.bytes)


def _used_by_line(allocations: Table, uses: Table, steps: Steps, device: int, step: int) -> Array:
    """Return the bytes in use at the end of ``step`` of what was recorded from its begin on, by line."""
    rows = np.flatnonzero((allocations.device == device) & (allocations.begin >= 0) & (uses.line >= 0))
    begun = steps.number[allocations.begin[rows]]
    ended = np.append(steps.number, step + 1)[np.minimum(allocations.end[rows], len(steps.number))]
    rows = rows[(begun <= step) & (ended > step)]
    used: Array = np.bincount(uses.line[rows], allocations.bytes[rows], int(uses.line.max(initial=0)) + 1)
    return used
