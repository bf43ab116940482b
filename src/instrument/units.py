"""Numbers for a person to read, with their units."""

from __future__ import annotations

from collections.abc import Sequence

_WIDE = 100  # times as long, from which two durations do not share a unit


def duration(ns: float) -> str:
    """Three digits and the unit that suits: ``1.20 ms``."""
    return f"{_digits(ns, *_unit(ns))} {_unit(ns)[1]}" if ns else "0"


def durations(ns: Sequence[float]) -> str:
    """Several in the unit that suits the one in the middle: ``80.0, 214, 83.0 ms``; far apart, each in its own."""
    if max(ns) >= _WIDE * min(ns):
        return ", ".join(map(duration, ns))
    unit = _unit(sorted(ns)[len(ns) // 2])
    return f"{', '.join(_digits(one, *unit) for one in ns)} {unit[1]}"


def _unit(ns: float) -> tuple[float, str]:
    """The unit that suits, in ns and in words."""
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
    """Thousands apart, with a decimal where it is not whole."""
    return f"{calls:,.0f}" if calls == int(calls) else f"{calls:,.1f}"


def counted(number: float, word: str, plural: str = "") -> str:
    """The number with what it counts: ``1 region``, ``1,200 regions``; ``plural`` where that is not word and s."""
    return f"{count(number)} {word if number == 1 else plural or word + 's'}"


def percent(part: int, whole: int | None) -> str:
    """The part of the whole, or a dash where that is nothing."""
    return f"{100 * part / whole:.1f}" if whole else "-"
