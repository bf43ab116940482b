"""`RunTimes`: times every step of a run, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from operator import sub
from time import perf_counter_ns

from ...base.guard import contained_events
from ...base.interrupts import Suppressed
from ...base.process_id import start_time
from ...base.run_lengths import RunLengths, StepTally
from .timing import TIMING

_KEPT = 256  # epochs


@contained_events(TIMING)
class RunTimes:
    """The lengths of the steps from `begin` to `lengths`; the profile reports what happens between them.

    A method that fails returns None, and the program goes on.

    Attributes:
        end_step: called with the time at which a step ends. It is a method of a list, which costs least; `fold`
            has to follow after at most `BLOCK` calls.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []  # of the steps that are not added up; before them the begin of the first one
        self.end_step: Callable[[int], None] = self._ends.append
        self._running = False
        self._is_first = True  # no step has ended
        self._idle_since_ns = 0  # when the loop paused; 0 before it began
        self._left_ns = 0  # when the open phase began
        self._plain, self._recorded = StepTally(), StepTally()
        self._epochs: deque[int] = deque(maxlen=_KEPT)  # their first steps
        self._outside = {"start_ns": 0, "between_ns": 0, "phases_ns": 0, "recording_ns": 0}

    def begin(self, *, late: bool = False, early: bool = False) -> None:
        """Begin the first step, or go on after `pause`.

        Args:
            late: the current step began earlier, at an unknown time: the next one is the first that is timed.
            early: the process exists for this run, so that the time since its start belongs to it.
        """
        now = perf_counter_ns()
        if self._idle_since_ns:
            self._outside["between_ns"] += now - self._idle_since_ns
        elif early:
            self._outside["start_ns"] = _process_age_ns()
        self._running = True
        self._is_first = self._is_first and not late
        self._ends[:] = [] if late else [now]

    def fold(self, step: int, *, recorded: bool = False) -> None:
        """Add up the steps that ended before ``step``, all of which were ``recorded`` or none."""
        ends = self._ends[:]
        del self._ends[: len(ends) - self._running]
        if not self._running or len(ends) < 2:
            return
        lengths_ns = list(map(sub, ends[1:], ends))
        if self._is_first:
            self._is_first = False
            self._outside["start_ns"] += lengths_ns.pop(0)
        (self._recorded if recorded else self._plain).add(step - len(lengths_ns), lengths_ns)

    def pause(self, step: int, *, recorded: bool = False) -> None:
        """End the loop, which may go on with ``step``, in which nothing has run."""
        if self._running:
            self.fold(step, recorded=recorded)
            self._idle_since_ns = self._ends.pop() if self._ends else perf_counter_ns()
            self._running = False

    def leave_out_since_pause(self) -> None:
        """Leave out the time since the loop paused, in which the library worked."""
        now = perf_counter_ns()
        if self._idle_since_ns and not self._running:
            self._outside["recording_ns"] += now - self._idle_since_ns
            self._idle_since_ns = now

    def begin_epoch(self, step: int) -> None:
        """Note that ``step`` is the first of an epoch; may be called again."""
        if step not in self._epochs:
            self._epochs.append(step)

    def leave_out(self, ns: int) -> None:
        """Leave out ``ns`` of the library's own work in the current step."""
        self._leave_out("recording_ns", ns)

    def leave_out_since_end(self) -> None:
        """Leave out the time since the last step ended, in which the library worked."""
        if self._running and self._ends:
            self.leave_out(perf_counter_ns() - self._ends[-1])

    def enter_phase(self) -> None:
        """Leave out the time from here to `leave_phase`, in which the program does something else."""
        self._left_ns = perf_counter_ns()

    def leave_phase(self) -> None:
        """Go on with the current step; if steps ended meanwhile, the phase ran beside them on another thread."""
        if not self._ends or self._ends[-1] <= self._left_ns:
            self._leave_out("phases_ns", perf_counter_ns() - self._left_ns)

    def _leave_out(self, part: str, ns: int) -> None:
        if self._running and self._ends:
            self._ends[-1] += ns
            self._outside[part] += ns

    def lengths(self, step: int) -> RunLengths:
        """Return the lengths of the steps before ``step``."""
        self.fold(step)
        last_ns = self._ends[-1] if self._running and self._ends else self._idle_since_ns
        end_ns = perf_counter_ns() - last_ns if last_ns else 0
        return RunLengths.of(
            self._plain, self._recorded, epochs=tuple(self._epochs), end_ns=end_ns, **self._outside
        )


def _process_age_ns() -> int:
    """Return the time since this process started; 0 where the system does not say it."""
    with Suppressed(OSError, ValueError, AttributeError):
        ticks = int(start_time(os.getpid()) or "")
        started_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns, 0)
    return 0
