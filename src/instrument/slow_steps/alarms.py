"""`Alarms`: which slow steps give an alarm: few, but always the ones that are worse than those before."""

from __future__ import annotations

from typing import NamedTuple

_WORSE = 1.5  # times the delay of the worst alarm: such a step gives an alarm whatever was given before
_HOUR_NS = 3600 * 10**9


class _Alarm(NamedTuple):
    step: int
    time_ns: int
    delta_ns: int


class Alarms:
    """Decides which slow steps give an alarm; `is_due` notes those that do.

    After an alarm there is none for ``cooldown`` steps, and none after ``cap`` in an hour. A step whose delay is
    one and a half times that of the worst of those alarms gives one nevertheless, so that a stall of a second is
    not missed because of a stall of 50 ms before it. As each is that much worse, they are few.

    Args:
        cooldown: a number of steps.
        cap: the most alarms in an hour.

    Attributes:
        count: the number of alarms given.
    """

    def __init__(self, cooldown: int, cap: int) -> None:
        self._cooldown = cooldown
        self._cap = cap
        self._given: list[_Alarm] = []  # those that may prevent another one
        self.count = 0

    def is_due(self, step: int, delta_ns: int, now_ns: int) -> bool:
        """Return whether a slow step gives an alarm.

        Args:
            step: its number.
            delta_ns: how much longer than usual it took.
            now_ns: the time.
        """
        hour = [alarm for alarm in self._given if now_ns - alarm.time_ns < _HOUR_NS]
        cooling = [alarm for alarm in self._given if step < alarm.step + self._cooldown]
        for before, prevents in ((cooling, bool(cooling)), (hour, len(hour) >= self._cap)):
            if prevents and delta_ns < _WORSE * max((alarm.delta_ns for alarm in before), default=delta_ns):
                return False
        self._given = [*{*hour, *cooling}, _Alarm(step, now_ns, delta_ns)]
        self.count += 1
        return True

    def forget_steps(self) -> None:
        """Take the numbers of steps anew, as after `BlackBox.go_to`."""
        self._given = [alarm._replace(step=-self._cooldown) for alarm in self._given]
