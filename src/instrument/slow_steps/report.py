"""The results of a black box, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..units import counted, duration

if TYPE_CHECKING:
    from .box import BlackBox

_SHOWN = 10  # slow steps in the text


def text(box: BlackBox) -> str:
    """Return what a usual step takes, and which steps were slow, in which phase."""
    return "\n".join(_lines(box))


def _lines(box: BlackBox) -> Iterator[str]:
    if not box.usual.usual_ns:
        yield f"{counted(box.step_num - box.clock.first_step, 'step')}: too few to know what is usual"
        return
    usual = duration(box.usual.usual_ns)
    yield (
        f"{counted(box.step_num - box.clock.first_step, 'step')}, {usual} each as a rule; a step is slow from "
        f"{duration(box.usual.limit_ns)}. {counted(len(box.slow_steps), 'slow step')}, "
        f"{counted(box.alarms, 'alarm')}."
    )
    worst = sorted(box.slow_steps, key=lambda slow: -slow.delta_ns)[:_SHOWN]
    if len(box.slow_steps) > _SHOWN:
        yield f"The {_SHOWN} worst:"
    yield from (f"  {slow}" for slow in sorted(worst, key=lambda slow: slow.step))
    for every, slow in sorted(box.periodic.items()):
        yield f"  one step in {every} is like this, and gives no alarm: {slow}"
    if box.usual.shifts:
        yield f"  the usual time changed at once {counted(box.usual.shifts, 'time')}"


def as_dict(box: BlackBox) -> dict[str, Any]:
    """Return the results as a dict of JSON values.

    ``step`` is the number of the current step. ``usual_ns``, ``limit_ns`` and ``noise`` say what a usual step
    takes now, and from which time one is slow; ``shifts`` is how often that changed at once. ``slow_steps`` and
    ``periodic`` are slow steps, with the keys of `SlowStep.as_dict`; ``alarms`` is the number of alarms.
    ``last_steps`` has the numbers, the durations and the phases of the steps in the ring, in columns.
    """
    last = box.clock.last_steps()
    phases = (
        zip(box.clock.phases, zip(*(times.phases_ns for times in last), strict=True), strict=True) if last else ()
    )
    return {
        "step": box.step_num,
        "usual_ns": box.usual.usual_ns,
        "limit_ns": box.usual.limit_ns,
        "noise": box.usual.noise,
        "shifts": box.usual.shifts,
        "alarms": box.alarms,
        "slow_steps": [slow.as_dict() for slow in box.slow_steps],
        "periodic": [slow.as_dict() for slow in box.periodic.values()],
        "last_steps": {
            "step": [times.step for times in last],
            "duration_ns": [times.duration_ns for times in last],
            "phases_ns": {name: list(column) for name, column in phases if any(column)},
        },
    }
