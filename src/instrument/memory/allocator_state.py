"""`AllocatorState`: what the allocator held when a snapshot was taken."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.table import Table
from .free_pieces import free_pieces

_ACTIVE = "active"  # how the states of blocks in use begin


class AllocatorState(NamedTuple):
    """What the allocator of a GPU held when the snapshot was taken.

    Attributes:
        reserved_bytes: what it had from the driver.
        used_bytes: what of this was in use.
        largest_hole_bytes: the largest part that was not in use, without a break, to 512 bytes.
    """

    reserved_bytes: int
    used_bytes: int
    largest_hole_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What was reserved, and not in use."""
        return self.reserved_bytes - self.used_bytes


def state_of(allocations: Table, events: Table, segments: Table, blocks: Table, device: int) -> AllocatorState:
    """Return what the allocator of ``device`` held, from the tables of a `MemorySnapshot`."""
    own = blocks.where(segments.device[blocks.segment] == device)
    used = np.array([name.startswith(_ACTIVE) for name in own.strings])[own.state]
    free = free_pieces(allocations, events, segments, device, len(events) - 1)
    reserved = int(segments.bytes[segments.device == device].sum())
    return AllocatorState(reserved, int(own.bytes[used].sum()), free.largest_bytes)
