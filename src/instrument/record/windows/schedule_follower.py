"""`ScheduleFollower`: counts the steps of a loop, opens and ends windows; notices a loop without steps."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from time import perf_counter_ns
from typing import Any, ClassVar

from ...base import log
from ...base.compat import profilers
from ...base.errors import CaptureError
from ...base.guard import exiting, guard, uncaught_error
from ...base.job import job_without_nccl
from ...base.run_lengths import BLOCK
from ...base.units import integer
from ..cuda_graphs import cuda_graphs
from ..planning.schedule import NEVER
from ..regions import dispatch
from ..stepping.explicit_steps import program_steps
from .outcomes import first_line, loop_ended
from .recording import Recording
from .window_recorder import FEATURE, WindowRecorder

_MAX_THREADS_WITHOUT_STEP = 3  # a server may start a thread for each request, and opening a window takes time


running_profiles: weakref.WeakSet[ScheduleFollower] = weakref.WeakSet()
"""The profiles that have started and not ended."""


class ScheduleFollower(WindowRecorder):
    """The part of a profile that follows the loop; no error reaches the loop but wrong arguments of `step`."""

    idle_callbacks: ClassVar[list[Callable[[], None]]] = []  # called when no profile has an open or future window
    _phases: Mapping[str, ScheduleFollower] = {}
    _paused = False
    _process = 0  # that began the run
    _no_more_windows = False  # every window has begun
    _ended_without_step = (0, 0)  # a window, and how many threads opened it and ended before a step of it did
    _end_was_interrupted = False  # an interrupt cut off a part of the end
    _threads_in_phase: list[int] = []  # noqa: RUF012  # stays empty: each profile gets its own
    _forgotten_step: ForgottenStep

    @property
    def window_near(self) -> bool:
        """Whether a window is open, opens or ends within two steps."""
        return self._next_due_step - self.step_num <= 2

    def step(self, global_step: int | None = None) -> None:
        """Count a step: the current one ends, the next one begins.

        Costs a few comparisons and a look at the clock unless a window is open or due. Does nothing in a
        `Profile.phase` of this thread.

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
                self.step_num = step = self.step_num + 1
                self._end_timed_step(perf_counter_ns())
                if step >= self._next_due_step:
                    cuda_graphs.end_stale_captures()
                    self._changes.make(self._advance)
                elif step >= self._next_fold_step:
                    self._fold_times()
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
        self._end_timed_step(perf_counter_ns())
        self._fold_times()
        if self._started and not (self._paused or self._calling_on_trace_ready) and self._process == os.getpid():
            cuda_graphs.end_stale_captures()
            self._end_reason = reason
            if self._recording is not None and self._recording.on_own_thread():
                self._close_in_loop(self._recording)
            self._times.end()
            self._complete_last_window(reached)
        self.step_num, self._next_fold_step = step, step + BLOCK
        self._first += step - reached
        self._times.renumber(step - reached)
        if self._started:
            if self._recording is None:
                self._pass_windows(step, reached, reason)
            if self._profile_box is not None:
                self._profile_box.box.go_to(step)
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
        self._fold_times()
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
            self._time_steps()
            if self._requests and self._started and not self._paused:  # made meanwhile
                self._next_due_step = min(self._next_due_step, self.step_num + 1)
            self._run_times.leave_out_since_end()

    def _time_steps(self) -> None:
        """Have the black box time the current step, unless it is recorded."""
        if self._profile_box is not None:
            self._profile_box.box.resume() if self._recording is None else self._profile_box.box.hold()

    def report_rest(self) -> None:
        """Report the steps since the last call of the functions of ``on_steps``."""
        if self._profile_box is not None:
            self._profile_box.box.reports.report(rest=True)

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
        if self._next_due_step == step + 1 and not self._sender.is_working:  # else the step may be longer
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

    @property
    def finished(self) -> bool:
        """Whether no window is open or to come."""
        if self._schedule.open_ended and self._started:
            return False
        return self._next_due_step == NEVER or (self._no_more_windows and self._recording is None)

    def stop(self) -> None:
        """Close an open window, wait for its files, account for windows not reached, and print the summary.

        In a signal handler that interrupts the opening or closing of a window, this takes effect only after the
        handler has returned or raised: a handler that calls ``os._exit`` leaves the window without its files.
        """
        self.end(begun=self.step_num > self._first)

    @guard.contained(FEATURE)
    def end(
        self, *, begun: bool = False, complete: bool = False, error: BaseException | str | None = None
    ) -> None:
        """Stop as `stop` does, given the progress of the current step.

        Args:
            begun: `step` announced the current step, as after a loop's last iteration; it may never have run.
            complete: the current step ran to its end without a call of `step`, and counts.
            error: what ended the loop, an error or words, for the manifest; None if it ended otherwise.
        """
        self._request_change(self._end, begun, complete, error)
        self.step_num += complete

    @guard.contained(FEATURE)
    def _end(self, begun: bool, complete: bool = False, error: BaseException | str | None = None) -> None:
        try:
            mine = self._end_windows(begun, complete, error)
        except BaseException:
            self._end_windows(begun, complete, error)  # the rest, after an interrupt; exit waits for the files
            raise
        for phase in self._phases.values():
            phase.stop()
        if mine:
            self._finish()

    def _end_windows(self, begun: bool, complete: bool, error: BaseException | str | None) -> bool:
        """Close an open window and account for those not reached; return False if this was done."""
        if not self._end_run(begun, complete, error):
            return False
        if self._process != os.getpid():  # a forked child: the windows are its parent's
            return False
        self._close_unclosed()
        recording = self._recording
        if recording is not None and not self._calling_on_trace_ready:
            self._close_window(recording, begun=begun, complete=complete, cut=not (begun or complete))
        self._complete_last_window(self.step_num + complete)
        with guard.contained("ending"):
            self._add_requested(self.step_num + complete)
            if not self._never_records:
                self._outcomes.note_not_reached(self._schedule.after(self._last_finished_index), self._end_reason)
        return True

    def _end_run(
        self, begun: bool = False, complete: bool = False, error: BaseException | str | None = None
    ) -> bool:
        """End the run; return False if it had ended and nothing is left to do."""
        started = self._started
        if started:
            if complete:
                self._end_timed_step(perf_counter_ns())
            self._run_times.pause(self.step_num + complete, recorded=self._is_recorded)
            if not self._paused:
                self._end_reason = loop_ended(self.step_num, begun=begun, complete=complete, error=error)
            elif error is not None:
                ended = "" if isinstance(error, str) else "the program ended with "
                self._end_reason += f"; {ended}{first_line(error)}"
            if self._postponement_reason:
                self._end_reason += f"; {self._postponement_reason}"
            self._started, self._paused, self._end_was_interrupted, self._next_due_step = False, False, True, NEVER
        elif not self._end_was_interrupted or self._calling_on_trace_ready:
            return False
        self._detach()
        running_profiles.discard(self)
        return True

    def _detach(self) -> None:
        """Remove what `Profile.start` attached to the program; may be called again."""
        raise NotImplementedError

    def _finish(self) -> None:
        if self._profile_box is not None:
            self._profile_box.box.reports.end()
        with guard.contained("ending"):
            lengths = self._run_times.lengths(self.step_num)
            self._outcomes.report()
            self._sender.finish()
            self._outcomes.report_lengths(lengths)
            if self._profile_box is not None and self._options.black_box:
                self._outcomes.say(self._profile_box.nothing_slow)
            if not self._calling_on_trace_ready:  # else on_trace_ready called `stop`
                steps = self.step_num - self._first
                self._outcomes.warn_if_nothing_was_recorded(
                    self._first, steps, self._schedule.planned_count, self._end_reason
                )
        self._notify_idle()
        if not self._calling_on_trace_ready:
            self._end_was_interrupted = False
            atexit.unregister(self._exit)

    @classmethod
    def _notify_idle(cls) -> None:
        if cls.idle_callbacks and all(profile.finished for profile in running_profiles):
            for call in cls.idle_callbacks:
                call()

    @classmethod
    def stop_all(cls, reason: str) -> None:
        """Stop every running profile, as the program is interrupted in its current step for ``reason``."""
        for profile in list(running_profiles):
            profile.end(error=reason)

    @guard.contained(FEATURE)
    def _exit(self) -> None:
        error = uncaught_error()
        with exiting():
            with guard.contained(FEATURE):
                cuda_graphs.end_stale_captures()
            begun = self.step_num > self._first and error is None
            with self._waiting_until_interrupted():
                self._changes.make(functools.partial(self._end, begun, error=error))

    @contextmanager
    def _waiting_until_interrupted(self) -> Iterator[None]:
        """Let a Ctrl-C end the wait of the body, where no code of the program would receive it."""
        try:
            yield
        except KeyboardInterrupt:
            self._end_windows(begun=False, complete=False, error=None)
            self._end_was_interrupted = False  # a later call does not wait again
            self._sender.output.print("instrument: not waiting; another process finishes the windows\n")

    @guard.contained(FEATURE)
    def pause(
        self,
        *,
        begun: bool,
        cut: bool = False,
        error: BaseException | None = None,
        wait: bool = True,
        left: bool = False,
    ) -> None:
        """Close an open window at the end of a loop that may continue with `start`.

        `start` continues with the current step and records the rest of the window into a separate trace, or all of
        it if none of its steps has run. torch's profiler does not stay on, as this may be the last loop. `stop`,
        or else the exit of the process, accounts for windows that are not reached. After the last window, `pause`
        waits for the files, which programs read after the loop; while windows may follow, only `windows`, `stop`
        and the exit of the process wait for the files.

        Args:
            begun: as for `end`.
            cut: the current step probably did not end.
            error: as for `end`.
            wait: whether to print a summary, and to wait for the files after the last window.
            left: whether the program left the loop: Python ignores errors of a generator that it closes.
        """
        with self._waiting_until_interrupted() if left else nullcontext():
            self._request_change(self._pause, begun, cut, error, wait)

    @guard.contained(FEATURE)
    def _pause(self, begun: bool, cut: bool, error: BaseException | None, wait: bool) -> None:
        if not self._started or self._paused or self._process != os.getpid() or self._calling_on_trace_ready:
            return
        self._paused = True
        self._run_times.pause(self.step_num, recorded=self._is_recorded)
        self._close_unclosed()
        self._end_reason = loop_ended(self.step_num, begun=begun, error=error)
        if self._recording is not None:
            self._break_window(self._recording, begun=begun, cut=cut)
        self._times.cancel()
        if self._profile_box is not None:
            self._profile_box.box.pause()
            self.report_rest()
        self._complete_last_window(self.step_num)
        if wait:
            with guard.contained("ending"):
                self._outcomes.report()
                if self._schedule.is_last(self._last_finished_index):
                    self._sender.finish()
        self._run_times.leave_out_since_pause()

    def _break_window(self, recording: Recording, *, begun: bool, cut: bool) -> None:
        """Close a window before its end; a later step continues it, or begins it if no step of it has run."""
        empty = recording.steps is None or (begun and recording.steps[0] == self.step_num)
        if empty and recording.on_own_thread():
            self._abandon(recording)
            return
        self._continued_index = recording.window.index
        try:
            self._close_window(recording, begun=begun, cut=cut)
        finally:
            if self._end_was_interrupted:  # on_trace_ready called `stop`
                self._end(begun)

    @guard.contained(FEATURE)
    def _on_thread_end(self, recording: Recording) -> None:
        """Close a window before its thread ends; torch crashes if a thread leaves its profiler on."""
        self._changes.make(functools.partial(self._leave_thread, recording))

    def _leave_thread(self, recording: Recording) -> None:
        self._close_unclosed()
        if self._recording is not recording:
            return
        begun = self.step_num > self._first
        reason = f"the thread of the window ended {'before' if begun else 'in'} step {self.step_num}"
        self._end_reason = reason
        self._break_window(recording, begun=begun, cut=not begun)
        self._times.cancel()
        if recording.save_result is None:  # no step has run
            window, self._postponement_reason = recording.window, reason
            before, threads = self._ended_without_step
            self._ended_without_step = window.index, threads + 1 if window.index == before else 1
            if self._ended_without_step[1] == _MAX_THREADS_WITHOUT_STEP:
                self._fail_window(window, CaptureError(reason))
            else:
                self._missed_windows[window.index] = window

    @guard.contained(FEATURE)
    def abandon(self, reason: str) -> None:
        """End without accounting for windows that are not reached; an open one fails for ``reason``."""
        self._request_change(self._abandon_run, reason)

    @guard.contained(FEATURE)
    def _abandon_run(self, reason: str) -> None:
        left = self._end_run()
        if self._process != os.getpid():  # a forked child: the windows are its parent's
            return
        self._close_unclosed()
        if left and self._recording is not None:
            self._fail_window(self._recording.window, CaptureError(reason))
        self._complete_last_window(self.step_num)
        if self._profile_box is not None:
            self._profile_box.box.reports.end()
        self._sender.finish()
        self._notify_idle()
        self._end_was_interrupted = False
        atexit.unregister(self._exit)

    def _request_change(self, change: Callable[..., None], *args: Any) -> None:
        """Call ``change(*args)`` when no other change is running and no CUDA graph is being captured."""
        self._changes.make(functools.partial(self._after_capture, functools.partial(change, *args)))

    def _after_capture(self, change: Callable[[], None]) -> None:
        """Call ``change`` now or, if a window is open, after this thread's capture of a CUDA graph.

        An interrupt while this waits for another thread's capture does not leave the profiler running.
        """
        postponed = False
        try:
            mine = self._recording is not None and self._process == os.getpid()
            postponed = mine and cuda_graphs.postpone(functools.partial(self._changes.make, change))
        finally:
            if postponed:  # `step` calls ``change`` if the end of the capture is not seen
                self._next_due_step = self.step_num + 1
            else:
                change()


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
