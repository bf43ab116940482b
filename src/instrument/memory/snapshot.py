"""`MemorySnapshot`: what torch's allocator recorded, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..traces.table import Table
from .allocations import pair_allocations
from .peak import Peak, peak_of


@dataclass(frozen=True)
class MemorySnapshot:
    """A memory snapshot of torch's caching allocator.

    Attributes:
        path: the file.
        events: the recorded events, in order for each device. Columns: ``action`` (text: "alloc",
            "free_requested", "free_completed", "segment_alloc", "segment_map", "oom", ...), ``device``,
            ``address``, ``bytes``, ``stream``, ``time_ns`` (since the epoch; -1 if unknown), ``stack``,
            ``device_free_bytes`` (what the driver had left when an allocation failed, "oom"; else -1), and the
            texts ``user_metadata`` and ``compile_context``.
        segments: what the allocator had from the driver when the snapshot was taken. Columns: ``device``,
            ``address``, ``bytes``, ``active_bytes``, ``stream``, ``kind`` (text: "small" or "large"),
            ``expandable`` and ``stack``.
        blocks: the parts of the segments. Columns: ``segment`` (a row of ``segments``), ``address``, ``bytes``,
            ``requested_bytes``, ``state`` (text: "active_allocated", "active_pending_free", "inactive") and
            ``stack``.
        annotations: the ranges that torch marks, such as "Optimizer.step#AdamW.step". Columns: ``name`` and
            ``stage`` (texts; "START" or "END"), ``device`` and ``time_ns``.
        frames: the frames of all stacks. Columns: ``name`` and ``file`` (texts), and ``line``.
        stacks: the rows of ``frames`` of each stack, the innermost first. Stack 0 is empty.
        settings: the settings of the allocator.
    """

    path: Path
    events: Table
    segments: Table
    blocks: Table
    annotations: Table
    frames: Table
    stacks: list[tuple[int, ...]]
    settings: Mapping[str, Any]

    @property
    def devices(self) -> list[int]:
        """The numbers of the GPUs that have segments or events."""
        return sorted({*self.segments.device.tolist(), *self.events.device.tolist()})

    @cached_property
    def allocations(self) -> Table:
        """What was allocated when, the oldest first.

        Columns: ``device``, ``address`` and ``bytes``; ``begin``, the row of the event that allocates it, or -1 if
        it is older than the recorded events; ``end``, the row of the event that completes its free, or the number
        of events if it is still in use; ``stack``, that of the allocation or, for older ones, of the block; 0 for
        older ones that are freed, as the stack of a free is not that of what it frees.
        """
        return pair_allocations(self.events, self.segments, self.blocks)

    def peak(self, device: int = 0) -> Peak:
        """Return the first time at which ``device`` used the most memory.

        Memory is in use from its allocation until its free is complete, as a stream may still read it.
        """
        return peak_of(self.allocations, device, len(self.events))

    def __repr__(self) -> str:
        sizes = f"{len(self.events):,} events, {len(self.segments):,} segments"
        return f"<memory snapshot {str(self.path)!r}: {sizes}>"
