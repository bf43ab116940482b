"""The phases of a step, and the regions that show them."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
