"""What events of segments say: when the allocator took memory from the driver, and gave it back."""

from __future__ import annotations

import re

import numpy as np

from ..traces.table import Array, Table

_TAKEN, _RETURNED = re.compile("^segment_(?:alloc|map)$"), re.compile("^segment_(?:free|unmap)$")


def reserved_changes(events: Table) -> Array:
    """Return by how many bytes each event changes what the allocator has from the driver."""
    taken, returned = events.matching("action", _TAKEN), events.matching("action", _RETURNED)
    changes: Array = np.where(taken, events.bytes, np.where(returned, -events.bytes, 0))
    return changes


def reserved_after(event: int, events: Table, segments: Table, device: int) -> int:
    """Return what the allocator of ``device`` had from the driver after an event, by the events since then."""
    later = (events.device == device) & (np.arange(len(events)) > event)
    return int(segments.bytes[segments.device == device].sum() - reserved_changes(events.where(later)).sum())
