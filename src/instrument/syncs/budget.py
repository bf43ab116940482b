"""`Budget`: how often a step may synchronize, in total or in regions."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.findings import Site
from ..explain.waits.events import SyncEvent
from ..explain.waits.report import times

_MAX_LISTED = 5


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the end of a sentence that names the nearest of ``names``, or some of them if none is near."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    if not names:
        return "; there was none at all"
    listed = ", ".join(f'"{one}"' for one in names[:_MAX_LISTED])
    return f"; there were {listed}{', ...' * (len(names) > _MAX_LISTED)}"


WHOLE_STEP = ""
_MAX_PATHS = 1000  # of regions to suggest: a program may make names at run time


class Budget:
    """Number of synchronizations allowed in each step.

    Args:
        limits: a number for the whole step, or numbers by region: "step" is a region of that name anywhere,
            "train/step" one directly inside a region "train". Regions nested inside count as well. None allows
            any number.

    Raises:
        TypeError, ValueError: ``limits`` is none of these.

    Attributes:
        given: whether there are ``limits``.
    """

    def __init__(self, limits: int | Mapping[str, int] | None) -> None:
        self.given = limits is not None
        self._limits = _check_limits({} if limits is None else limits)
        self._counts: Counter[str] = Counter()
        self._exceeded_counts: dict[str, list[int]] = {}  # number in each step that exceeded a limit
        self._first_excess: dict[str, Site | None] = {}  # line of the first synchronization beyond the limit
        self._never_ran: set[str] = set()
        self._paths: set[tuple[str, ...]] = set()  # of regions, while some of the budget has not run
        self.clear()

    def note_region(self, path: tuple[str, ...]) -> None:
        """Note that the innermost region of ``path`` has opened."""
        if self._never_ran and path not in self._paths:
            self._never_ran = {name for name in self._never_ran if not _applies(name, path)}
            if len(self._paths) < _MAX_PATHS:
                self._paths.add(path)

    def unmatched(self) -> list[str]:
        """Return a sentence on each region of the budget that never ran."""
        suggestions = {name: nearest(name, _names(self._paths, name.count("/") + 1)) for name in self._never_ran}
        return [
            f"{_quote_region(name)} has a budget, but never ran{end}" for name, end in sorted(suggestions.items())
        ]

    def next_step(self) -> None:
        """Begin a step, with all counts at zero."""
        for name in self._exceeded_names():
            self._exceeded_counts.setdefault(name, []).append(self._counts[name])
        self._counts.clear()

    def restart_step(self) -> None:
        """Drop what was counted since the last step ended."""
        self._counts.clear()

    def clear(self) -> None:
        """Drop all steps."""
        self.restart_step()
        self._exceeded_counts.clear()
        self._first_excess.clear()
        self._never_ran = set(self._limits) - {WHOLE_STEP}
        self._paths.clear()

    def exceeded(self, steps: int) -> list[str]:
        """Return a sentence on each exceeded limit, the one that most of ``steps`` steps exceeded first."""
        over = {name: list(spent) for name, spent in self._exceeded_counts.items()}
        for name in self._exceeded_names():
            over.setdefault(name, []).append(self._counts[name])
        return [
            self._sentence(name, spent, steps)
            for name, spent in sorted(over.items(), key=lambda one: -len(one[1]))
        ]

    def _exceeded_names(self) -> list[str]:
        return [name for name, spent in self._counts.items() if spent > self._limits[name]]

    def _sentence(self, name: str, spent: list[int], steps: int) -> str:
        often = (
            "" if steps < 2 else f" in {len(spent)} of {steps} steps" if len(spent) < steps else " in every step"
        )
        upto = "up to " if len({*spent}) > 1 else ""
        where = f" (the first one too many: {site})" if (site := self._first_excess.get(name)) else ""
        return self._excess(name, f"{upto}{times(max(spent))}{often}") + where

    def _excess(self, name: str, often: str) -> str:
        return f"{_quote_region(name)} synchronizes {often}; its budget is {self._limits[name]}"

    def count_sync(self, event: SyncEvent) -> tuple[bool, str | None]:
        """Count one synchronization.

        Returns:
            Whether a limit applies to it, and a sentence if a limit is exceeded.
        """
        exceeded = None
        names = [name for name in self._limits if name == WHOLE_STEP or _applies(name, event.region)]
        for name in names:
            self._counts[name] += 1
            if self._counts[name] > self._limits[name]:
                self._first_excess.setdefault(name, event.site or event.via)
                exceeded = self._excess(name, times(self._counts[name]))
        return bool(names), exceeded


def _applies(name: str, path: tuple[str, ...]) -> bool:
    return f"/{name}/" in "/".join(("", *path, ""))


def _names(paths: Iterable[tuple[str, ...]], length: int) -> list[str]:
    """Return the parts of ``paths`` with ``length`` names, as budgets name them."""
    parts = {path[at : at + length] for path in paths for at in range(len(path))}
    return sorted("/".join(part) for part in parts)


def _quote_region(name: str) -> str:
    return f'region "{name}"' if name else "a step"


def _check_limits(limits: Any) -> dict[str, int]:
    named = {WHOLE_STEP: limits} if not isinstance(limits, Mapping) else limits
    for name, limit in named.items():
        if not isinstance(name, str):
            raise TypeError(f'"budget" must name regions by strings: {name!r}')
        if named is limits and not name.strip("/"):
            raise ValueError(f'"budget" must name regions: {name!r}')
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f'"budget" must be a number of synchronizations, or such numbers by region: {limit!r}')
        if limit < 0:
            raise ValueError(f'"budget" must be >= 0: {limit!r}')
    return {name.strip("/"): limit for name, limit in named.items()}
