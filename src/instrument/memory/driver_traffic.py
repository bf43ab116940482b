"""`DriverTraffic`: how often the allocator took memory from the driver, and gave it back, in the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table
from ..units import counted, size
from .breakdown import Place
from .passes import Passes, steps_of
from .segment_events import reserved_changes
from .stacks import EMPTY_CACHE, StackFacts


class Return(NamedTuple):
    """Memory that went back to the driver, again and again, at one line.

    Attributes:
        place: the line; None if it is not known.
        requested: whether the program called ``torch.cuda.empty_cache``; else an allocation found no memory left,
            and the allocator gave back what was free before it tried again.
        times: how often.
        bytes: how much in all.
    """

    place: Place | None
    requested: bool
    times: int
    bytes: int


class DriverTraffic(NamedTuple):
    """What the allocator of a GPU asked of the driver in the recorded events; each time makes the CPU wait.

    Attributes:
        returns: memory that it gave back, by line, the most frequent first.
        taken_later: how often it took memory after the first recorded step. A loop whose steps need the same
            memory takes all of it in the first one.
        taken_later_bytes: how much that was.
        steps: the steps after the first one, the last of which can be incomplete.
    """

    returns: tuple[Return, ...]
    taken_later: int
    taken_later_bytes: int
    steps: int


def traffic_of(
    events: Table, passes: Passes, facts: StackFacts, device: int, place: Callable[[int], Place | None]
) -> DriverTraffic:
    """Return what the allocator of ``device`` asked of the driver.

    Args:
        events: those of a `MemorySnapshot`.
        passes: their passes.
        facts: what the stacks tell.
        device: the GPU.
        place: returns the place of a row of ``frames``.
    """
    own = events.where(events.device == device)
    change, step = reserved_changes(own), steps_of(passes, events, device)[events.device == device]
    later = (change > 0) & (step > 0)
    returned = np.flatnonzero(change < 0)
    keys = (facts.line[own.stack[returned]], facts.marks[own.stack[returned]] & EMPTY_CACHE > 0)
    begins = _begin_of_runs(own, returned, keys)
    found: dict[tuple[int, bool], list[int]] = {}
    for line, requested, begin, returned_bytes in zip(
        *(each.tolist() for each in (*keys, begins, -change[returned])), strict=True
    ):
        sums = found.setdefault((line, requested), [0, 0])
        sums[0] += begin
        sums[1] += returned_bytes
    returns = (Return(place(line), requested, *sums) for (line, requested), sums in found.items())
    return DriverTraffic(
        tuple(sorted(returns, key=lambda each: (-each.times, -each.bytes))),
        int(later.sum()),
        int(change[later].sum()),
        int(step.max(initial=0)),
    )


def traffic_texts(traffic: DriverTraffic) -> list[str]:
    """Return what was taken after the first step, and what calls of the driver cost; none without calls."""
    texts = []
    if traffic.taken_later:
        texts.append(
            f"After the first recorded step, {size(traffic.taken_later_bytes)} was taken from the driver, "
            f"{counted(traffic.taken_later, 'time')} in {counted(traffic.steps, 'step')}. A loop whose steps need "
            "the same memory takes all of it in the first one."
        )
    if traffic.taken_later or traffic.returns:
        texts.append("The CPU waits for each call of the driver.")
    return texts


def _begin_of_runs(own: Table, returned: Array, keys: Sequence[Array]) -> Array:
    """Return which of the events begin a run: the allocator gives back several segments at a time."""
    asks = np.array([not name.startswith("free") for name in own.strings], bool)[own.action]
    place = np.cumsum(asks)[returned]  # frees that streams complete meanwhile do not count
    same = np.append(False, np.diff(place) == 1) if len(place) else np.zeros(0, bool)
    for key in keys:
        same[1:] &= key[1:] == key[:-1]
    return ~same
