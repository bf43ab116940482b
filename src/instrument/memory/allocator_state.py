"""`AllocatorState`: what the allocator held when a snapshot was taken."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..traces.table import Array, Table

_ACTIVE = "active"  # how the states of blocks in use begin


class AllocatorState(NamedTuple):
    """What the allocator of a GPU held when the snapshot was taken.

    Attributes:
        reserved_bytes: what it had from the driver.
        used_bytes: what of this was in use.
        largest_hole_bytes: the largest part that was not in use, without a break.
    """

    reserved_bytes: int
    used_bytes: int
    largest_hole_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What was reserved, and not in use."""
        return self.reserved_bytes - self.used_bytes


def state_of(segments: Table, blocks: Table, device: int) -> AllocatorState:
    """Return what the allocator of ``device`` held, from the tables of a `MemorySnapshot`."""
    own = blocks.where(segments.device[blocks.segment] == device)
    used = np.array([name.startswith(_ACTIVE) for name in own.strings])[own.state]
    return AllocatorState(
        int(segments.bytes[segments.device == device].sum()),
        int(own.bytes[used].sum()),
        _largest_hole(own.segment, own.address, own.bytes, used),
    )


def _largest_hole(segment: Array, address: Array, size: Array, used: Array) -> int:
    """Return the size of the largest run of unused blocks that touch, within one segment."""
    order = np.lexsort((address, segment))
    segment, address, size, used = (column[order] for column in (segment, address, size, used))
    largest = run = 0
    end = (-1, -1)
    for each in zip(segment.tolist(), address.tolist(), size.tolist(), used.tolist(), strict=True):
        at, start, length, in_use = each
        run = 0 if in_use else length + (run if (at, start) == end else 0)
        largest = max(largest, run)
        end = at, start + length
    return largest
