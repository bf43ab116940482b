"""The regions that were open when memory was allocated, from what torch writes into a snapshot."""

from __future__ import annotations

import numpy as np

from ..traces.table import Array, Table


def regions_of(events: Table, annotations: Table, rows: Array) -> list[str]:
    """Return the name of the innermost region that was open at each event; empty if none is known.

    What the program sets with ``torch.cuda.memory._set_memory_metadata`` comes before the ranges that torch marks.

    Args:
        events: those of a `MemorySnapshot`.
        annotations: its ranges.
        rows: rows of events of one GPU; -1 for memory that is older.
    """
    found = [""] * len(rows)
    for place, row in enumerate(rows.tolist()):
        if row >= 0:
            found[place] = events.strings[events.user_metadata[row]]
    if not len(annotations) or rows.max(initial=-1) < 0:
        return found
    device = events.device[rows.max()]
    times, names = _innermost(annotations.where(annotations.device == device))
    inside = np.searchsorted(times, np.where(rows >= 0, events.time_ns[rows], -1), "right")
    own = zip(found, inside.tolist(), rows.tolist(), strict=True)
    return [name or (names[place] if row >= 0 else "") for name, place, row in own]


def _innermost(own: Table) -> tuple[Array, list[str]]:
    """Return the times at which ranges begin and end, and the innermost one before and after each."""
    own = own.where(np.argsort(own.time_ns, kind="stable"))
    open_: list[str] = []
    names = [""]
    for name, stage in zip(own.text("name"), own.text("stage"), strict=True):
        if stage == "START":
            open_.append(name)
        elif name in open_:
            del open_[len(open_) - 1 - open_[::-1].index(name)]
        names.append(open_[-1] if open_ else "")
    return own.time_ns, names
