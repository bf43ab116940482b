"""`DriverTraffic`: how often the allocator took memory from the driver, and gave it back, in the loop."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table
from ..units import counted, size
from .breakdown import Place
from .passes import Steps
from .segment_events import reserved_changes
from .stacks import EMPTY_CACHE, StackFacts

RETURN_REASONS = {
    "empty_cache": "the program called empty_cache",
    "none left": "an allocation found no memory left",
    "unknown": "for a reason that the snapshot does not show",
}
"""Why memory went back to the driver."""
_REASONS = list(RETURN_REASONS)
_EMPTIED, _NONE_LEFT, _UNKNOWN = range(len(_REASONS))
_FREES = re.compile("^free")
_GROWS = re.compile("^(?:segment_alloc|segment_map|oom)$")  # or fails to


class ReturnedMemory(NamedTuple):
    """Memory that went back to the driver, at one line and for one reason.

    Attributes:
        place: the line; None if it is not known.
        reason: a key of `RETURN_REASONS`. An allocation that finds no memory left gives back what is free, and
            then asks the driver again, or fails.
        times: how often.
        times_later: how often after the first recorded step; as ``times`` if no step of an optimizer is recorded.
        bytes: how much in all.
    """

    place: Place | None
    reason: str
    times: int
    times_later: int
    bytes: int


class DriverTraffic(NamedTuple):
    """What the allocator of a GPU asked of the driver in the recorded events; each time makes the CPU wait.

    Attributes:
        returns: memory that it gave back, by line, the most frequent first.
        taken_later: how often it took memory after the first recorded step. A loop whose steps need the same
            memory takes all of it in the first one.
        taken_later_bytes: how much that was.
        steps: the later steps that did more than free memory; the last one can be incomplete.
    """

    returns: tuple[ReturnedMemory, ...]
    taken_later: int
    taken_later_bytes: int
    steps: int


def traffic_of(
    events: Table,
    steps: Steps,
    facts: StackFacts,
    device: int,
    place: Callable[[int], Place | None],
    collects: bool,
) -> DriverTraffic:
    """Return what the allocator of ``device`` asked of the driver.

    Args:
        events: those of a `MemorySnapshot`.
        steps: the steps of the GPU.
        facts: what the stacks tell.
        device: the GPU.
        place: returns the place of a row of ``frames``.
        collects: whether the allocator gives memory back from a threshold on.
    """
    own = events.where(events.device == device)
    change, step = reserved_changes(own), steps.number[events.device == device]
    later = (change > 0) & (step > 0)
    returned = np.flatnonzero(change < 0)
    asks = ~own.matching("action", _FREES)  # frees that streams complete meanwhile do not count
    reason = _reasons(own, returned, asks, facts, collects)
    line = np.where(reason == _UNKNOWN, -1, facts.line[own.stack[returned]])
    begins = _begin_of_runs(returned, asks, (line, reason))
    begins_later = begins & ((step[returned] > 0) | (steps.complete == 0))
    found = defaultdict[tuple[int, int], list[int]](lambda: [0, 0, 0])
    columns = line, reason, begins, begins_later, -change[returned]
    for at, why, *amounts in zip(*(column.tolist() for column in columns), strict=True):
        sums = found[at, why]
        sums[:] = map(operator.add, sums, amounts)
    returns = (ReturnedMemory(place(at), _REASONS[why], *sums) for (at, why), sums in found.items())
    return DriverTraffic(
        tuple(sorted(returns, key=lambda each: (-each.times, -each.bytes))),
        int(later.sum()),
        int(change[later].sum()),
        int(step[asks].max(initial=0)),
    )


def _reasons(own: Table, returned: Array, asks: Array, facts: StackFacts, collects: bool) -> Array:
    """Return the reason of each return, as its place in `RETURN_REASONS`."""
    if not len(returned):
        return np.empty(0, np.int64)
    asks = asks.copy()
    asks[returned] = False
    others = np.flatnonzero(asks)
    following = np.append(others, 0)[np.searchsorted(others, returned)]  # the next event but for frees and returns
    grows = own.matching("action", _GROWS)[following] & (following > returned)
    stack = own.stack[returned]
    tries_again = grows & (own.stack[following] == stack) & (stack > 0) & (not collects)
    emptied = facts.marks[stack] & EMPTY_CACHE > 0
    return np.where(emptied, _EMPTIED, np.where(tries_again, _NONE_LEFT, _UNKNOWN))


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


def _begin_of_runs(returned: Array, asks: Array, keys: Sequence[Array]) -> Array:
    """Return which of the events begin a run: the allocator gives back several segments at a time."""
    place = np.cumsum(asks)[returned]
    same = np.append(False, np.diff(place) == 1) if len(place) else np.zeros(0, bool)
    for key in keys:
        same[1:] &= key[1:] == key[:-1]
    return ~same
