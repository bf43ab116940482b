"""Medians of candidates that are timed in turn, and how they are printed."""

from __future__ import annotations

import os
import statistics
import timeit
from collections.abc import Callable

ROUNDS = int(os.environ.get("ROUNDS", "41"))
Candidates = dict[str, Callable[[], object]]


def medians(candidates: Candidates, number: int) -> dict[str, float]:
    """Return the median time of one call of each candidate in ns, over rounds of ``number`` calls each."""
    timers = {name: timeit.Timer("f()", globals={"f": call}) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name].append(timer.timeit(number) / number * 1e9)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, times: dict[str, float], base: str) -> None:
    """Print the times of a group, and each as a ratio to ``base``."""
    print(f"\n{title}")
    for name, time in times.items():
        print(f"  {name:42} {time:12,.0f} ns {time / times[base]:9.2f} x {base}")


def verdict(what: str, value: float, bound: float, unit: str = "x") -> None:
    """Print a figure beside what it must reach."""
    word = "ok" if value <= bound else "SHORT"
    print(f"  {word:5} {what}: {value:.3f} {unit} (at most {bound:g} {unit})")
