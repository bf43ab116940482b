"""Formats numbers and their units for people."""

from __future__ import annotations

from collections.abc import Sequence

_WIDE = 100  # ratio of two durations from which they do not share a unit


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
    if unit == "ns" or value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def count(calls: float) -> str:
    """Return a number with a thousands separator, and one decimal unless it is whole."""
    return f"{calls:,.0f}" if calls == int(calls) else f"{calls:,.1f}"


def counted(number: float, word: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 region``, ``1,200 regions``; ``plural`` defaults to word plus "s"."""
    return f"{count(number)} {word if number == 1 else plural or word + 's'}"


def percentage(share: float) -> str:
    """Return a positive share in percent; one that would round to zero is ``less than 0.1 %``."""
    return f"{100 * share:.1f} %" if share >= 0.0005 else "less than 0.1 %"


def percent(part: int, whole: int | None) -> str:
    """Return ``part`` as a percentage of ``whole``, or a dash if that is zero or unknown."""
    return f"{100 * part / whole:.1f}" if whole else "-"
