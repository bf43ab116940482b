"""Why memory runs short: allocations that failed, memory asked of the driver, and what each step leaves behind."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...base.units import counted, size
from ..tables.table import Array, Table
from .breakdown import Place
from .passes import EMPTY_CACHE, FREES, StackFacts, Steps
from .timeline import free_pieces, reserved_changes

FAILED = re.compile("^oom$")
"""The action of an allocation that failed."""
_SMALL, _MIDDLE = 1 << 20, 10 << 20  # bytes: up to these, the allocator takes segments of ...
_SMALL_SEGMENT, _MIDDLE_SEGMENT, _GRAIN = 2 << 20, 20 << 20, 2 << 20  # ... and else a multiple of this

REASONS = {
    "full": "too little memory is free, even if it were one piece",
    "fragmented": "enough is free, but not in one piece",
    "other pool": "a free piece is large enough, but belongs to another stream or another pool of the allocator",
    "limited": "the driver had enough left, so that a limit of the process applies",
    "unknown": "what the driver had left is not recorded",
}
"""Why an allocation failed."""


class FailedAllocation(NamedTuple):
    """An allocation that failed, and what the allocator had then.

    Attributes:
        bytes: what was asked for.
        event: its row in ``events``.
        place: the line that asked; None if it is not known.
        reason: one of `REASONS`.
        used_bytes: what was in use.
        reserved_bytes: what the allocator had from the driver; it had given back the segments that were free.
        largest_hole_bytes: the largest free piece of this, of the stream that asked.
        device_free_bytes: what the driver had left; -1 if unknown.
    """

    bytes: int
    event: int
    place: Place | None
    reason: str
    used_bytes: int
    reserved_bytes: int
    largest_hole_bytes: int
    device_free_bytes: int

    @property
    def text(self) -> str:
        """What failed and why, as a sentence without its full stop."""
        return f"Out of memory: an allocation of {size(self.bytes)} failed; {REASONS[self.reason]}"

    @property
    def limit_bytes(self) -> int | None:
        """The memory that the GPU had for this process: what was reserved and, without a limit, what was left."""
        if self.reason == "limited":
            return self.reserved_bytes
        return None if self.device_free_bytes < 0 else self.reserved_bytes + self.device_free_bytes


def failure_of(
    event: int, place: Place | None, allocations: Table, events: Table, segments: Table
) -> FailedAllocation:
    """Return the failed allocation of an event, from the tables of a `MemorySnapshot`."""
    device, asked = int(events.device[event]), int(events.bytes[event])
    stream, left = int(events.stream[event]), int(events.device_free_bytes[event])
    of_all = free_pieces(allocations, events, segments, device, event)
    own = of_all if stream < 0 else free_pieces(allocations, events, segments, device, event, stream)
    if left >= _segment(asked):
        reason = "limited"
    elif left >= 0 and of_all.free_bytes < asked and of_all.free_bytes + left < _segment(asked):
        reason = "full"
    elif of_all.largest_bytes >= asked:
        reason = "other pool"
    elif left >= 0 or of_all.free_bytes >= asked:
        reason = "fragmented"
    else:
        reason = "unknown"
    used = of_all.reserved_bytes - of_all.free_bytes
    return FailedAllocation(asked, event, place, reason, used, of_all.reserved_bytes, own.largest_bytes, left)


def _segment(asked: int) -> int:
    """Return the size of the segment that torch takes from the driver for an allocation."""
    if asked <= _SMALL:
        return _SMALL_SEGMENT
    return _MIDDLE_SEGMENT if asked < _MIDDLE else -(-asked // _GRAIN) * _GRAIN


RETURN_REASONS = {
    "empty_cache": "the program called empty_cache",
    "none left": "an allocation found no memory left",
    "unknown": "for a reason that the snapshot does not show",
}
"""Why memory went back to the driver."""
_RETURN_REASONS = list(RETURN_REASONS)
_EMPTIED, _NONE_LEFT, _UNKNOWN = range(len(_RETURN_REASONS))
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
    asks = ~own.matching("action", FREES)  # frees that streams complete meanwhile do not count
    reason = _reasons(own, returned, asks, facts, collects)
    line = np.where(reason == _UNKNOWN, -1, facts.line[own.stack[returned]])
    begins = _begin_of_runs(returned, asks, (line, reason))
    begins_later = begins & ((step[returned] > 0) | (steps.complete == 0))
    by_place = defaultdict[tuple[int, int], list[int]](lambda: [0, 0, 0])
    columns = line, reason, begins, begins_later, -change[returned]
    for at, why, *amounts in zip(*(column.tolist() for column in columns), strict=True):
        sums = by_place[at, why]
        sums[:] = map(operator.add, sums, amounts)
    returns = (ReturnedMemory(place(at), _RETURN_REASONS[why], *sums) for (at, why), sums in by_place.items())
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
    steps_by_line = defaultdict[int, set[int]](set)
    sums = defaultdict[int, list[int]](lambda: [0, 0])
    columns = uses.line[rows], steps.number[allocations.begin[rows]], allocations.bytes[rows]
    for line, number, taken in zip(*(column.tolist() for column in columns), strict=True):
        steps_by_line[line].add(number)
        sums[line][0] += taken
        sums[line][1] += 1
    least = max(LEAST_STEPS, steps.complete / 2)
    middle = (steps.complete + 1) // 2 - 1
    lines, recorded_allocations = uses.line[recorded], allocations.where(recorded)
    half, end = (_used_by_line(recorded_allocations, lines, steps, step) for step in (middle, steps.complete - 1))
    growths = [
        Growth(line, len(own), *sums[line])
        for line, own in steps_by_line.items()
        if len(own) >= least and end[line] > half[line]
    ]
    return sorted(growths, key=lambda growth: -growth.bytes)


def _used_by_line(allocations: Table, lines: Array, steps: Steps, step: int) -> Array:
    """Return the bytes of ``allocations``, whose begins are recorded, in use at the end of ``step``, by line."""
    begun = steps.number[allocations.begin]
    ended = np.append(steps.number, step + 1)[np.minimum(allocations.end, len(steps.number))]
    there = (begun <= step) & (ended > step)
    used: Array = np.bincount(lines[there], allocations.bytes[there], int(lines.max(initial=0)) + 1)
    return used
