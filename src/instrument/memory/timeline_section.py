"""The timeline of a GPU's memory on a page: the memory in use by category, and what was reserved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..traces.table import Array
from ..units import counted
from .categories import CATEGORIES, page_class
from .snapshot_data import SnapshotData
from .timeline import Timeline

_MOST = 20_000  # points


def timeline_section(snapshot: SnapshotData, device: int, side: str = "") -> dict[str, Any] | None:
    """Return the section; None without recorded events, and for a GPU whose memory was never in use.

    Numbers are changes from point to point: most are 0.

    Args:
        snapshot: the snapshot.
        device: the GPU.
        side: which of two snapshots it is, such as "before".
    """
    events = int((snapshot.events.device == device).sum())
    shown = snapshot.timeline(device).thinned(_MOST)
    categories = np.flatnonzero(shown.bytes.any(axis=1)).tolist()
    if not events or not categories:
        return None
    reserved = bool((shown.reserved_bytes >= shown.used_bytes).all())
    return {
        "id": f"memory-{side}" if side else "memory",
        "type": "memory",
        "title": f"Memory over time, {side}" if side else "Memory over time",
        "notes": list(_notes(shown, events, reserved)),
        "categories": [page_class(list(CATEGORIES)[row]) for row in categories],
        "event": _changes(shown.number - 1),
        "time_ns": _times(shown.time_ns),
        "bytes": [_changes(shown.bytes[row]) for row in categories],
        "reserved_bytes": _changes(shown.reserved_bytes) if reserved else None,
        "peak": int(np.searchsorted(shown.event, snapshot.peak(device).event)),
        "top_bytes": int(max(shown.used_bytes.max(), shown.reserved_bytes.max())),
    }


def _notes(shown: Timeline, events: int, reserved: bool) -> Iterator[str]:
    if len(shown) <= events:
        yield (
            f"Of {counted(events, 'event')}, the highest and the lowest point of each stretch are shown: "
            f"{counted(len(shown), 'point')}."
        )
    if not reserved:
        yield "What was reserved is not shown: more was in use than the recorded segments have."


def _times(time_ns: Array) -> list[int] | None:
    """Return the times after the first event, which also stands for what is before it.

    None if one is unknown, or all are the same.
    """
    times = np.maximum.accumulate(time_ns[1:])
    if time_ns[1:].min() < 0 or times[-1] == times[0]:
        return None
    return _changes(np.append(0, times - times[0]))


def _changes(column: Array) -> list[int]:
    changes: list[int] = np.diff(column, prepend=0).tolist()
    return changes
