"""`compare_peaks` and its like: two peaks part by part, which add up to their difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from .breakdown import Breakdown, Use
from .categories import CATEGORIES, OLDER, WEAK

OLDER_MEMORY = "older_memory"
"""The category of memory that is older than the history, and whose use its size alone suggests at a peak.

Two snapshots of one program may suggest different uses, although the program did not change.
"""
_KEPT = {"parameters", "optimizer_state"}  # sizes hardly tell these apart


class ChangedPart(NamedTuple):
    """A part of the memory at two peaks.

    Attributes:
        category: one of `instrument.memory.categories.CATEGORIES`, or `OLDER_MEMORY`.
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


def compare_categories(before: Breakdown, after: Breakdown) -> list[ChangedPart]:
    """Return the parts of two peaks by category, in the order of `CATEGORIES`; they add up, too."""
    order = [*CATEGORIES, OLDER_MEMORY]
    return sorted(_changes(before, after, lambda _: ""), key=lambda part: order.index(part.category))


def comparable(before: Breakdown, after: Breakdown) -> tuple[list[Use], list[Use]]:
    """Return the uses of two peaks, with those that cannot be told apart in both as `OLDER_MEMORY`."""
    sides = before.uses, after.uses
    guessed = {use.category for uses in sides for use in uses if use.evidence in WEAK}
    if guessed & _KEPT:
        guessed |= _KEPT
    one, other = (
        [
            use._replace(category=OLDER_MEMORY, evidence="older")
            if use.evidence in OLDER and use.category in guessed
            else use
            for use in uses
        ]
        for uses in sides
    )
    return one, other


def _changes(before: Breakdown, after: Breakdown, name: Callable[[Use], str]) -> list[ChangedPart]:
    sizes = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    for place, uses in enumerate(comparable(before, after)):
        for use in uses:
            sizes[use.category, name(use)][place] += use.bytes
    parts = [ChangedPart(*key, *both) for key, both in sizes.items()]
    return sorted(parts, key=lambda part: (-abs(part.change_bytes), part.category, part.name))
