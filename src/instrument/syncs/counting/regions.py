"""Counts how often each region opens in a step of a dry run."""

from __future__ import annotations

import sys
from collections import Counter

from ...base.guard import guard
from ...explain.contract.region_tree import RegionTree
from .recorder import FEATURE, Steps

_Path = tuple[str, ...]


class RegionCounter:
    """Counts the regions of each step; steps with the same regions share their counts.

    Args:
        steps: says in which step the program is.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._calls: dict[int | None, Counter[_Path]] = {}
        self._last_two: tuple[int | None, int | None] = None, None

    @guard.contained(FEATURE)
    def note(self, path: _Path) -> None:
        """Note that a region opened; ``path`` are the open regions, outermost first."""
        steps = self._steps
        if steps.in_step:
            steps.look(sys._getframe(1))
        if steps.in_unwanted_step:
            return
        if steps.step not in self._calls:
            self._begin(steps.step)
        self._calls[steps.step][path] += 1

    def _begin(self, step: int | None) -> None:
        """Begin a step; the one before it shares the counts of the one before that, if they are the same."""
        before, last = self._last_two
        if before is not None and last is not None:
            same = list(self._calls[before].items()) == list(self._calls[last].items())
            self._calls[last] = self._calls[before] if same else self._calls[last]
        self._calls[step] = Counter()
        self._last_two = last, step

    def tree(self, step: int) -> RegionTree:
        """Return the regions of a step; the first step begins where the run or its optimizer does."""
        wanted = (step,) if step != 1 else (0, 1) if 0 in self._calls else (None, 1)
        return RegionTree.of(sum((self._calls.get(each, Counter()) for each in wanted), Counter()))

    def restart(self, step: int | None) -> None:
        """Make all regions so far a part of the step with this number."""
        self._calls, self._last_two = {step: sum(self._calls.values(), Counter())}, (None, step)

    def clear(self) -> None:
        """Drop all regions so far."""
        self._calls.clear()
        self._last_two = None, None
