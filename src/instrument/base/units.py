"""Formats numbers and their units for people, and checks those that people give as arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LISTED = 20  # numbers on one line
_WIDE = 100  # ratio of two durations from which they do not share a unit
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST = 2**63  # the first number of bytes, or of ns, that 64 bits cannot hold
_BYTES = {f"{prefix}{unit}": base**power for base, unit in ((1000, "B"), (1000, ""), (1024, "iB"))
          for power, prefix in enumerate("KMGT", 1)} | {"B": 1}  # fmt: skip


def duration(ns: float) -> str:
    """Return a duration with three digits, in a fitting unit: ``1.20 ms``."""
    return f"{_digits(ns, *_unit(ns))} {_unit(ns)[1]}" if ns else "0"


def signed_duration(ns: float) -> str:
    """Return a duration with its sign: ``+1.20 ms``."""
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"


def durations(ns: Sequence[float]) -> str:
    """Return durations in the unit of their median, ``80.0, 214, 83.0 ms``; each in its own if far apart."""
    if max(ns) >= _WIDE * min(ns):
        return ", ".join(map(duration, ns))
    unit = _unit(sorted(ns)[len(ns) // 2])
    return f"{', '.join(_digits(one, *unit) for one in ns)} {unit[1]}"


def _unit(ns: float) -> tuple[float, str]:
    """Return the length in ns and the name of a fitting unit."""
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if ns < limit * 0.9995:
            return limit / 1e3, unit
    return 1e9, "s"


def _digits(ns: float, size: float, unit: str) -> str:
    value = ns / size
    if unit in ("ns", "B", "FLOP") or value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(number: float) -> str:
    """Return bytes with three digits, in powers of 1000: ``13.8 GB``; whole below 1,000."""
    return _scaled(number, ("B", "kB", "MB", "GB", "TB"))


def operations(number: float) -> str:
    """Return floating-point operations with three digits: ``1.20 TFLOP``; whole below 1,000."""
    return _scaled(number, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(number: float, units: Sequence[str]) -> str:
    value, unit = next(
        (abs(number) / 1000**power, unit)
        for power, unit in enumerate(units)
        if abs(number) < 999.5 * 1000**power or unit == units[-1]
    )
    return f"{'-' if number < 0 else ''}{_digits(value, 1, unit)} {unit}"


def signed_size(number: float) -> str:
    """Return bytes with their sign: ``+13.8 GB``; none for 0."""
    return f"{'+' if number > 0 else ''}{size(number)}"


def count(calls: float) -> str:
    """Return a number with a thousands separator, and one decimal unless it is whole; below 1 with two digits."""
    return f"{calls:,.0f}" if calls == int(calls) else f"{calls:.2g}" if calls < 1 else f"{calls:,.1f}"


def counted(number: float, word: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 region``, ``1,200 regions``; ``plural`` defaults to word plus "s"."""
    return f"{count(number)} {word if number == 1 else plural or word + 's'}"


def steps_text(first: int, last: int) -> str:
    """Return the numbers of steps in words: ``step 7``, ``steps 2-4``."""
    return f"step {first}" if first == last else f"steps {first}-{last}"


def ordinal(number: int) -> str:
    """Return a number as an ordinal: ``1st``, ``12th``, ``1,003rd``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number:,}{ending}"


def listed(numbers: Sequence[int]) -> str:
    """Return the first 20 numbers, and how many more there are: ``0, 1, 2`` or ``0, ..., 19 and 1,004 more``."""
    more = f" and {len(numbers) - _LISTED:,} more" if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + more


def percentage(share: float) -> str:
    """Return a positive share in percent; one that would round to zero is ``less than 0.1 %``."""
    return f"{100 * share:.1f} %" if share >= 0.0005 else "less than 0.1 %"


def percent(part: int, whole: int | None) -> str:
    """Return ``part`` as a percentage of ``whole``, or a dash if that is zero or unknown."""
    return f"{100 * part / whole:.1f}" if whole else "-"


def natural_key(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts texts by the numbers in them."""
    return [(int(number or 0), before) for before, number in re.findall(r"(\D*)(\d*)", text)]


def integer(name: str, value: Any, least: int = 0, why: str = "", *, several: bool = False) -> int:
    """Return ``value`` as an int.

    Args:
        name: the argument, for the error.
        value: what was given for it or, with ``several``, one of its items.
        least: the smallest accepted integer, ...
        why: ... and the reason for it, for the error.
        several: whether the argument holds several integers.

    Raises:
        TypeError, ValueError: ``value`` is not an integer, or too small.
    """
    accepted = f"hold integers >= {least}" if several else f"be an integer >= {least}"
    message = f'"{name}" must {accepted}{why}: {value!r}'
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if number < least:
        raise ValueError(message)
    return number


def parse_duration(text: object, name: str) -> float:
    """Return the seconds of a duration such as "7d" or "1.5h".

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: it is not a positive number with a unit. The message calls the argument ``name``.
    """
    seconds = _parsed(text, name, _SECONDS, '"7d"')
    if not 0 < seconds < _MOST / 1e9:
        raise ValueError(f'"{name}" must be > 0 and less than 292 years: {text!r}')
    return seconds


def parse_time(text: object, name: str) -> float:
    """Return the nanoseconds of a duration such as "50us" or "1.5ms".

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: it is not a positive number with a unit. The message calls the argument ``name``.
    """
    return _parsed(text, name, {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}, '"50us"')


def parse_size(text: object, name: str) -> int:
    """Return the bytes of a size such as "20GB" or "20G" (20e9), or "1.5GiB".

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: it is not a positive number with a unit. The message calls the argument ``name``.
    """
    size = _parsed(text, name, _BYTES, '"20GB"')
    if not 1 <= size < _MOST:
        raise ValueError(f'"{name}" must be from 1 byte to 2**63 - 1 bytes: {text!r}')
    return int(size)


def _parsed(text: object, name: str, units: Mapping[str, int], example: str) -> float:
    accepted = f'"{name}" must be a number > 0 with a unit ({", ".join(units)}), such as {example}: {text!r}'
    if not isinstance(text, str):
        raise TypeError(accepted)
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    sizes = {unit.lower(): size for unit, size in units.items()}
    if parts is None or parts[2].lower() not in sizes or not float(parts[1]):
        raise ValueError(accepted)
    return float(parts[1]) * sizes[parts[2].lower()]
