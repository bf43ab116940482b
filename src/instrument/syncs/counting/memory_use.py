"""What a dry run would have in use on a GPU at its peak, and for what: category, region, module and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...base.units import size
from .allocator import Block, CachingAllocator, NoMemoryLeftError
from .calls import CallRecord, Phase, Place
from .memory import MemoryRecord

_FORWARD, _BACKWARD, _OPTIMIZER = range(3)
_PASSES: dict[Phase, int] = {
    "forward": _FORWARD, "backward": _BACKWARD, "recomputed": _BACKWARD, "optimizer": _OPTIMIZER,
}  # fmt: skip
_NOWHERE = Place("forward", (), "", None, None)


@dataclass(frozen=True)
class Use:
    """What of the peak is for one purpose, allocated at one place.

    Attributes:
        category: one of `instrument.read.memory.categories.CATEGORIES`.
        place: where it was allocated; without a line if that was before the run.
        bytes: the sizes of its blocks.
        blocks: how many.
    """

    category: str
    place: Place
    bytes: int
    blocks: int


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a dry run on a GPU.

    Attributes:
        peak_bytes: what `torch.cuda.max_memory_allocated` would return.
        reserved_bytes: what `torch.cuda.max_memory_reserved` would return.
        place: where the allocation at the peak was made; None without one.
        uses: the peak by purpose and place, the largest first.
        step_peaks: the peak of each step by its number, as `CallRecord.marks` has it.
        fits: whether the memory of the GPU was enough for all.
    """

    peak_bytes: int
    reserved_bytes: int
    place: Place | None
    uses: tuple[Use, ...]
    step_peaks: dict[int | None, int]
    fits: bool = True

    def by(self, key: Callable[[Use], Any]) -> dict[Any, int]:
        """Return the bytes of the peak by ``key(use)``, the most first."""
        sums = defaultdict[Any, int](int)
        for use in self.uses:
            sums[key(use)] += use.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        parts = ", ".join(f"{size(held)} {name.replace('_', ' ')}" for name, held in self.by_category().items())
        where = f", reached at {self.place.site}" if self.place is not None and self.place.site else ""
        return f"{size(self.peak_bytes)} at the peak{where}{': ' * bool(parts)}{parts}"

    def as_dict(self) -> dict[str, Any]:
        """Return the memory as a dict of JSON values: in all, and of the peak by category, module and line."""
        return {
            "peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "categories": self.by_category(),
            "modules": self.by_module(), "lines": self.by_line(),
        }  # fmt: skip

    def by_category(self) -> dict[str, int]:
        """Return the bytes of the peak by category."""
        return self.by(lambda use: use.category)

    def by_module(self) -> dict[str, int]:
        """Return the bytes of the peak by the module that allocated them."""
        return self.by(lambda use: use.place.module)

    def by_line(self) -> dict[str, int]:
        """Return the bytes of the peak by the line that allocated them; empty if it is not known."""
        return self.by(lambda use: str(use.place.site or ""))


@dataclass
class _Replay:
    """The events so far, and the highest of them."""

    allocator: CachingAllocator
    held: dict[int, Block] = field(default_factory=dict)
    peak: int = 0
    place: int = -1  # the event of the peak


class LiveMemory:
    """The allocator of a run that goes on.

    Args:
        record: the allocations so far; grows.
    """

    def __init__(self, record: MemoryRecord) -> None:
        self._record = record
        self._replay = _Replay(CachingAllocator())
        self._seen = 0

    def allocator(self) -> CachingAllocator:
        """Return the allocator as it is now."""
        first, self._seen = self._seen, len(self._record.events)
        for _ in _events(self._record, self._replay, self._seen - 1, first):
            pass
        return self._replay.allocator


def memory_use(record: MemoryRecord, calls: CallRecord, limit: int | None = None) -> MemoryUse:
    """Return the memory of a run.

    Args:
        record: its allocations.
        calls: its operators.
        limit: the bytes that the GPU has for torch; None for no limit. The result ends where it is exceeded.
    """
    replay, step_peaks, fits = _Replay(CachingAllocator(limit)), dict[int | None, int](), True
    step_of = _steps(calls)
    try:
        for event, number in _events(record, replay):
            allocated = replay.allocator.allocated
            if allocated > replay.peak:
                replay.peak, replay.place = allocated, event
            step = step_of(record.positions[number])
            if allocated > step_peaks.get(step, 0):
                step_peaks[step] = allocated
    except NoMemoryLeftError:
        fits = False
    uses, place = _uses_at(record, calls, replay.place)
    return MemoryUse(replay.peak, replay.allocator.max_reserved, place, uses, step_peaks, fits)


