"""`StepClock`: times the last steps of a loop and the phases in them, into a ring."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from ..regions.region import Region
from .judging import OPTIMIZER, SlowStep

BLOCK = 32
"""The steps after which the usual step is computed again."""

_NEVER_SLOW = 1 << 62
_CLOSED, _PAUSED = 0, -1


_TORCH = (("enumerate(DataLoader)#", "data"), ("Optimizer.", "optimizer"))
_ALSO = {"eval": "evaluation", "validate": "evaluation", "validation": "evaluation"}
_SEPARATOR = re.compile(r"[./]")
_MAX_NAMES = 4096  # names made in a loop, such as f"batch {i}", would otherwise be kept forever


class Sampler(Protocol):
    """What measures the work of some steps beside the clock, as `OwnWork`."""

    def leave_out(self) -> None:
        """Take what ran since the last boundary for no part of a step."""


class TimedStep(NamedTuple):
    """The times of one step.

    Attributes:
        step: its number.
        duration_ns: its length; 0 if it was not timed.
        phases_ns: the time of each phase, in the order of the phases.
    """

    step: int
    duration_ns: int
    phases_ns: tuple[int, ...]


class StepClock:
    """An emitter that times the phases of steps; `end_step` ends one.

    The outermost region of a phase counts, on the thread that ends the steps. A phase in that of the optimizer,
    whose closure may compute the loss, counts instead of it. Regions in generators and coroutines do not count, as
    other code runs while they are open.

    The ring is one list of integers, a row for each step: its duration and the time of each phase. So a step
    allocates nothing that the garbage collector follows.

    Args:
        steps: how many steps the ring holds at least.
        phases: the names of the phases.
        first_step: the number of the first step.
        review: decides on a step that is longer than the limit, ends a block or was given to `review_at`, from its
            row and its duration; `end_step` returns the result. The time for this is part of no step.

    Attributes:
        phases: as given.
        first_step: as given.
        limit_ns: a longer step may be slow.
        now: returns the time in ns at each boundary of a phase and of a step; `OwnWork` replaces it for a while.
        sampler: the `OwnWork` that does so; a clock has one at most.
        held_ns: the length of the last step that ended while the clock was held; 0 if there was none.
        left_out_ns: how long the clock was paused so far, but not held.
    """

    name = "black box"

    def __init__(
        self,
        steps: int,
        phases: Sequence[str],
        first_step: int,
        review: Callable[[int, int], SlowStep | None],
    ) -> None:
        self.now: Callable[[], int] = perf_counter_ns
        self.sampler: Sampler | None = None
        self.phases = tuple(phases)
        self.first_step = first_step
        self._review = review
        self._width = 1 + len(self.phases)
        self._blocks = -(-steps // BLOCK) + 1  # one of them is being filled
        self._review_at = _NEVER_SLOW  # the number of a step
        self.begin_ring()
        self._phase_columns = {phase: column for column, phase in enumerate(self.phases, 1)}
        self._columns: dict[str, int] = {}  # of the phase that each name so far shows; 0: none
        self._thread = get_ident()  # of the loop
        self._phase = 0  # the column of the open phase
        self._opened_ns = _CLOSED  # when that phase was opened, unless none is open or the clock is paused
        self._since_ns = 0  # when its part in the current step began
        self._inner = 0  # the column of a phase in that of the optimizer
        self._inner_ns = _CLOSED  # when it was opened
        self._paused_ns = 0  # when the clock was paused
        self.held_ns = self._held_since_ns = self.left_out_ns = 0
        self._began_ns = self.now()

    def begin_ring(self) -> None:
        """Forget all steps; the current one is the first."""
        self._rows = [0] * (self._blocks * BLOCK * self._width)
        self._row = 0  # where the row of the current step begins
        self._last_row = (BLOCK - 1) * self._width  # of the block
        self._lap_step = self.first_step  # the number of the step in the first row
        self.limit_ns = _NEVER_SLOW
        self._set_due_row()

    def review_at(self, step: int) -> None:
        """Review the steps up to number ``step`` when that one begins."""
        self._review_at = step
        self._set_due_row()

    def _set_due_row(self) -> None:
        row = (self._review_at - 1 - self._lap_step) * self._width
        self._due_row = row if self._row <= row < self._last_row else self._last_row  # whose step is reviewed

    # 0.4 us, of which the clock is 0.06
    def end_step(self) -> SlowStep | None:
        """End the current step and begin the next one; return the step if it is slow and an alarm is due.

        `Alarms` decides which are due.
        """
        now = self.now()
        row = self._row
        self._rows[row] = duration_ns = now - self._began_ns
        if self._opened_ns:
            self._split_phase(now)
        self._began_ns = now
        self._row = row + self._width
        if duration_ns > self.limit_ns or row == self._due_row:
            return self._call_review(row, duration_ns)
        return None

    def _call_review(self, row: int, duration_ns: int) -> SlowStep | None:
        self._thread = get_ident()
        try:
            return self._review(row, duration_ns)
        finally:
            if row == self._last_row:
                self._next_block()
            elif row == self._due_row:
                self._set_due_row()
            self.leave_out()

    def leave_out(self) -> None:
        """Begin the current step now: what ran so far is part of no step."""
        if self.sampler is not None:
            self.sampler.leave_out()
        self._began_ns = self._since_ns = self._paused_ns = self.now()

    def _split_phase(self, now: int) -> None:
        """Divide an open phase between two steps; a step that ends during a pause has no time."""
        if self._opened_ns == _PAUSED:
            self._rows[self._row : self._row + self._width] = [0] * self._width
            self._paused_ns = now
            if self._held_since_ns:
                self.held_ns, self._held_since_ns = now - self._held_since_ns, now
            return
        self._close_phase(now)
        self._since_ns = now
        if self._opened_ns < self._began_ns:  # open for a whole step: it is around the loop, or was never closed
            self._opened_ns = _CLOSED

    def _close_phase(self, now: int) -> None:
        self._rows[self._row + self._phase] += now - self._since_ns

    def pause(self) -> None:
        """Stop the clock; steps that end meanwhile have no time."""
        if self._opened_ns != _PAUSED:
            self._paused_ns = now = self.now()
            if self._opened_ns:
                self._close_phase(now)
            self._opened_ns = _PAUSED

    def hold(self) -> None:
        """Stop the clock, but for `held_ns`; what ran in this step so far counts neither."""
        self.pause()
        self._held_since_ns = self.now()

    def resume(self) -> None:
        """Let the clock run again."""
        if self._opened_ns == _PAUSED:
            self._opened_ns = _CLOSED
            if self.sampler is not None:
                self.sampler.leave_out()
            paused_ns = self.now() - self._paused_ns
            self._began_ns += paused_ns
            self.left_out_ns += 0 if self._held_since_ns else paused_ns
        self.held_ns = self._held_since_ns = 0

    @property
    def step_num(self) -> int:
        """The number of the current step."""
        return self._lap_step + self._row // self._width

    @property
    def open_column(self) -> int | None:
        """The column of the phase that is open, 0 without one; None while the clock is paused."""
        if self._inner_ns:
            return self._inner
        return None if self._opened_ns == _PAUSED else self._phase if self._opened_ns else 0

    def push(self, region: Region) -> int | None:
        """Open a phase, unless one is open."""
        if self._opened_ns:
            return self._push_inner(region) if self._phase == OPTIMIZER else None
        try:
            column = self._columns[region.name]
        except KeyError:
            column = self._add_name(region.name)
        if not column or get_ident() != self._thread:
            return None
        self._phase = column
        self._opened_ns = self._since_ns = now = self.now()
        return now

    def _add_name(self, name: str) -> int:
        """Return the column of the phase that a region shows by its name, which was not seen yet."""
        phase = next((phase for prefix, phase in _TORCH if name.startswith(prefix)), None)
        if phase is None:
            phase = name if name in self._phase_columns else _SEPARATOR.split(name)[-1]
        if len(self._columns) >= _MAX_NAMES:
            self._columns.clear()
        known = self._phase_columns
        column = self._columns[name] = known.get(phase) or known.get(_ALSO.get(phase, ""), 0)
        return column

    def pop(self, opened_ns: int | None) -> None:
        """Close the phase, if `push` opened one and it is still open."""
        if opened_ns is self._opened_ns:  # the same object: comparing large numbers takes longer
            self._rows[self._row + self._phase] += self.now() - self._since_ns
            self._opened_ns = _CLOSED
        elif opened_ns is not None:
            self._pop_inner(-opened_ns)

    def _push_inner(self, region: Region) -> int | None:
        """Open a phase in that of the optimizer; return when, negated."""
        column = self._columns.get(region.name) or self._add_name(region.name)
        if column in (0, OPTIMIZER) or self._inner_ns or self._opened_ns == _PAUSED or get_ident() != self._thread:
            return None
        self._inner = column
        self._inner_ns = self.now()
        return -self._inner_ns

    def _pop_inner(self, opened_ns: int) -> None:
        if opened_ns == self._inner_ns:
            took_ns = self.now() - max(opened_ns, self._began_ns)
            self._rows[self._row + self._inner] += took_ns
            if self._opened_ns > 0:  # else the optimizer's was closed by a pause
                self._rows[self._row + OPTIMIZER] -= took_ns
            self._inner_ns = _CLOSED

    def start(self, region: Region) -> None:
        """Do nothing."""

    def end(self, handle: object) -> None:
        """Do nothing."""

    def mark(self, region: Region) -> None:
        """Do nothing."""

    def block_ns(self) -> list[int]:
        """Return the durations of the last steps, a block of them, without those that were not timed."""
        end = self._row
        durations = self._rows[end - BLOCK * self._width : end : self._width]
        return [duration for duration in durations if duration] if 0 in durations else durations

    def _next_block(self) -> None:
        """Begin the next block, over the oldest one."""
        if self._row == len(self._rows):
            self._lap_step += len(self._rows) // self._width
            self._row = 0
        size = BLOCK * self._width
        self._rows[self._row : self._row + size] = [0] * size
        self._last_row = self._row + size - self._width
        self._set_due_row()

    def ends_block(self, row: int) -> bool:
        """Return whether the step in the row that begins at ``row`` is the last of its block."""
        return row == self._last_row

    @property
    def block_steps(self) -> int:
        """The number of steps in the block that is being filled."""
        return BLOCK - 1 - (self._last_row - self._row) // self._width

    def times_at(self, row: int) -> TimedStep:
        """Return the times in the row that begins at ``row``."""
        lap = self._lap_step if row < self._row else self._lap_step - len(self._rows) // self._width
        duration_ns, *phases_ns = self._rows[row : row + self._width]
        return TimedStep(lap + row // self._width, duration_ns, tuple(phases_ns))

    def columns(self, count: int) -> list[list[int]]:
        """Return the durations of the last ``count`` steps, and the times of each phase; 0 if not timed."""
        begin = self._row - count * self._width
        rows = self._rows[begin : self._row] if begin >= 0 else self._rows[begin:] + self._rows[: self._row]
        return [rows[column :: self._width] for column in range(self._width)]

    def last_steps(self, count: int | None = None) -> list[TimedStep]:
        """Return the timed steps out of the last ``count``, or out of all in the ring, in order."""
        before = range(self._last_row + self._width, len(self._rows), self._width)
        since = range(0, self._row, self._width)
        if count:
            before = before[len(since) - count :] if count > len(since) else before[:0]
            since = since[-count:]
        last = [self.times_at(row) for row in (*before, *since)]
        return [times for times in last if times.duration_ns]
