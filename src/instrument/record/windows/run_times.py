"""`RunTimes`: times every step of a run, in bounded memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import merge
from operator import sub
from time import perf_counter_ns

from ...base.guard import contained_events
from ...base.interrupts import Suppressed
from ...base.process_id import start_time
from ...base.run_lengths import SLOW, RunLengths
from .timing import TIMING

BLOCK = 1024
"""The number of steps after which their lengths are added up, a power of two."""

_SAMPLE = 128  # successive steps of a block, whose median is that of the block
_FEW = 16  # a block with fewer steps takes the median of the one before
_KEPT = 256  # slow steps, and epochs


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
        """Go on with the current step."""
        self._leave_out("phases_ns", perf_counter_ns() - self._left_ns)

    def _leave_out(self, part: str, ns: int) -> None:
        if self._running and self._ends:
            self._ends[-1] += ns
            self._outside[part] += ns

    def lengths(self, step: int) -> RunLengths:
        """Return the lengths of the steps before ``step``."""
        self.fold(step)
        plain = self._plain.judged()
        recorded = self._recorded.judged(plain.median_ns)
        usual = plain if plain.typical_steps else recorded
        last_ns = self._ends[-1] if self._running and self._ends else self._idle_since_ns
        return RunLengths(
            usual_ns=usual.typical_ns // max(usual.typical_steps, 1),
            typical_steps=plain.typical_steps + recorded.typical_steps,
            typical_ns=plain.typical_ns + recorded.typical_ns,
            slow_steps=plain.slow_steps + recorded.slow_steps,
            slow_ns=plain.slow_ns + recorded.slow_ns,
            slow=tuple(merge(plain.slow, recorded.slow)),
            recorded=tuple(number for number, _ in recorded.slow),
            epochs=tuple(self._epochs),
            end_ns=perf_counter_ns() - last_ns if last_ns else 0,
            **self._outside,
        )


class StepTally:
    """Adds up the lengths of steps, block by block: of each it is known which steps are slow.

    Attributes:
        typical_steps: and ``typical_ns``, ``slow_steps``, ``slow_ns``, ``slow``: as those of `RunLengths`.
        median_ns: the median length of the last block; 0 before its first step.
    """

    def __init__(self) -> None:
        self.typical_steps = self.typical_ns = self.slow_steps = self.slow_ns = 0
        self.slow: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self.median_ns = 0
        self._first = 0  # the number of the first step of the block that is being filled
        self._lengths_ns: list[int] = []

    def add(self, first: int, lengths_ns: Sequence[int]) -> None:
        """Add steps, the first of which has the number ``first``."""
        if first != self._first + len(self._lengths_ns):  # other steps came between
            if self._lengths_ns:
                self._judge()
            self._first = first
        self._lengths_ns += lengths_ns
        if len(self._lengths_ns) >= BLOCK:
            self._judge()

    def judged(self, least_ns: int = 0) -> StepTally:
        """Return a copy with the steps of the unfinished block, whose median is taken as ``least_ns`` at least."""
        copy = StepTally()
        vars(copy).update(vars(self), slow=self.slow.copy())
        if self._lengths_ns:
            copy._judge(least_ns)
        return copy

    def _judge(self, least_ns: int = 0) -> None:
        lengths_ns, self._lengths_ns = self._lengths_ns, []
        sample = sorted(lengths_ns[:_SAMPLE])
        if len(sample) >= _FEW or not self.median_ns:
            self.median_ns = sample[(len(sample) - 1) // 2]
        limit_ns = SLOW * max(self.median_ns, least_ns)
        self.typical_steps += len(lengths_ns)
        self.typical_ns += sum(lengths_ns)
        if max(lengths_ns) > limit_ns:
            slow = [(number, ns) for number, ns in enumerate(lengths_ns, self._first) if ns > limit_ns]
            slow_ns = sum(ns for _, ns in slow)
            self.slow.extend(slow)
            self.slow_steps += len(slow)
            self.slow_ns += slow_ns
            self.typical_steps -= len(slow)
            self.typical_ns -= slow_ns
        self._first += len(lengths_ns)


def _process_age_ns() -> int:
    """Return the time since this process started; 0 where the system does not say it."""
    with Suppressed(OSError, ValueError, AttributeError):
        ticks = int(start_time(os.getpid()) or "")
        started_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns, 0)
    return 0
