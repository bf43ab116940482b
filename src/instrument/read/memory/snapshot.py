"""`MemorySnapshot`: what torch's allocator recorded, what follows from it, its page and its export for JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...base.page_file import InNotebook, write_page
from ..tables.table import Array, Table
from .batch import ASSUMPTION, FIT_ASSUMPTION, BatchFit, LargerBatch, larger_batch, pass_peaks
from .breakdown import Breakdown, ChangedPart, Place, Same, Use, add_up, compare_peaks, compare_regions
from .categories import CATEGORIES, categorize
from .passes import FREES, Passes, StackFacts, Steps, module_calls, passes_of, regions_of, stack_facts, steps_of
from .shortage import FAILED, DriverTraffic, FailedAllocation, Growth, failure_of, growth_of, traffic_of
from .timeline import (
    ACTIVE,
    AllocatorState,
    Peak,
    Timeline,
    frees_repeat_stacks,
    in_use,
    largest_hole,
    pair_allocations,
    reserved_changes,
)


@dataclass(frozen=True, repr=False)
class MemorySnapshot(InNotebook):
    """A memory snapshot of torch's caching allocator: its tables, and what follows from them.

    Attributes:
        path: the file.
        events: the recorded events, in order for each device. Columns: ``action`` (text: "alloc",
            "free_requested", "free_completed", "segment_alloc", "segment_map", "oom", ...), ``device``,
            ``address`` (less 2**64 from 2**63 on), ``bytes``, ``stream``, ``time_ns`` (since the epoch; -1 if
            unknown), ``stack``, ``device_free_bytes`` (what the driver had left when an allocation failed,
            "oom"; else -1), and the texts ``user_metadata`` and ``compile_context``.
        segments: what the allocator had from the driver when the snapshot was taken. Columns: ``device``,
            ``address``, ``bytes``, ``active_bytes``, ``stream``, ``kind`` (text: "small" or "large"),
            ``expandable`` and ``stack``.
        blocks: the parts of the segments. Columns: ``segment`` (a row of ``segments``), ``address``, ``bytes``,
            ``requested_bytes``, ``state`` (text: "active_allocated", "active_pending_free", "inactive") and
            ``stack``.
        annotations: the begins and ends of ranges: of those that torch marks, such as "Optimizer.step#AdamW.step",
            and of the regions and steps of `instrument.profile`. Columns: ``name`` and ``stage`` (texts; "START"
            or "END"), ``device`` and ``time_ns``; ``source`` (text: "instrument"; empty for torch's), ``range``,
            the number that a begin and its end share, and ``thread`` (both -1 for torch's).
        frames: the frames of all stacks. Columns: ``name`` and ``file`` (texts), and ``line``.
        stacks: the rows of ``frames`` of each stack, the innermost first. Stack 0 is empty.
        settings: the settings of the allocator.
        free_bytes: by GPU, what the driver had left when the snapshot was taken, as far as the snapshot says it:
            one of `instrument.profile` does of the GPU in use.
    """

    path: Path
    events: Table
    segments: Table
    blocks: Table
    annotations: Table
    frames: Table
    stacks: list[tuple[int, ...]]
    settings: Mapping[str, Any]
    free_bytes: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def devices(self) -> list[int]:
        """The numbers of the GPUs that have segments or events."""
        return sorted({*np.unique(self.segments.device).tolist(), *np.unique(self.events.device).tolist()})

    @cached_property
    def fullest_device(self) -> int | None:
        """The number of the GPU with the highest peak; None if the snapshot has no GPU."""
        return max(self.devices, key=lambda device: self.peak(device).bytes, default=None)

    @cached_property
    def allocations(self) -> Table:
        """What was allocated when, the oldest first.

        Columns: ``device``, ``address`` and ``bytes``; ``requested_bytes``, fewer for older memory alone, as an
        event has the size that was asked for, and a block that of what was given; ``begin``, the row of the event
        that allocates it, or -1 if it is older than the recorded events; ``end``, the row of the event that
        completes its free, or the number of events if it is still in use; ``stack``, that of the allocation or,
        for older ones, of the block; 0 for older ones that are freed, if a free has a stack of its own.
        """
        return pair_allocations(self.events, self.segments, self.blocks, self._frees_repeat_stacks)

    @cached_property
    def _frees_repeat_stacks(self) -> bool:
        return frees_repeat_stacks(self.events)

    @cached_property
    def _stacks_of_events(self) -> Array:
        """The stack of each event, that of nothing for a free whose own one was not recorded."""
        return np.where(self.events.matching("action", FREES) & self._frees_repeat_stacks, 0, self.events.stack)

    @cached_property
    def uses(self) -> Table:
        """What each allocation is for, in rows beside ``allocations``.

        Columns: ``category`` (text, of `categories.CATEGORIES`); ``evidence`` (text, of
        `categories.EVIDENCE`), what the category rests on without a line; ``line``, the row in
        ``frames`` of the innermost line of the program, else of a library, or -1.
        """
        return categorize(self.allocations, self.events, self.passes, self.stack_facts, self._stacks_of_events)

    @cached_property
    def stack_facts(self) -> StackFacts:
        """What each stack tells."""
        return stack_facts(self.frames, self.stacks)

    @cached_property
    def passes(self) -> Passes:
        """The pass of a step that each event belongs to."""
        return passes_of(self.events, self.annotations, self.stack_facts, self._stacks_of_events)

    def peak(self, device: int = 0) -> Peak:
        """Return the first time at which ``device`` used the most memory.

        Memory is in use from its allocation until its free is complete, as a stream may still read it.
        """
        rows = np.flatnonzero(self.allocations.device == self._checked(device))
        own, events = self.allocations.where(rows), np.flatnonzero(self.events.device == device)
        used = in_use(own, np.zeros(len(rows), np.int64), 1, events)[0]
        event = int(np.append(-1, events)[used.argmax()])
        alive = np.flatnonzero((own.begin <= event) & (event < own.end))
        alive = alive[np.argsort(-own.bytes[alive], kind="stable")]
        before = int(own.bytes[alive][own.begin[alive] < 0].sum())
        return Peak(device, int(used.max()), event, before, rows[alive])

    def break_down(self, device: int = 0) -> Breakdown:
        """Return what the memory at the peak of ``device`` is: by line, module, region and category."""
        breakdown = self._breakdowns.get(self._checked(device))
        if breakdown is None:
            peak = self.peak(device)
            of_device = self.events.device == device
            later = self.events.where(of_device & (np.arange(len(self.events)) > peak.event))
            reserved = self._reserved_bytes(device) - int(reserved_changes(later).sum())
            uses = add_up(self._described(peak.rows))
            breakdown = self._breakdowns[device] = Breakdown(peak, reserved, uses, bool(of_device.any()))
        return breakdown

    @cached_property
    def _breakdowns(self) -> dict[int, Breakdown]:
        return {}

    def _reserved_bytes(self, device: int) -> int:
        """Return what the allocator of a GPU had from the driver when the snapshot was taken."""
        return int(self.segments.bytes[self.segments.device == device].sum())

    def _checked(self, device: int) -> int:
        """Return the number of a GPU.

        Raises:
            ValueError: the snapshot has no memory of it.
        """
        if isinstance(device, bool) or device not in self.devices:
            there = ", ".join(map(str, self.devices)) or "none"
            raise ValueError(f'"device" must be a GPU with memory in {self.path} ({there}): {device!r:.200}')
        return device

    def largest_blocks(self, device: int = 0, most: int = 10) -> list[Use]:
        """Return the largest blocks at the peak of ``device``, the largest first; those alike are one `Use`."""
        _check_most(most)
        alike = Counter(self._described(self.peak(device).rows))  # the rows, and so the keys, are ordered by size
        return [Use(*same, size * number, number) for (same, size), number in islice(alike.items(), most)]

    def _described(self, rows: Array) -> Iterator[tuple[Same, int]]:
        """Yield what tells allocations apart, and their sizes."""
        used, uses = self.allocations.where(rows), self.uses.where(rows)
        modules = {stack: self._module_calls(stack) for stack in set(used.stack.tolist())}
        same = zip(
            map(self._place, uses.line.tolist()),
            (modules[stack] for stack in used.stack.tolist()),
            regions_of(self.events, self.annotations, used.begin, self.passes, self.frames, self.stacks),
            uses.text("category"),
            uses.text("evidence"),
            strict=True,
        )
        return zip(same, used.bytes.tolist(), strict=True)

    def timeline(self, device: int = 0) -> Timeline:
        """Return the memory of ``device`` in use after each event, by category."""
        own = np.flatnonzero(self.events.device == self._checked(device))
        rows = self.allocations.device == device
        used = in_use(self.allocations.where(rows), self.uses.category[rows], len(CATEGORIES), own)
        reserved = np.append(0, np.cumsum(reserved_changes(self.events.where(own))))
        reserved += self._reserved_bytes(device) - reserved[-1]
        time_ns = np.append(-1, self.events.time_ns[own])
        return Timeline(device, np.append(-1, own), np.arange(len(own) + 1), time_ns, used, reserved)

    def state(self, device: int = 0) -> AllocatorState:
        """Return what the allocator of ``device`` held when the snapshot was taken: reserved, in use, holes."""
        own = self.blocks.where(self.segments.device[self.blocks.segment] == self._checked(device))
        used = own.matching("state", ACTIVE)
        hole = largest_hole(own.segment, own.address, own.bytes, used)
        return AllocatorState(self._reserved_bytes(device), int(own.bytes[used].sum()), hole)

    def failures(self, device: int = 0, most: int = 3) -> list[FailedAllocation]:
        """Return the last allocations of ``device`` that failed, in order, and why each did."""
        _check_most(most)
        lines = self.stack_facts.line[self.events.stack]
        return [
            failure_of(event, self._place(int(lines[event])), self.allocations, self.events, self.segments)
            for event in self._failed_events(device)[-most:]
        ]

    def failed(self, device: int = 0) -> int:
        """Return how many allocations of ``device`` failed."""
        return len(self._failed_events(device))

    def _failed_events(self, device: int) -> list[int]:
        """Return the rows of the allocations of a GPU that failed, in order."""
        failed = (self.events.device == self._checked(device)) & self.events.matching("action", FAILED)
        rows: list[int] = np.flatnonzero(failed).tolist()
        return rows

    def complete_steps(self, device: int = 0) -> int:
        """Return how many steps ended in the recorded events of ``device``."""
        return self._steps(device).complete

    def _steps(self, device: int) -> Steps:
        return steps_of(self.passes, self.events, self.annotations, self._checked(device))

    def driver_traffic(self, device: int = 0) -> DriverTraffic:
        """Return how often, and where, the allocator of ``device`` took memory from the driver or gave it back."""
        collects = bool(self.settings.get("garbage_collection_threshold"))
        return traffic_of(self.events, self._steps(device), self.stack_facts, device, self._place, collects)

    def larger_batch(self, device: int = 0, limit_bytes: int | None = None) -> LargerBatch:
        """Return an estimate of what a larger batch would need on ``device``.

        Args:
            device: the GPU.
            limit_bytes: the memory that the GPU has for the program; by default `known_limit`.

        Raises:
            ValueError: the snapshot has no memory of ``device``, or the limit is not a number of bytes.
        """
        limit = self.known_limit(device) if limit_bytes is None else _checked_limit(limit_bytes)
        timeline = self.timeline(device)
        failures = self.failures(device)
        return larger_batch(timeline, self._left_behind(timeline), self.passes, failures, limit)

    def _left_behind(self, timeline: Timeline) -> Array:
        """Return the bytes at each point of the timeline of what steps left behind."""
        lines = [growth.line for growth in self._growth(timeline.device)]
        every = self.allocations
        kept = (every.device == timeline.device) & (every.begin >= 0) & (every.end >= len(self.events))
        rows = every.where(kept & np.isin(self.uses.line, lines))
        left: Array = in_use(rows, np.zeros(len(rows), np.int64), 1, timeline.event[1:])[0]
        return left

    def known_limit(self, device: int = 0) -> int | None:
        """Return the memory in bytes that ``device`` had for the program: what was reserved, and what was left.

        The snapshot says what was left if an allocation failed, or if `instrument.profile` took it; else None.
        """
        for failed in self.failures(device, 1):
            if failed.limit_bytes is not None:
                return failed.limit_bytes
        free = self.free_bytes.get(device)
        return None if free is None else self.state(device).reserved_bytes + free

    def pass_peaks(self, device: int = 0) -> dict[str, int]:
        """Return the highest memory in use on ``device`` in "forward", "backward" and "optimizer" passes."""
        return {name: peak for (name, _), peak in pass_peaks(self.timeline(device), self.passes).items()}

    def growth(self, device: int = 0) -> list[tuple[Place, Growth]]:
        """Return the lines whose memory several steps left behind on ``device``, the largest first."""
        places = ((self._place(growth.line), growth) for growth in self._growth(device))
        return [(place, growth) for place, growth in places if place is not None]

    def _growth(self, device: int) -> list[Growth]:
        return growth_of(self.allocations, self.uses, self._steps(device), self.events, device)

    def _module_calls(self, stack: int) -> tuple[Place, ...]:
        """Return the lines that call the modules around an allocation, the outermost first."""
        places = map(self._place, module_calls(self.stack_facts, self.stacks[stack]))
        return tuple(place for place in places if place is not None)

    def _place(self, row: int) -> Place | None:
        """Return the line of a frame; None for row -1."""
        if row < 0:
            return None
        file, name = (self.frames.strings[self.frames[column][row]] for column in ("file", "name"))
        return Place(file, int(self.frames.line[row]), name)

    def to_html(self, path: str | os.PathLike[str], device: int | None = None) -> Path:
        """Write the memory of a GPU as one HTML file, which needs no network, and return its path.

        Args:
            path: the file.
            device: the GPU; by default the one with the highest peak.

        Raises:
            ValueError: the snapshot has no memory of ``device``, or of any GPU.
            OSError: the file cannot be written.
        """
        from ...show.sections.memory import page_of

        fullest = self.fullest_device
        chosen = (0 if fullest is None else fullest) if device is None else device
        return write_page(path, page_of(self, self._checked(chosen)))

    def _page(self) -> str | None:
        from ...show.sections.memory import page_of

        device = self.fullest_device
        return None if device is None else page_of(self, device)

    def __repr__(self) -> str:
        sizes = f"{len(self.events):,} events, {len(self.segments):,} segments"
        return f"<memory snapshot {str(self.path)!r}: {sizes}>"


def _check_most(most: object) -> None:
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f'"most" must be a number from 1: {most!r:.200}')


def _checked_limit(limit_bytes: object) -> int:
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or not 0 < limit_bytes < 2**63:
        raise ValueError(f'"limit_bytes" must be a number of bytes from 1, below 2**63: {limit_bytes!r:.200}')
    return limit_bytes


def peak_text(snapshot: MemorySnapshot) -> str:
    """Return the memory at the peak of the GPU with the highest one, by category, as a sentence."""
    device = snapshot.fullest_device
    return "The memory snapshot has no memory of a GPU." if device is None else snapshot.break_down(device).text


_POINTS = 1000  # of a timeline


def as_dict(
    snapshot: MemorySnapshot, device: int, limit_bytes: int | None = None, batch: int | None = None
) -> dict[str, Any]:
    """Return what a snapshot shows of a GPU. Sizes are bytes, and unrounded.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        limit_bytes: as of `MemorySnapshot.larger_batch`.
        batch: the batch size of the program; None if it is not known.
    """
    larger = snapshot.larger_batch(device, limit_bytes)
    largest = None if batch is None or larger.factor is None else int(batch * larger.factor)
    breakdown = snapshot.break_down(device)
    timeline = snapshot.timeline(device).thinned(_POINTS)
    return {
        "path": str(snapshot.path),
        "device": device,
        "peak_bytes": breakdown.peak.bytes if breakdown.recorded else None,
        "reserved_bytes": breakdown.reserved_bytes,
        "cached_bytes": breakdown.cached_bytes,
        "before_bytes": breakdown.peak.before_bytes,
        "known_bytes": breakdown.known_bytes,
        "inferred_bytes": breakdown.inferred_bytes,
        "unknown_bytes": breakdown.unknown_bytes,
        "uses": _plain(breakdown.uses),
        "largest_blocks": _plain(snapshot.largest_blocks(device)),
        "timeline": {
            "event": timeline.event.tolist(),
            "time_ns": timeline.time_ns.tolist(),
            "reserved_bytes": timeline.reserved_bytes.tolist(),
            "bytes": dict(zip(CATEGORIES, timeline.bytes.tolist(), strict=True)),
        },
        "growth": [_plain(growth) | _plain(place) for place, growth in snapshot.growth(device)],
        "state": snapshot.state(device)._asdict(),
        "failed": snapshot.failed(device),
        "failures": [_plain(each) | {"limit_bytes": each.limit_bytes} for each in snapshot.failures(device)],
        "driver_traffic": _plain(snapshot.driver_traffic(device)),
        "larger_batch": {**larger._asdict(), "batch": batch, "largest": largest, "assumed": ASSUMPTION}
        if breakdown.recorded
        else None,
    }


def changes_as_dict(
    before: MemorySnapshot, after: MemorySnapshot, device: int, fit: BatchFit | None = None
) -> dict[str, Any]:
    """Return how the peak of a GPU changed from one snapshot to another: the parts of either list add up to it."""
    peaks = before.break_down(device), after.break_down(device)
    return {
        "changes": _parts(compare_peaks(*peaks)),
        "changes_by_region": _parts(compare_regions(*peaks)),
        "batch_fit": fit and _plain(fit) | {"assumed": FIT_ASSUMPTION},
    }


def _parts(parts: Iterable[ChangedPart]) -> list[dict[str, Any]]:
    return [_plain(part) | {"change_bytes": part.change_bytes} for part in parts]


def _plain(value: Any) -> Any:
    """Return named tuples as dictionaries, at any depth."""
    if hasattr(value, "_asdict"):
        return {key: _plain(each) for key, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
