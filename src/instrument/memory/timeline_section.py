"""The timeline of a GPU's memory on a page: the memory in use by category, and what was reserved."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..traces.table import Array
from ..units import counted
from .categories import CATEGORIES, page_class
from .peak import Peak
from .timeline import Timeline

_MOST = 20_000  # points


def timeline_section(
    timeline: Timeline, peak: Peak, name: str, title: str, top_bytes: int
) -> dict[str, Any] | None:
    """Return the section; None without recorded events. Numbers are changes from point to point: most are 0.

    Args:
        timeline: the timeline.
        peak: its highest point.
        name: the id of the section.
        title: its title.
        top_bytes: the upper end of the axis.
    """
    if len(timeline) < 2:
        return None
    shown = timeline.thinned(_MOST)
    categories = np.flatnonzero(shown.bytes.any(axis=1)).tolist()
    reserved = bool((shown.reserved_bytes >= shown.used_bytes).all())
    return {
        "id": name,
        "type": "memory",
        "title": title,
        "notes": _notes(timeline, shown, reserved),
        "categories": [page_class(list(CATEGORIES)[row]) for row in categories],
        "event": _changes(shown.event),
        "time_ns": _times(shown.time_ns),
        "bytes": [_changes(shown.bytes[row]) for row in categories],
        "reserved_bytes": _changes(shown.reserved_bytes) if reserved else None,
        "peak": int(np.searchsorted(shown.event, peak.event)),
        "top_bytes": top_bytes,
    }


def top_bytes(*timelines: Timeline) -> int:
    """Return the most memory in use or reserved at a time."""
    return max(int(max(each.used_bytes.max(), each.reserved_bytes.max())) for each in timelines)


def _notes(timeline: Timeline, shown: Timeline, reserved: bool) -> list[str]:
    notes = []
    if len(shown) < len(timeline):
        notes.append(
            f"Of {counted(len(timeline), 'point')}, the highest and the lowest one of each stretch are shown: "
            f"{counted(len(shown), 'point')}."
        )
    if not reserved:
        notes.append("What was reserved is not shown: more was in use than the recorded segments have.")
    return notes


def _times(time_ns: Array) -> list[int] | None:
    """Return the times after the first event, which also stands for what is before it; None if one is unknown."""
    times = time_ns[1:]
    if not len(times) or times.min() < 0:
        return None
    return _changes(np.append(0, np.maximum.accumulate(times) - times[0]))


def _changes(column: Array) -> list[int]:
    changes: list[int] = np.diff(column, prepend=0).tolist()
    return changes
