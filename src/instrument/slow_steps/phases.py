"""The phases of a step, and the regions that show them."""

from __future__ import annotations

import re
from collections.abc import Sequence

OTHER = "other"
"""The time of a step outside its phases."""

PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
"""The phases that the regions of this library and of its adapters show."""

_TORCH = (("enumerate(DataLoader)#", "data"), ("Optimizer.", "optimizer"))
_SEPARATOR = re.compile(r"[./]")
_MAX_NAMES = 4096  # names made in a loop, such as f"batch {i}", would otherwise be kept forever


class PhaseNames(dict[str, int]):
    """The column of the phase that the region of a name shows, from 1; 0 if it shows none."""

    def __init__(self, phases: Sequence[str]) -> None:
        super().__init__()
        self._columns = {phase: column for column, phase in enumerate(phases, 1)}

    def __missing__(self, name: str) -> int:
        phase = next((phase for prefix, phase in _TORCH if name.startswith(prefix)), None)
        if phase is None:
            phase = name if name in self._columns else _SEPARATOR.split(name)[-1]
        if len(self) >= _MAX_NAMES:
            self.clear()
        column = self[name] = self._columns.get(phase, 0)
        return column
