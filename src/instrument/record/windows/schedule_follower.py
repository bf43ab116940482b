"""`ScheduleFollower`: counts the steps of a loop, opens and ends windows; notices a loop without steps."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from itertools import takewhile
from typing import Any

from ...base import log
from ...base.compat import profilers
from ...base.guard import guard
from ...base.units import integer
from ..cuda_graphs import cuda_graphs
from ..planning.ranks import job_without_nccl
from ..planning.schedule import NEVER
from ..regions import dispatch
from ..stepping.explicit_steps import program_steps
from .recording import Recording
from .run_ender import RunEnder
from .window_recorder import FEATURE


class ScheduleFollower(RunEnder):
    """The part of a profile that follows the loop; no error reaches the loop but wrong arguments of `step`."""

    _threads_in_phase: list[int] = []  # noqa: RUF012  # stays empty: each profile gets its own
    _forgotten_step: ForgottenStep

    @property
    def window_near(self) -> bool:
        """Whether a window is open, opens or ends within two steps."""
        return self._next_due_step - self.step_num <= 2

    def step(self, global_step: int | None = None) -> None:
        """Count a step: the current one ends, the next one begins.

        Costs three comparisons unless a window is open or due. Does nothing in a `Profile.phase` of this thread.

        Args:
            global_step: the number of the step that begins, which is the number of steps done so far: the
                ``state.global_step`` of a Trainer after an update; ``step + 1`` in ``for step in range(...)``. It
                may be any step, as after a checkpoint was loaded. None is the next number.

        Raises:
            TypeError, ValueError: ``global_step`` is not an integer >= 0.
        """
        try:
            if self._threads_in_phase and threading.get_ident() in self._threads_in_phase:
                return
            if global_step is None or global_step == self.step_num + 1:
                self.step_num += 1
                if self.step_num >= self._next_due_step:
                    cuda_graphs.end_stale_captures()
                    self._changes.make(self._advance)
                return
        except Exception as error:
            guard.failed(FEATURE, error)
        else:
            self._request_change(self._go_to, integer("global_step", global_step))

    def _step_for_daemon(self, global_step: int | None = None) -> None:
        """Count a step in Kineto too, whose daemon can record a number of iterations."""
        ScheduleFollower.step(self, global_step)
        with guard.contained("counting a step in Kineto"):
            profilers.kineto_step(job_without_nccl())

    @guard.contained(FEATURE)
    def _go_to(self, step: int) -> None:
        """End the current step, and an open window; go on with ``step``, which is not the next one."""
        reached, reason = self.step_num + 1, f"the loop went from step {self.step_num} to step {step}"
        if step == self.step_num:
            log.warning(f"step {step} is counted again, as global_step is the number of the step that begins")
        self.step_num = reached
        if self._started and not (self._paused or self._calling_on_trace_ready) and self._process == os.getpid():
            cuda_graphs.end_stale_captures()
            self._end_reason = reason
            if self._recording is not None and self._recording.on_own_thread():
                self._close_in_loop(self._recording)
            self._times.end()
            self._complete_last_window(reached)
        self.step_num = step
        self._first += step - reached
        self._times.renumber(step - reached)
        if self._started:
            if self._recording is None:
                self._pass_windows(step, reached, reason)
            if self._slow_steps is not None:
                self._slow_steps.box.go_to(step)
            self._advance()

    def _pass_windows(self, step: int, reached: int, reason: str) -> None:
        """Note the windows from step ``reached`` to ``step`` as not reached, or plan those in between again."""
        if step > reached:
            passed = takewhile(lambda window: window.stop <= step, self._schedule.after(self._last_finished_index))
            if not self._never_records:
                self._outcomes.note_not_reached(passed, reason)
        self._schedule.go_to(step, reached)
        self._last_finished_index, self._continued_index = self._schedule.last_before(step), 0
        following = self._schedule.next_window(step)
        if following is not None and following.active < step and following.stop < NEVER:
            self._postponement_reason = reason

    def _advance(self) -> None:
        """Report the end of a step, and make the changes that are due at the next one."""
        self._forgotten_step.remove()
        try:
            if (
                self._started
                and self._driver.marks_steps
                and not self._calling_on_trace_ready
                and self._process == os.getpid()
            ):
                program_steps.end_step()
        finally:
            self._follow_schedule()
            self.report_steps()
            self._time_slow_steps()
            if self._requests and self._started and not self._paused:  # made meanwhile
                self._next_due_step = min(self._next_due_step, self.step_num + 1)

    def _time_slow_steps(self) -> None:
        """Have the black box time the current step, unless it is recorded."""
        if self._slow_steps is not None:
            self._slow_steps.box.resume() if self._recording is None else self._slow_steps.box.hold()

    def report_steps(self) -> None:
        """Have the next step reported, if there are listeners for the steps that the program marks."""
        if program_steps.listeners and self._started and self._driver.marks_steps:
            self._next_due_step = min(self._next_due_step, self.step_num + 1)

    def _follow_schedule(self) -> None:
        """Make the changes that are due at this step, and set the next step at which one is due."""
        step, recording = self.step_num, self._recording
        self._times.cancel() if recording is not None and recording.ended_early else self._times.end()
        if self._paused:
            return
        if self._never_records or self._process != os.getpid():
            self._next_due_step = NEVER
            return
        if self._calling_on_trace_ready:  # on_trace_ready calls `step`, which only counts
            return
        self._close_unclosed()
        if not self._started:
            self._next_due_step = NEVER if self._unclosed_recording is None else step + 1
            return
        self._next_due_step = step + 1
        with guard.contained("following the schedule"):
            if recording is not None and not recording.on_own_thread():
                recording.note_foreign_step(self._schedule.label(recording.window))
                return
            self._add_requested(step)
            action, window = self._schedule.at(step)
            over = recording is not None and (window is None or window.index != recording.window.index)
            if self._must_postpone(action, window, over):
                return
            if recording is not None and (over or recording.ended_early):
                self._close_in_loop(recording)
                if self._next_due_step == NEVER:
                    return
            if window is None:
                self._wait_for_window(step)
            elif window.index > self._last_finished_index or window.index == self._continued_index:
                self._record_step(action, window)
            elif self._schedule.plans_ahead or window.stop < NEVER:  # the rest of a failed window
                self._next_due_step = window.stop

    def _wait_for_window(self, step: int) -> None:
        """Set the next step at which something is due; no window is open at ``step``."""
        following = self._schedule.next_window(step)
        self._no_more_windows = following is None and not self._schedule.open_ended
        due = NEVER if following is None else following.warmup
        self._next_due_step = self._times.next_due(step, due)
        if (due == step + 1 and self._schedule.plans_ahead) or not self._times.is_timed(step):
            self._complete_last_window(step)
        if self._next_due_step == step + 1 and not self._finalizer.is_working:  # else the step may be longer
            self._times.begin(step, recording=False)
        if self._no_more_windows:
            self._notify_idle()

    def _close_in_loop(self, recording: Recording) -> None:
        """Close the window, between two steps."""
        try:
            self._close_window(recording)
        finally:
            if self._end_was_interrupted:  # on_trace_ready called `stop`
                self._end(begun=True)


_FORGOTTEN_FEATURE = "noticing a forgotten step()"
_MANY_UPDATES = 100


class ForgottenStep:
    """Logs one line if the first optimizer makes 100 updates from `follow` to `remove`, which comes with a step.

    Only the first one counts: one update of a loop may be that of many optimizers.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._first: weakref.ref[Any] | None = None
        self._updates = 0

    @guard.contained(_FORGOTTEN_FEATURE)
    def follow(self) -> None:
        """Begin to count updates, if the program has imported torch."""
        if self._handle is None and "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._first, self._updates = None, 0
            self._handle = register_optimizer_step_post_hook(self._after_update)

    @guard.contained(_FORGOTTEN_FEATURE)
    def remove(self) -> None:
        """Stop counting."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        try:
            if self._updates < _MANY_UPDATES and not dispatch.tracing():
                if self._first is None or self._first() is None:
                    self._first = weakref.ref(optimizer)
                self._updates += self._first() is optimizer
                if self._updates == _MANY_UPDATES:
                    log.warning(
                        f"step() was not called in {_MANY_UPDATES} updates of the optimizer, so no window opens"
                        " or ends: call prof.step() after each update"
                    )
        except Exception as error:
            guard.failed(_FORGOTTEN_FEATURE, error)
