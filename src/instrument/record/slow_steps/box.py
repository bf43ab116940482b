"""`black_box` and `BlackBox`: says which steps of a running loop are slow, and in which phase, without a trace."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ...base.config import settings
from ...base.guard import guard
from ...base.run_lengths import SLOW, RunLengths, StepTally
from ...base.units import counted, duration, integer
from ..regions.dispatch import active
from .judging import OTHER, PHASES, Alarms, Periods, PhaseTime, SlowStep, UsualStep
from .step_clock import BLOCK, StepClock, TimedStep
from .step_numbers import OnSteps, chosen_functions
from .step_reports import NOBODY, Reported, StepReports

FEATURE = "the black box"
_MAX_SLOW_STEPS = 1000
_WORST = 10  # slow steps that are kept to the end
_HELD, _HELD_NS = 4, 100_000_000  # times the limit, and more than usual: a recorded step from which it is slow
_RECENT_STEPS = 3 * BLOCK  # out of which the usual step is taken


class BlackBox:
    """Times the steps of a loop from `start` to `stop`; made by `black_box`.

    Attributes:
        slow_steps: the last slow steps, up to 1,000, without those that recur.
        worst: the ten slow steps of the whole run with the largest delays, the largest first.
        usual: what a usual step takes.
        clock: has the times of the last steps.
        reports: calls the functions of ``on_steps``.
        end_step: ends the current step, as `step` does, but returns an alarm instead of calling ``on_slow``; also
            the slow step at which a period becomes known, which raises no alarm.
    """

    def __init__(
        self,
        steps: int = 1000,
        *,
        slow: float = 1.5,
        cooldown: int = 200,
        cap: int = 10,
        phases: Sequence[str] = (),
        first_step: int = 0,
        on_slow: Callable[[SlowStep], Any] | None = None,
        reported: Reported = NOBODY,
    ) -> None:
        steps = max(steps, *(each.steps for each in reported.functions), BLOCK)
        self.clock = StepClock(steps, list(dict.fromkeys((*PHASES, *phases))), first_step, self._review)
        self.end_step = self.clock.end_step
        self.slow_steps: deque[SlowStep] = deque(maxlen=_MAX_SLOW_STEPS)
        self.worst: list[SlowStep] = []
        self.usual = UsualStep(slow)
        self.reports = StepReports(reported, self.clock, self.slow_steps)
        self._alarms = Alarms(cooldown, cap)
        self._on_slow = on_slow
        self._periods = Periods()
        self._periodic: dict[int, SlowStep] = {}  # the last one of each period
        self._tally = StepTally()
        self._start, self._start_ns = first_step, 0  # the first step belongs to the start
        self._usual_times: TimedStep | None = None  # made when a slow step needs it, for one block
        self._follower: Any = None  # ends the steps until `step` is called
        self._end = self.end_step  # what `step` calls, so that it need not look for a follower
        self._running = False
        self.clock.pause()

    def __repr__(self) -> str:
        return f"<instrument.black_box at step {self.step_num}, {len(self.slow_steps)} slow>"

    @guard.contained(FEATURE)
    def start(self, *, follow: bool = False) -> None:
        """Begin the first step, or go on after `stop`.

        Args:
            follow: end steps where the program shows that they end, until `step` is called: where a profile,
                `instrument.steps` or an adapter counts one, else after each step of the first optimizer.
        """
        if self._running or not settings.enabled:
            return
        self._running = True
        active.add(self.clock, detailed=False)
        self.reports.begin(self.step_num)
        self.clock.resume()
        if self.step_num == self._start:
            self.clock.left_out_ns = 0  # before the first step
        if follow and "torch" in sys.modules:
            from ..stepping.follower import StepFollower  # which imports torch

            self._follower = StepFollower(self._end_followed_step, self._restart)
            self._end = self._end_first_own_step
            self._follower.follow()

    @guard.contained(FEATURE)
    def stop(self) -> None:
        """Stop the clock and ignore further regions; the results stay. The steps not yet reported are."""
        if self._running:
            self.halt()
            self.reports.end()

    def halt(self) -> None:
        """Stop as `stop` does, but leave the end of the reports to the caller."""
        self._running = False
        active.remove(self.clock)
        self.clock.pause()
        self._stop_following()

    def step(self) -> None:
        """End the current step and begin the next one."""
        try:
            end_step = self._end  # 10 ns faster than to call the attribute
            slow = end_step()
            if slow is not None:
                self._call_on_slow(slow)
        except Exception as error:
            guard.failed(FEATURE, error)

    def pause(self) -> None:
        """Stop the clock, as before an evaluation that no step should contain.

        Steps that end meanwhile are counted, but have no time.
        """
        self.clock.pause()

    def hold(self) -> None:
        """Stop the clock while steps are recorded, which makes them longer.

        Only a step with a delay that recording does not explain is then slow. Its phases are not known.
        """
        self.clock.hold()

    def resume(self) -> None:
        """Let the clock run again."""
        if self._running:
            self.clock.resume()

    def go_to(self, step: int) -> None:
        """Go on with number ``step``: the times before it are forgotten, what a usual step takes is not."""
        rest = self.clock.block_steps
        is_first = self.step_num == self._start
        self._add_up(self._tally, self.clock.last_steps(rest) if rest else ())
        self.reports.report(rest=True)
        self.clock.first_step = step
        self.clock.begin_ring()
        self.reports.begin(step, not_summed=step if is_first else -1)
        self.clock.leave_out()
        self._periods, self._usual_times = Periods(), None
        self._alarms.forget_steps()

    @property
    def alarms(self) -> int:
        """The number of alarms given."""
        return self._alarms.count

    @property
    def step_num(self) -> int:
        """The number of the current step."""
        return self.clock.step_num

    @property
    def periodic(self) -> dict[int, SlowStep]:
        """The last slow step of each period, by the number of steps from one to the next."""
        periods = self._periods.known
        return {every: slow for every, slow in self._periodic.items() if every in periods}

    def __enter__(self) -> BlackBox:
        self.start()
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.stop()

    def report(self) -> str:
        """Return in words what a usual step takes, where the time is, and which steps were slow in which phase."""
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
        yield from islice(self._lengths().sentences(), 1)
        if len(self.slow_steps) > len(self.worst):
            yield f"The {len(self.worst)} worst:"
        yield from (f"  {slow}" for slow in sorted(self.worst, key=lambda slow: slow.step))
        for every, slow in sorted(self.periodic.items()):
            yield f"  one step in {every} is like this, and gives no alarm: {slow}"
        if self.usual.shifts:
            yield f"  the usual time changed at once {counted(self.usual.shifts, 'time')}"

    def _lengths(self) -> RunLengths:
        """Return where the time is of the steps so far."""
        tally, rest = self._tally.copy(), self.clock.block_steps
        self._add_up(tally, self.clock.last_steps(rest) if rest else ())
        return RunLengths.of(tally, StepTally(), start_ns=self._start_ns, phases_ns=self.clock.left_out_ns)

    def _add_up(self, tally: StepTally, steps: Iterable[TimedStep]) -> None:
        for times in steps:
            if times.step != self._start:
                tally.count(times.step, [times.duration_ns], SLOW * self.usual.usual_ns)

    def _add_up_block(self, durations_ns: Sequence[int]) -> None:
        """Add up the steps of a block that has ended."""
        first = self.clock.step_num - BLOCK
        if len(durations_ns) == BLOCK and first != self._start:
            self._tally.count(first, durations_ns, SLOW * self.usual.usual_ns)
            return
        steps = self.clock.last_steps(BLOCK)
        self._start_ns += sum(times.duration_ns for times in steps if times.step == self._start)
        self._add_up(self._tally, steps)

    def _as_dict(self) -> dict[str, Any]:
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
            "slow_steps": [slow.as_dict() for slow in self.slow_steps.copy()],
            "periodic": [slow.as_dict() for slow in self.periodic.values()],
            "worst": [slow.as_dict() for slow in self.worst],
            "last_steps": {
                "step": [times.step for times in last],
                "duration_ns": [times.duration_ns for times in last],
                "phases_ns": {name: list(column) for name, column in phases if any(column)},
            },
        }

    def to_json(self) -> str:
        """Return the results as JSON text.

        ``step`` is the number of the current step. ``usual_ns``, ``limit_ns`` and ``noise`` say what a usual step
        takes now, and from which time one is slow; ``shifts`` is how often that changed at once. ``slow_steps``
        and ``periodic`` are slow steps, with the keys of `SlowStep.as_dict`, and so are the ``worst`` ones, the
        worst first; ``alarms`` is the number of alarms.
        ``last_steps`` has the numbers, the durations and the phases of the steps in the ring, in columns.
        """
        return json.dumps(self._as_dict(), indent=2, allow_nan=False)

    @guard.contained(FEATURE)
    def _end_followed_step(self) -> None:
        slow = self.end_step()
        if slow is not None:
            self._call_on_slow(slow)

    def _call_on_slow(self, slow: SlowStep) -> None:
        if self._on_slow is not None and not slow.period:
            with guard.contained("on_slow of the black box"):
                self._on_slow(slow)
            self.clock.leave_out()

    def _end_first_own_step(self) -> SlowStep | None:
        """End a step for the first call of `step`, which ends the steps from here on."""
        self._stop_following()
        self._restart()
        return self.end_step()

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.remove()
            self._follower = None
            self._end = self.end_step

    def _restart(self) -> None:
        """Count everything so far to the first step: it is now known what a step is."""
        self.clock.begin_ring()
        self._tally, self._start_ns, self.clock.left_out_ns = StepTally(), 0, 0
        self.usual = UsualStep(self.usual.slow)
        self.reports.begin(self.step_num, not_summed=self.step_num)
        self._periods = Periods()
        self.slow_steps.clear()
        self.worst.clear()
        self._periodic.clear()

    def _review(self, row: int, duration_ns: int) -> SlowStep | None:
        """Decide on a step that is longer than the limit or ends a block."""
        slow = self._judge(self.clock.times_at(row)) if duration_ns > self.clock.limit_ns else None
        if self.clock.ends_block(row):
            durations = self.clock.block_ns()
            if len(durations) == BLOCK:
                self.usual.add_block(durations)
                self.clock.limit_ns = self.usual.limit_ns
                self._usual_times = None
            self._add_up_block(durations)
        if self.step_num >= self.reports.due_step:
            self.reports.report()
        return slow

    def _judge(self, times: TimedStep) -> SlowStep | None:
        """Note a slow step; return it if an alarm is due, or a period is learned."""
        if not times.duration_ns:  # the clock was paused
            return self._judge_held(times.step)
        if self._usual_times is None:
            recent = self.clock.last_steps(_RECENT_STEPS)
            self._usual_times = sorted(recent, key=lambda step: step.duration_ns)[(len(recent) - 1) // 2]
        usual = self._usual_times
        slow = SlowStep(
            times.step,
            times.duration_ns,
            usual.duration_ns,
            self.usual.score(times.duration_ns),
            self._phase_times(times, usual),
            self._periods.period_of(times.step, times.duration_ns),
        )
        if slow.period:
            is_new = slow.period not in self._periodic
            self._periodic[slow.period] = slow
            return slow if is_new else None
        return self._note(slow)

    def _judge_held(self, step: int) -> SlowStep | None:
        took_ns, usual_ns, self.clock.held_ns = self.clock.held_ns, self.usual.usual_ns, 0
        if took_ns <= max(_HELD * self.clock.limit_ns, usual_ns + _HELD_NS):
            return None
        phases = {OTHER: PhaseTime(took_ns, usual_ns)}
        return self._note(SlowStep(step, took_ns, usual_ns, self.usual.score(took_ns), phases))

    def _note(self, slow: SlowStep) -> SlowStep | None:
        self.slow_steps.append(slow)
        self.worst = sorted([*self.worst, slow], key=lambda each: -each.delta_ns)[:_WORST]
        return slow if self._alarms.is_due(slow.step, slow.delta_ns, self.clock.now()) else None

    def _phase_times(self, times: TimedStep, usual: TimedStep) -> dict[str, PhaseTime]:
        pairs = dict(zip(self.clock.phases, map(PhaseTime, times.phases_ns, usual.phases_ns), strict=True))
        phases = {phase: pair for phase, pair in pairs.items() if pair.ns or pair.usual_ns}
        phases[OTHER] = PhaseTime(
            times.duration_ns - sum(times.phases_ns), usual.duration_ns - sum(usual.phases_ns)
        )
        return dict(sorted(phases.items(), key=lambda item: -item[1].delta_ns))


def _inactive(*_: Any, **__: Any) -> BlackBox:
    return BlackBox()  # never started


@guard.prepared(FEATURE, otherwise=_inactive)
def black_box(
    steps: int = 1000,
    *,
    slow: float = 1.5,
    cooldown: int = 200,
    cap: int = 10,
    phases: Iterable[str] = (),
    first_step: int = 0,
    on_slow: Callable[[SlowStep], Any] | None = None,
    on_steps: OnSteps = None,
) -> BlackBox:
    """Time the steps of a loop and their phases all the time; find slow steps, without a trace.

    A step ends where ``.step()`` of the returned box is called; without such calls, where a profile,
    `instrument.steps` or an adapter counts one, else after each step of the first optimizer. The phases are the
    regions called data, forward, backward, optimizer, evaluation or checkpoint, of `annotate`, `annotate_step`
    and the adapters. Without regions only the length of each step is known. The box runs until ``stop()``, or the
    end of its ``with`` block. Of several boxes each times for itself.

    A step is slow if it takes ``slow`` times as long as a usual step, and is more than 3.5 times the noise of the
    loop above it. The first 32 steps show what is usual.

    Args:
        steps: how many steps to keep.
        slow: the ratio to the usual time from which a step can be slow.
        cooldown: how many steps after an alarm no other is given, unless the step's delay is one and a half times
            that of the worst alarm in these.
        cap: the most alarms that are given in an hour, with the same exception.
        phases: further names of regions that are phases.
        first_step: the number of the first step.
        on_slow: called at each alarm, on the loop's thread, with the `SlowStep`.
        on_steps: a function that is called every 100 steps, on the loop's thread, with their `StepNumbers`; the
            result of `instrument.every`; or several of these.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> with black_box() as box:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         box.step()
        >>> print(box.report())
    """
    steps, cooldown = integer("steps", steps, BLOCK), integer("cooldown", cooldown)
    cap, first_step = integer("cap", cap), integer("first_step", first_step)
    if isinstance(slow, bool) or not isinstance(slow, (int, float)):
        raise TypeError(f'"slow" must be a number > 1: {slow!r}')
    if not 1 < slow < float("inf"):
        raise ValueError(f'"slow" must be a number > 1: {slow!r}')
    if isinstance(phases, str) or not isinstance(phases, Iterable):
        raise TypeError(f'"phases" must be several names of regions: {phases!r}')
    names = tuple(phases)
    if not all(isinstance(phase, str) and phase != OTHER for phase in names):
        raise ValueError(f'"phases" must be names of regions other than "{OTHER}": {phases!r}')
    if on_slow is not None and not callable(on_slow):
        raise TypeError(f'"on_slow" must be a function: {on_slow!r}')
    reported = Reported(chosen_functions(on_steps) or ())
    box = BlackBox(
        steps, slow=slow, cooldown=cooldown, cap=cap, phases=names, first_step=first_step, on_slow=on_slow,
        reported=reported,
    )  # fmt: skip
    box.start(follow=True)
    return box
