"""`compare_peaks`, `compare_regions`: two peaks part by part, which add up to their difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from .breakdown import Breakdown, Use


class ChangedPart(NamedTuple):
    """A part of the memory at two peaks.

    Attributes:
        category: one of `instrument.memory.categories.CATEGORIES`.
        name: the line that allocates it, as "FOLDER/FILE:LINE FUNCTION"; without one, "inferred: " and the
            category's evidence, or "unknown". Or the innermost region that was open; empty if none was.
        before_bytes: its size at the first peak.
        after_bytes: its size at the second one.
    """

    category: str
    name: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        """By how much it grew."""
        return self.after_bytes - self.before_bytes


def compare_peaks(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks, by line and category, the largest change first.

    All changes add up to the difference of the peaks. A line that moved, as code was added above it, is two parts.
    """
    return _changes(before, after, lambda use: use.source)


def compare_regions(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks, by region and category, the largest change first; they add up, too."""
    return _changes(before, after, lambda use: use.region)


def _changes(before: Breakdown, after: Breakdown, name: Callable[[Use], str]) -> list[ChangedPart]:
    sizes = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    for place, each in enumerate((before, after)):
        for use in each.uses:
            sizes[use.category, name(use)][place] += use.bytes
    parts = [ChangedPart(*key, *both) for key, both in sizes.items()]
    return sorted(parts, key=lambda part: (-abs(part.change_bytes), part.category, part.name))