def replayed(record: MemoryRecord, limit: int | None = None) -> CachingAllocator | None:
    """Return the allocator after the allocations of a run; None if they do not fit into ``limit`` bytes."""
    replay = _Replay(CachingAllocator(limit))
    try:
        for _ in _events(record, replay):
            pass
    except NoMemoryLeftError:
        return None
    return replay.allocator


def _events(
    record: MemoryRecord, replay: _Replay, last: int | None = None, first: int = 0
) -> Iterator[tuple[int, int]]:
    """Replay the events from ``first`` to ``last``; yield the place and the number of each allocation."""
    allocator, held, sizes, in_place = replay.allocator, replay.held, record.sizes, record.in_place
    for event, number in enumerate(record.events[first : None if last is None else last + 1], first):
        if number < 0:
            block = held.pop(~number, None)
            if block is not None:
                allocator.free(block)
            continue
        term = _reused(record, event, number, held) if number in in_place else None
        if term is not None:
            held[number] = held.pop(term)
        elif sizes[number]:
            held[number] = allocator.allocate(sizes[number])
            yield event, number


def _reused(record: MemoryRecord, event: int, number: int, held: dict[int, Block]) -> int | None:
    """Return the term in whose memory CUDA computes a sum: one that ends before anything else is allocated."""
    ended = set()
    for place in range(event + 1, len(record.events)):
        if record.events[place] >= 0:
            break
        ended.add(~record.events[place])
    wanted = record.sizes[number]
    terms = (term for term in record.in_place[number] if term in ended and term in held)
    return next((term for term in terms if record.sizes[term] == wanted), None)


def _steps(calls: CallRecord) -> Callable[[int], int | None]:
    """Return a function from the number of an operator to its step."""
    begins, steps = [begin for begin, _ in calls.marks], [step for _, step in calls.marks]

    def step_of(position: int) -> int | None:
        index = int(np.searchsorted(begins, position, "right")) - 1
        return steps[index] if index >= 0 else None

    return step_of


def _uses_at(record: MemoryRecord, calls: CallRecord, last: int) -> tuple[tuple[Use, ...], Place | None]:
    """Return what is in use after the event ``last``, and where that event was."""
    replay = _Replay(CachingAllocator())
    for _ in _events(record, replay, last):
        pass
    categories = _Categories(record, calls)
    sums = defaultdict[tuple[str, Place], list[int]](lambda: [0, 0])
    for number, block in replay.held.items():
        total = sums[categories.of(number), categories.place(number)]
        total[0] += block.size
        total[1] += 1
    uses = (Use(category, place, *total) for (category, place), total in sums.items())
    place = categories.place(record.events[last]) if last >= 0 else None
    return tuple(sorted(uses, key=lambda use: -use.bytes)), place


class _Categories:
    """What allocations are for: what the program says, else by the passes in which they begin and end."""

    def __init__(self, record: MemoryRecord, calls: CallRecord) -> None:
        self._record, self._places = record, calls.places
        self._place = np.array(calls.order, np.int32)[1::2]
        kinds = np.array([_PASSES[place.phase] for place in calls.places], np.int8)
        self._kind = kinds[self._place] if len(self._place) else np.zeros(0, np.int8)
        self._pass = np.cumsum(np.diff(self._kind, prepend=self._kind[:1]) != 0)
        self._ends: dict[int, int] = {}  # by number, the operator before the end
        position = -1
        for number in record.events:
            if number >= 0:
                position = record.positions[number]
            else:
                self._ends[~number] = position

    def place(self, number: int) -> Place:
        """Return where an allocation was made."""
        position = self._record.positions[number]
        known = 0 <= position < len(self._place)
        return self._places[int(self._place[position])] if known else _NOWHERE

    def of(self, number: int) -> str:
        """Return the category of an allocation."""
        kind = self._record.kinds.get(number)
        if kind is not None:
            return kind
        begin, end = self._record.positions[number], self._ends.get(number)
        if not 0 <= begin < len(self._kind):
            return "other"
        begun = int(self._kind[begin])
        if end is not None and end >= len(self._kind) - 1:
            end = None  # it was there when the run ended
        if end is not None and self._pass[begin] == self._pass[end]:
            return "temporaries"
        if begun == _BACKWARD:
            return "gradients"
        if begun == _OPTIMIZER:
            return "optimizer_state"
        in_module = bool(self._places[int(self._place[begin])].module)
        return "activations" if in_module or (end is not None and self._kind[end] == _BACKWARD) else "other"
