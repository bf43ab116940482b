"""`BlackBox`: times a running loop, and decides which of its steps are slow and which give an alarm."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..config import settings
from ..guard import guard
from ..regions.dispatch import active
from .alarms import Alarms
from .periods import Periods
from .phases import OTHER, PHASES
from .results import Results
from .slow_step import PhaseTime, SlowStep
from .step_clock import BLOCK, StepClock, StepTimes
from .usual_step import UsualStep

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
        end_step: ends the current step, as `step` does, but returns an alarm instead of calling ``on_slow``.
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
    ) -> None:
        self.clock = StepClock(steps, list(dict.fromkeys((*PHASES, *phases))), first_step, self._review)
        self.end_step = self.clock.end_step
        self.slow_steps: deque[SlowStep] = deque(maxlen=_MAX_SLOW_STEPS)
        self.worst: list[SlowStep] = []
        self.usual = UsualStep(slow)
        self._alarms = Alarms(cooldown, cap)
        self._on_slow = on_slow
        self._periods = Periods()
        self._periodic: dict[int, SlowStep] = {}  # the last one of each period
        self._usual_times: StepTimes | None = None  # made when a slow step needs it, for one block
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
        self.clock.resume()
        if follow and "torch" in sys.modules:
            from ..stepping.follower import StepFollower  # which imports torch

            self._follower = StepFollower(self._end_followed_step, self._restart)
            self._end = self._end_first_own_step
            self._follower.follow()

    @guard.contained(FEATURE)
    def stop(self) -> None:
        """Stop the clock and ignore further regions; the results stay."""
        if self._running:
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

    @guard.contained(FEATURE)
    def pause(self) -> None:
        """Stop the clock, as before an evaluation that no step should contain.

        Steps that end meanwhile are counted, but have no time.
        """
        self.clock.pause()

    @guard.contained(FEATURE)
    def hold(self) -> None:
        """Stop the clock while steps are recorded, which makes them longer.

        Only a step with a delay that recording does not explain is then slow. Its phases are not known.
        """
        self.clock.hold()

    @guard.contained(FEATURE)
    def resume(self) -> None:
        """Let the clock run again."""
        if self._running:
            self.clock.resume()

    def go_to(self, step: int) -> None:
        """Go on with number ``step``: the times before it are forgotten, what a usual step takes is not."""
        self.clock.first_step = step
        self.clock.begin_ring()
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
        known = self._periods.known
        return {every: slow for every, slow in self._periodic.items() if every in known}

    def __enter__(self) -> BlackBox:
        self.start()
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.stop()

    def report(self) -> str:
        """Return in words what a usual step takes, and which steps were slow, in which phase."""
        return str(self._results())

    def to_json(self) -> str:
        """Return the results as JSON text; see `instrument.slow_steps.results.Results.as_dict` for its keys."""
        return self._results().to_json()

    def _results(self) -> Results:
        return Results(self.clock, self.usual, self.alarms, [*self.slow_steps], self.periodic, [*self.worst])

    @guard.contained(FEATURE)
    def _end_followed_step(self) -> None:
        slow = self.end_step()
        if slow is not None:
            self._call_on_slow(slow)

    def _call_on_slow(self, slow: SlowStep) -> None:
        if self._on_slow is not None:
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
        self.usual = UsualStep(self.usual.slow)
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
        return slow

    def _judge(self, times: StepTimes) -> SlowStep | None:
        """Note a slow step; return it if an alarm is due."""
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
            self._periodic[slow.period] = slow
            return None
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
        return slow if self._alarms.is_due(slow.step, slow.delta_ns, self.clock.now_ns()) else None

    def _phase_times(self, times: StepTimes, usual: StepTimes) -> dict[str, PhaseTime]:
        pairs = dict(zip(self.clock.phases, map(PhaseTime, times.phases_ns, usual.phases_ns), strict=True))
        known = {phase: pair for phase, pair in pairs.items() if pair.ns or pair.usual_ns}
        known[OTHER] = PhaseTime(
            times.duration_ns - sum(times.phases_ns), usual.duration_ns - sum(usual.phases_ns)
        )
        return dict(sorted(known.items(), key=lambda item: -item[1].delta_ns))
