"""`growth_of`: memory that each step leaves behind, by the line that allocates it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ..traces.table import Table
from .passes import Passes, steps_of

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


def growth_of(allocations: Table, uses: Table, passes: Passes, events: Table, device: int) -> list[Growth]:
    """Return the lines that grow from step to step, the largest first.

    A step ends with the optimizer. A line grows if memory that it allocated in two complete steps or more is in
    use when the events end: gradients, activations and the state of an optimizer are of one step.

    Args:
        allocations: those of a `MemorySnapshot`.
        uses: what they are for, in rows beside them.
        passes: the passes of the events.
        events: the events.
        device: the GPU.
    """
    step = steps_of(passes, events, device)
    kept = (allocations.device == device) & (allocations.begin >= 0) & (allocations.end >= len(events))
    rows = np.flatnonzero(kept & (uses.line >= 0))
    rows = rows[step[allocations.begin[rows]] < step.max(initial=0)]
    steps = defaultdict[int, set[int]](set)
    sums = defaultdict[int, list[int]](lambda: [0, 0])
    columns = uses.line[rows], step[allocations.begin[rows]], allocations.bytes[rows]
    for line, number, size in zip(*(column.tolist() for column in columns), strict=True):
        steps[line].add(number)
        sums[line][0] += size
        sums[line][1] += 1
    found = [Growth(line, len(own), *sums[line]) for line, own in steps.items() if len(own) >= LEAST_STEPS]
    return sorted(found, key=lambda growth: -growth.bytes)
