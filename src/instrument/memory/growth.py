"""`growth_of`: memory that each step leaves behind, by the line that allocates it."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ..traces.table import Table
from .passes import Steps

_MADE_ONCE = re.compile("^(?:parameters|optimizer_state)$")
LEAST_STEPS = 2  # complete ones: the first one sets up what stays


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
    events end. Parameters and the state of an optimizer do not count: they are made once, if not in one step.

    Args:
        allocations: those of a `MemorySnapshot`.
        uses: what they are for, in rows beside them.
        steps: the steps of the GPU.
        events: the events.
        device: the GPU.
    """
    kept = (allocations.device == device) & (allocations.begin >= 0) & (allocations.end >= len(events))
    made_once = uses.matching("category", _MADE_ONCE)
    rows = np.flatnonzero(kept & (uses.line >= 0) & ~made_once)
    rows = rows[steps.number[allocations.begin[rows]] < steps.complete]
    known = defaultdict[int, set[int]](set)
    sums = defaultdict[int, list[int]](lambda: [0, 0])
    columns = uses.line[rows], steps.number[allocations.begin[rows]], allocations.bytes[rows]
    for line, number, size in zip(*(column.tolist() for column in columns), strict=True):
        known[line].add(number)
        sums[line][0] += size
        sums[line][1] += 1
    least = max(LEAST_STEPS, steps.complete / 2)
    found = [Growth(line, len(own), *sums[line]) for line, own in known.items() if len(own) >= least]
    return sorted(found, key=lambda growth: -growth.bytes)
