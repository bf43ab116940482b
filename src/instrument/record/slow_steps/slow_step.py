"""The phases of a step, and `SlowStep`: a step that took longer than usual, and its phases, which add up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.units import duration

OTHER = "other"
"""The time of a step outside its phases."""

PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
"""The phases that the regions of this library and of its adapters show."""

OPTIMIZER = 1 + PHASES.index("optimizer")
"""The column of the phase that may contain others, as a closure computes the loss in it."""

_TORCH = (("enumerate(DataLoader)#", "data"), ("Optimizer.", "optimizer"))
_SEPARATOR = re.compile(r"[./]")
_MAX_NAMES = 4096  # names made in a loop, such as f"batch {i}", would otherwise be kept forever


class PhaseNames:
    """Finds the phase that a region shows by its name.

    Attributes:
        columns: for each name so far, the column of its phase, from 1; 0 if it shows none.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self.columns: dict[str, int] = {}
        self._phases = {phase: column for column, phase in enumerate(phases, 1)}

    def add(self, name: str) -> int:
        """Return the column of a name that is not in `columns`, and add it."""
        phase = next((phase for prefix, phase in _TORCH if name.startswith(prefix)), None)
        if phase is None:
            phase = name if name in self._phases else _SEPARATOR.split(name)[-1]
        if len(self.columns) >= _MAX_NAMES:
            self.columns.clear()
        column = self.columns[name] = self._phases.get(phase, 0)
        return column


class PhaseTime(NamedTuple):
    """The time of a phase in a step.

    Attributes:
        ns: in this step.
        usual_ns: in a usual step.
    """

    ns: int
    usual_ns: int

    @property
    def delta_ns(self) -> int:
        """``ns`` - ``usual_ns``."""
        return self.ns - self.usual_ns


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than usual.

    The usual step is the one of median length out of the last steps. So both columns of ``phases`` are exact: they
    add up to ``duration_ns`` and to ``usual_ns``, and the differences to ``delta_ns``.

    Attributes:
        step: its number.
        duration_ns: its length.
        usual_ns: the length of a usual step.
        score: how many times the noise it is above that, on a logarithmic scale (a robust z-score).
        phases: the time of each phase in both steps, the one that grew most first; "other" is the time outside all
            phases.
        period: it recurs: every so many steps there is one like it; 0 if it does not.
    """

    step: int
    duration_ns: int
    usual_ns: int
    score: float
    phases: dict[str, PhaseTime]
    period: int = 0

    @property
    def delta_ns(self) -> int:
        """``duration_ns`` - ``usual_ns``."""
        return self.duration_ns - self.usual_ns

    @property
    def cause(self) -> str:
        """The phase that took the most time more than usual."""
        return next(iter(self.phases))

    def __str__(self) -> str:
        text = f"step {self.step} took {duration(self.duration_ns)}, {duration(self.delta_ns)} more than usual"
        if len(self.phases) == 1:
            return text
        cause, (largest, *_) = self.cause, self.phases.values()
        return f"{text}: {duration(largest.delta_ns)} of it in {cause if cause != 'other' else 'no phase'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the step as a dict of JSON values: its attributes, ``delta_ns`` and ``cause``."""
        phases = {name: {**time._asdict(), "delta_ns": time.delta_ns} for name, time in self.phases.items()}
        own = {"delta_ns": self.delta_ns, "cause": self.cause, "phases": phases}
        return {**vars(self), **own}
