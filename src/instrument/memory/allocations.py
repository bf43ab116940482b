"""Pairs the events of a memory snapshot to allocations: what lived from when to when."""

from __future__ import annotations

import numpy as np

from ..traces.table import Array, Table

_ALLOCATED, _FREED = "alloc", "free_completed"
_ACTIVE = "active"  # how the states of blocks in use begin


def frees_repeat_stacks(events: Table) -> bool:
    """Return whether each free has the stack of its allocation, as torch writes with ``context="alloc"``."""
    rows, allocated = _of_addresses(events)
    freed = np.flatnonzero(allocated[:-1] & ~allocated[1:])
    first, second = rows[freed], rows[freed + 1]
    pairs = (events.address[first] == events.address[second]) & (events.device[first] == events.device[second])
    allocation, free = events.stack[first[pairs]], events.stack[second[pairs]]
    several = len(np.unique(free)) > 1  # a loop may allocate and free on one line
    return bool(several and (allocation == free).all())


def pair_allocations(events: Table, segments: Table, blocks: Table, repeated: bool) -> Table:
    """Return the allocations that the tables of a `MemorySnapshot` show, as its ``allocations``.

    An address that is allocated again without a free between was freed by an event that is not recorded: the first
    allocation ends there. With ``repeated``, a free has the stack of its allocation.
    """
    rows, allocated = _of_addresses(events)
    key = np.stack((events.device[rows], events.address[rows]))
    same = np.append((key[:, 1:] == key[:, :-1]).all(axis=0), False)  # as the next one
    following = np.append(rows[1:], 0)
    begun = np.flatnonzero(allocated)
    end = np.where(same[begun], following[begun], len(events))
    older = np.flatnonzero(~allocated & ~np.append(False, same[:-1]))  # the first event of its address is a free
    recorded = _columns(events, rows[begun], rows[begun], end)
    freed = _columns(events, rows[older], np.full(len(older), -1), rows[older])
    if not repeated:
        freed["stack"] = np.zeros_like(freed["stack"])  # those of the events say where it was freed
    parts = (freed, _never_seen(segments, blocks, key, len(events)), recorded)
    return Table({name: np.concatenate([part[name] for part in parts]) for name in recorded}, events.strings)


def _of_addresses(events: Table) -> tuple[Array, Array]:
    """Return the rows of the allocations and frees by device, address and time, and which are allocations."""
    names = np.array([1 if name == _ALLOCATED else 2 if name == _FREED else 0 for name in events.strings])
    kind = names[events.action]
    rows = np.flatnonzero(kind)
    rows = rows[np.lexsort((rows, events.address[rows], events.device[rows]))]
    return rows, kind[rows] == 1


def _columns(events: Table, rows: Array, begin: Array, end: Array) -> dict[str, Array]:
    columns = {name: events[name][rows] for name in ("device", "address", "bytes", "stack")}
    return columns | {"requested_bytes": columns["bytes"], "begin": begin, "end": end}


def _never_seen(segments: Table, blocks: Table, seen: Array, count: int) -> dict[str, Array]:
    """Return the blocks in use that ``seen`` lacks, by device and address; there are ``count`` events."""
    active = np.array([name.startswith(_ACTIVE) for name in blocks.strings])[blocks.state]
    device = segments.device[blocks.segment]
    known = set(zip(*seen.tolist(), strict=True))
    places = zip(device.tolist(), blocks.address.tolist(), strict=True)
    rows = np.flatnonzero(active & np.array([place not in known for place in places], bool))
    columns = {name: blocks[name][rows] for name in ("address", "bytes", "requested_bytes", "stack")}
    ages = {"begin": np.full(len(rows), -1), "end": np.full(len(rows), count)}
    return {"device": device[rows], **columns, **ages}
