"""How often a step may wait: in all, or in regions of a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .finding import Event

EVERYWHERE = ""


class Budget:
    """Waits allowed in each step.

    Args:
        limits: a number for the whole step, or numbers by regions: "step" is a region of that name wherever it
            is, "train/step" one inside a region "train". What is nested further in counts as well.

    Raises:
        TypeError, ValueError: neither.
    """

    def __init__(self, limits: int | Mapping[str, int]) -> None:
        self._limits = _checked(limits)
        self._spent: Counter[str] = Counter()

    def next_step(self) -> None:
        """Begin with nothing spent."""
        self._spent.clear()

    def spend(self, event: Event) -> tuple[bool, str | None]:
        """Count one wait.

        Returns:
            Whether a limit holds for it, and what to say where one is exceeded.
        """
        path = "/".join(("", *event.region, ""))
        exceeded = None
        names = [name for name in self._limits if name == EVERYWHERE or f"/{name}/" in path]
        for name in names:
            self._spent[name] += 1
            if self._spent[name] > self._limits[name]:
                where = f'region "{name}"' if name else "a step"
                exceeded = f"{where} waits {self._spent[name]} times, its budget is {self._limits[name]}"
        return bool(names), exceeded


def _checked(limits: Any) -> dict[str, int]:
    named = {EVERYWHERE: limits} if not isinstance(limits, Mapping) else limits
    for name, limit in named.items():
        if not isinstance(name, str):
            raise TypeError(f'"budget" must name regions by strings: {name!r}')
        if named is limits and not name.strip("/"):
            raise ValueError(f'"budget" must name regions: {name!r}')
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f'"budget" must be a number of waits, or such numbers by regions: {limit!r}')
        if limit < 0:
            raise ValueError(f'"budget" must be >= 0: {limit!r}')
    return {name.strip("/"): limit for name, limit in named.items()}
