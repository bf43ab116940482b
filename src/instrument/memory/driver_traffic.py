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
from .passes import Passes, steps_of
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
_ASKS = re.compile("^(?:segment_alloc|segment_map|oom)$")


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
        steps: the steps after the first one, the last of which can be incomplete.
    """

    returns: tuple[ReturnedMemory, ...]
    taken_later: int
    taken_later_bytes: int
    steps: int


def traffic_of(
    events: Table,
    passes: Passes,
    facts: StackFacts,
    device: int,
    place: Callable[[int], Place | None],
    collects: bool,
) -> DriverTraffic:
    """Return what the allocator of ``device`` asked of the driver.

    Args:
        events: those of a `MemorySnapshot`.
        passes: their passes.
        facts: what the stacks tell.
        device: the GPU.
        place: returns the place of a row of ``frames``.
        collects: whether the allocator gives memory back from a threshold on.
    """
    own = events.where(events.device == device)
    change, step = reserved_changes(own), steps_of(passes, events, device)[events.device == device]
    steps = int(step.max(initial=0))
    later = (change > 0) & (step > 0)
    returned = np.flatnonzero(change < 0)
    reason = _reasons(own, returned, facts, collects)
    line = np.where(reason == _UNKNOWN, -1, facts.line[own.stack[returned]])
    begins = _begin_of_runs(own, returned, (line, reason))
    begins_later = begins & ((step[returned] > 0) | (steps == 0))
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
        steps,
    )


def _reasons(own: Table, returned: Array, facts: StackFacts, collects: bool) -> Array:
    """Return the reason of each return, as its place in `RETURN_REASONS`."""
    if not len(returned):
        return np.empty(0, np.int64)
    others = np.flatnonzero(~own.matching("action", re.compile("^free")))
    others = others[~np.isin(others, returned)]
    following = np.append(others, 0)[np.searchsorted(others, returned)]  # the next event that is no free
    asks = own.matching("action", _ASKS)[following] & (following > returned)
    stack = own.stack[returned]
    tries_again = asks & (own.stack[following] == stack) & (stack > 0) & (not collects)
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


def _begin_of_runs(own: Table, returned: Array, keys: Sequence[Array]) -> Array:
    """Return which of the events begin a run: the allocator gives back several segments at a time."""
    asks = np.array([not name.startswith("free") for name in own.strings], bool)[own.action]
    place = np.cumsum(asks)[returned]  # frees that streams complete meanwhile do not count
    same = np.append(False, np.diff(place) == 1) if len(place) else np.zeros(0, bool)
    for key in keys:
        same[1:] &= key[1:] == key[:-1]
    return ~same
