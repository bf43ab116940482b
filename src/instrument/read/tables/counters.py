"""Names counters, and finds the device and the unit of each."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .lanes import map_strings
from .table import Array, Strings
from .trace import Thread

_DEVICE = re.compile(r"GPU (\d{1,9}) Counters")  # torch's process of the counters of a device
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_ELECTRIC = (("W", "watts"), ("J", "joules"), ("V", "volts"))
_MILLI = (("", 1.0), ("m", 1e-3))
UNITS: dict[str, tuple[str, float]] = {
    "%": ("share", 1e-2),
    "C": ("celsius", 1.0),
    "RPM": ("rpm", 1.0),
    **{f"{prefix}Hz": ("hertz", scale) for prefix, scale in _SCALES.items()},
    **{f"{prefix}B": ("bytes", scale) for prefix, scale in (_SCALES | _BINARY).items()},
    **{f"{prefix}B/s": ("rate", scale) for prefix, scale in (_SCALES | _BINARY).items()},
    **{f"{prefix}{unit}": (quantity, scale) for unit, quantity in _ELECTRIC for prefix, scale in _MILLI},
}
"""What each unit measures, and how many of the basic unit it is."""
_WORD = f"({'|'.join(map(re.escape, UNITS))})"
_UNIT = re.compile(rf"(?:[(\[](?:[^()\[\]]* )?{_WORD}[)\]]|: {_WORD})$")  # "Power (W)", or the series "MHz"
_SHARE, _RATE = re.compile(r"\w+__\S*\.pct_of_peak"), re.compile(r"\w+__bytes\S*\.per_second$")  # CUPTI's names
_LAST = 80  # characters of a name in which its unit is


def counter_name(name: str, series: str) -> str:
    """Return the name of one series of a counter; that of an only series may be empty, or the counter's own."""
    return name if series in ("", name) else f"{name}: {series}"


def add_devices_and_units(columns: dict[str, Array], strings: Strings, threads: Sequence[Thread]) -> None:
    """Add the device of each counter, by the name of its process, and its unit, which ends its name."""
    found = [_DEVICE.match(str(each.process)) for each in threads]
    devices = np.array([int(each[1]) if each else -1 for each in found] + [-1], np.int64)
    columns["unit"] = map_strings(strings, columns["name"], lambda name: _unit(name[-_LAST:]))
    if "device" not in columns and "thread" in columns:
        columns["device"] = devices[columns["thread"]]


def _unit(name: str) -> str:
    if found := _UNIT.search(name):
        return found[1] or found[2]
    return "%" if _SHARE.match(name) else "B/s" if _RATE.match(name) else ""
