"""Chooses the events of the allocator that stay: those of the peaks, and of the memory in use then."""

from __future__ import annotations

import numpy as np

from ..traces.table import Array, Table
from ..traces.trace import Trace

ARGS = ("Device Type", "Device Id", "Bytes", "Addr", "Total Allocated", "Total Reserved")
"""The args of an event of the allocator that are read."""


def kept_memory(trace: Trace, events: Table) -> Array:
    """Return a mask of the events of the allocator.

    The events at the peak and at the end of each step stay, and the allocations that are in use at the peak or at
    the end of the first or the last step, each with the event that frees it.

    Args:
        trace: the trace.
        events: its memory events on GPUs.
    """
    known = events.where(events.allocated_bytes >= 0)
    kept = np.zeros(len(known), bool)
    ends = np.sort(trace.steps.end_ns)
    kept[_peaks(known)] = True
    kept[_last_before(known, ends)] = True
    blocks = np.flatnonzero(known.address >= 0)
    for device in np.unique(known.device[blocks]).tolist():
        rows = blocks[known.device[blocks] == device]
        own, freed = known.where(rows), _freed(known.where(rows))
        allocated = np.flatnonzero(own.bytes > 0)
        at = [
            int(np.argmax(own.allocated_bytes)),
            *_last_before(own, ends[[0, -1]] if len(ends) else ends).tolist(),
        ]
        kept[rows[at]] = True
        for row in at:
            kept[rows[allocated[(allocated <= row) & (freed[allocated] > row)]]] = True
        frees = freed[kept[rows]]
        kept[rows[frees[frees < len(rows)]]] = True
    return np.isin(trace.memory.event, known.event[kept])


def _peaks(events: Table) -> list[int]:
    """Return the rows with the largest numbers, as the rules take them."""
    if not events:
        return []
    reserved = np.flatnonzero(events.reserved_bytes >= 0)
    rows = [int(np.argmax(events.allocated_bytes)), int(np.argmax(events.reserved_bytes))]
    if len(reserved):
        rows.append(int(reserved[np.argmax(events.allocated_bytes[reserved])]))
    return rows


def _last_before(events: Table, times_ns: Array) -> Array:
    at = np.searchsorted(events.start_ns, times_ns, "right") - 1
    return at[at >= 0]


def _freed(events: Table) -> Array:
    """Return for each event that allocates the row of the event that frees it; the number of rows for none."""
    order = np.argsort(events.address, kind="stable")
    pairs = np.flatnonzero(
        (events.address[order][1:] == events.address[order][:-1])
        & (events.bytes[order][:-1] > 0)
        & (events.bytes[order][1:] < 0)
    )
    freed = np.full(len(events), len(events))
    freed[order[pairs]] = order[pairs + 1]
    return freed
