"""Drops impossible values, so that sums of the remaining ones fit into 64 bits."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from ..units import counted
from .table import COLUMNS, Array
from .trace import Device, ReadLosses

MAX_DURATION_NS = 1 << 53
"""104 days; longer events are dropped."""

_SUM = 2.0**61
_MAX_QUANTITY = 1 << 50  # bytes or elements of one event
_QUANTITIES = {
    *("bytes", "blocks", "shared_bytes", "elements_in", "elements_out"),
    *("allocated_bytes", "reserved_bytes"),
}
_DEVICE = {"id": 1 << 31, "sms": 1 << 16, "threads_per_sm": 1 << 20, "memory_bytes": 1 << 50}
_EPOCH_NS = 1 << 61


def plausible_rows(kind: str, columns: dict[str, Array], lost: ReadLosses) -> dict[str, Array]:
    """Return the columns of a table without events that last too long, and with -1 for impossible quantities.

    Args:
        kind: the name of the table.
        columns: its columns by name.
        lost: records what is dropped.
    """
    if "duration_ns" in columns:
        too_long = _too_large(columns["duration_ns"], MAX_DURATION_NS)
        if too_long.any():
            lost.add(f"{kind}: events that last longer than a trace can", events=int(too_long.sum()))
            columns = {name: column[~too_long] for name, column in columns.items()}
    for name in _QUANTITIES & columns.keys():
        too_large = _too_large(columns[name], _MAX_QUANTITY)
        if too_large.any():
            lost.add(f"{kind}: impossible {name} of {counted(int(too_large.sum()), 'event')}")
            columns = columns | {name: np.where(too_large, COLUMNS[kind][name][1], columns[name])}
    return columns


def plausible_devices(devices: list[Device], lost: ReadLosses) -> list[Device]:
    """Return the devices that have a possible id, with 0 for their impossible numbers."""
    found = []
    for device in devices:
        given = {item.name: getattr(device, item.name) for item in fields(device)}
        impossible = [name for name, most in _DEVICE.items() if not 0 <= given[name] < most]
        if impossible:
            lost.add(f"a GPU with impossible {', '.join(impossible)}")
        if "id" not in impossible:
            found.append(Device(**given | dict.fromkeys(impossible, 0)))
    return found


def plausible_epoch_ns(epoch_ns: int, lost: ReadLosses) -> int:
    """Return the start of the clock in ns since 1970; 0 if the given value is impossible."""
    if 0 <= epoch_ns < _EPOCH_NS:
        return epoch_ns
    lost.add("an impossible start of the clock")
    return 0


def _too_large(values: Array, most: float) -> Array:
    """Return a mask of the values beyond ``most``, or beyond a limit that keeps the sum in 64 bits."""
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    if largest <= most and largest * len(values) < _SUM:
        return np.zeros(len(values), bool)
    size = np.abs(values.astype(float))
    while size[size <= most].sum() >= _SUM:
        most /= 2
    too_large: Array = size > most
    return too_large
