"""In how many steps a line waits, and how often in each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..units import count


@dataclass(frozen=True)
class Pattern:
    """How often a line waits; ``str`` says it: "in every step", "in 1 of 7 steps, 61 times".

    Attributes:
        counts: the number of waits of each step that has any.
        steps: the number of steps that were looked at; 0 where none is known, and all is one.
        outside: the number of waits outside of the steps: set-up, an evaluation before the first step, what
            follows the last update. All of them where no step is known.
    """

    counts: tuple[int, ...]
    steps: int
    outside: int

    @classmethod
    def of(cls, waits: Counter[int | None], steps: int) -> Pattern:
        """Return the pattern of ``waits``, by the numbers of their steps, in ``steps`` steps."""
        if not steps:
            return cls((), 0, waits.total())
        counts = sorted(number for step, number in waits.items() if step is not None and number)
        return cls(tuple(counts), steps, waits[None])

    @property
    def share(self) -> float:
        """The share of the steps that have a wait, from 0 to 1; 1 where no step is known."""
        return min(len(self.counts) / self.steps, 1.0) if self.steps else 1.0

    @property
    def repeats(self) -> bool:
        """Whether more than one step has a wait."""
        return len(self.counts) > 1

    def __str__(self) -> str:
        if not self.steps:
            return times(self.outside)
        parts = [self._inside()] if self.counts else []
        if self.outside:
            parts.append(f"{times(self.outside)} outside of the steps")
        return "; ".join(parts)

    def _inside(self) -> str:
        least, most, inside = self.counts[0], self.counts[-1], len(self.counts)
        if self.steps == 1:
            return f"{times(most)} in the step"
        where = "in every step" if inside >= self.steps else f"in {count(inside)} of {count(self.steps)} steps"
        if most == 1:
            return where
        if least < most:
            return f"{where}, {'once' if least == 1 else count(least)} to {times(most)}"
        return f"{where}, {times(most)}{' each' if self.repeats else ''}"


def times(number: int) -> str:
    """Return "once", "2 times"."""
    return "once" if number == 1 else f"{count(number)} times"
