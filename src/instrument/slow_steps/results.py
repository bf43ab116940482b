"""`Results`: what a black box found, as text and as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..units import counted, duration
from .slow_step import SlowStep
from .step_clock import StepClock
from .usual_step import UsualStep


class Results(NamedTuple):
    """What a black box found.

    Attributes:
        clock: has the times of the last steps.
        usual: what a usual step takes.
        alarms: the number of alarms.
        slow_steps: the slow steps, without those that recur.
        periodic: the last slow step of each period.
        worst: the slow steps of the whole run with the largest delays, the largest first.
    """

    clock: StepClock
    usual: UsualStep
    alarms: int
    slow_steps: list[SlowStep]
    periodic: dict[int, SlowStep]
    worst: list[SlowStep]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        steps = counted(self.clock.step_num - self.clock.first_step, "step")
        if not self.usual.usual_ns:
            yield f"{steps}: too few to know what is usual"
            return
        yield (
            f"{steps}, {duration(self.usual.usual_ns)} each as a rule; a step is slow from "
            f"{duration(self.usual.limit_ns)}. {counted(len(self.slow_steps), 'slow step')}, "
            f"{counted(self.alarms, 'alarm')}."
        )
        if len(self.slow_steps) > len(self.worst):
            yield f"The {len(self.worst)} worst:"
        yield from (f"  {slow}" for slow in sorted(self.worst, key=lambda slow: slow.step))
        for every, slow in sorted(self.periodic.items()):
            yield f"  one step in {every} is like this, and gives no alarm: {slow}"
        if self.usual.shifts:
            yield f"  the usual time changed at once {counted(self.usual.shifts, 'time')}"

    def to_json(self) -> str:
        """Return the results as JSON text."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the results as a dict of JSON values.

        ``step`` is the number of the current step. ``usual_ns``, ``limit_ns`` and ``noise`` say what a usual step
        takes now, and from which time one is slow; ``shifts`` is how often that changed at once. ``slow_steps``
        and ``periodic`` are slow steps, with the keys of `SlowStep.as_dict`, and so are the ``worst`` ones, the
        worst first; ``alarms`` is the number of alarms.
        ``last_steps`` has the numbers, the durations and the phases of the steps in the ring, in columns.
        """
        last = self.clock.last_steps()
        columns = zip(*(times.phases_ns for times in last), strict=True)
        phases = zip(self.clock.phases, columns, strict=True) if last else ()
        return {
            "step": self.clock.step_num,
            "usual_ns": self.usual.usual_ns,
            "limit_ns": self.usual.limit_ns,
            "noise": self.usual.noise,
            "shifts": self.usual.shifts,
            "alarms": self.alarms,
            "slow_steps": [slow.as_dict() for slow in self.slow_steps],
            "periodic": [slow.as_dict() for slow in self.periodic.values()],
            "worst": [slow.as_dict() for slow in self.worst],
            "last_steps": {
                "step": [times.step for times in last],
                "duration_ns": [times.duration_ns for times in last],
                "phases_ns": {name: list(column) for name, column in phases if any(column)},
            },
        }
