"""`Profile`: the object that a training loop steps; it starts, follows the schedule, pauses and stops."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from .. import log, stderr
from ..compat import profilers
from ..config import settings
from ..cuda_graphs import GraphFollower, cuda_graphs
from ..errors import CaptureError
from ..exporters.capture import Exporter
from ..guard import exiting, guard, uncaught_error
from ..interrupts import is_interrupt
from ..slow_steps.box import BlackBox
from ..stepping.program_steps import program_steps
from .agreement import Agreement
from .forgotten_step import ForgottenStep
from .loop_end import first_line, loop_ended
from .outcomes import Outcomes
from .phase import Phase, check_name
from .rank import job_without_nccl, rank
from .rank_selection import chosen_ranks
from .recording import Recording
from .requests import RequestedWindows, WindowRequest
from .schedule import NEVER, Schedule, Window, integer
from .slow_step_windows import SlowStepWindows
from .torch_api import TorchProfilerApi
from .triggers import Triggers
from .window_recorder import FEATURE, WindowRecorder

_USER_NAMES = frozenset({"black_box", "out", "phase", "start", "step", "step_num", "stop", "trigger", "windows"})


class Profile(WindowRecorder):
    """The profiler of a training loop, as `profile` returns it.

    It is a context manager, and has the methods of `torch.profiler.profile` that loops call: ``step``, ``start``,
    ``stop``, ``export_chrome_trace``, ``key_averages``, ...

    Args:
        out: the folder that everything is written to.
        schedule: the windows to record.
        exporter: makes the captures.
        outcomes: gets the outcome of each window.
        triggers: request further windows while the profile runs.
        slow_step_window: how many steps to record after a slow step; 0 for none.
        on_trace_ready: called at the end of each window, with this object.
        first_step: the number of the first step.
        has_schedule: whether there is a schedule. Without one only the steps that `step` announces are marked.
        preemptible: the profile stops when another one starts, and does not start while another one runs.
        keeps_events: whether the events of the last window stay in memory for calls after the loop.
        compile_log: whether torch's log of what is compiled in a window is written beside its trace.
        marks_steps: whether the program marks the steps of its training with it.

    Attributes:
        out: the folder that everything is written to.
        step_num: the number of the current step.
        new_phase: makes the profile of a phase, given its name and its schedule.
    """

    _running: ClassVar[weakref.WeakSet[Profile]] = weakref.WeakSet()
    start_callbacks: ClassVar[list[Callable[[], None]]] = []  # called when a profile starts
    idle_callbacks: ClassVar[list[Callable[[], None]]] = []  # called when no profile has an open or future window
    _agreement: Agreement | None = None  # with the other ranks, while a profile with triggers runs in a job
    new_phase: Callable[[str, Schedule | str | None], Profile]
    _phases: dict[str, Profile] = {}  # noqa: RUF012  # each profile that is made has its own
    _initialized = False  # a profile with wrong arguments only counts steps

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def __init__(
        self,
        out: Path,
        schedule: RequestedWindows,
        exporter: Exporter,
        outcomes: Outcomes,
        triggers: Triggers,
        slow_step_window: int,
        *,
        on_trace_ready: Callable[[Profile], Any] | None,
        first_step: int,
        has_schedule: bool,
        preemptible: bool,
        keeps_events: bool,
        compile_log: bool,
        marks_steps: bool,
    ) -> None:
        super().__init__(
            out,
            schedule,
            exporter,
            outcomes,
            on_trace_ready=on_trace_ready,
            first_step=first_step,
            has_schedule=has_schedule,
            keeps_events=keeps_events,
            compile_log=compile_log,
        )
        self._preemptible = preemptible
        self._marks_steps = marks_steps
        self._phases = {}
        self._triggers = triggers
        schedule.open_ended = bool(triggers) or slow_step_window > 0
        self._slow_steps = SlowStepWindows(self.request, slow_step_window) if slow_step_window else None
        self._no_more_windows = False  # every window has begun
        if os.environ.get("KINETO_USE_DAEMON"):
            self.step = self._step_for_daemon  # type: ignore[method-assign]  # without a daemon `step` costs nothing
        self._plain_step = self.step
        self._end_was_interrupted = False  # an interrupt cut off a part of the end
        # After the end, the windows that were not reached
        self._windows_to_account_for: list[Window] | None = None
        self._paused = False
        self._forgotten_step = ForgottenStep()
        self._graphs: GraphFollower | None = None  # detects captures of CUDA graphs while the profile runs
        self._process = 0
        self._initialized = True

    def __dir__(self) -> list[str]:
        """List the names for users, without the library's own interface."""
        return sorted(_USER_NAMES | {name for name in vars(TorchProfilerApi) if not name.startswith("_")})

    def __repr__(self) -> str:
        return f"<instrument.profile of {str(self.out)!r}, at step {self.step_num}>"

    @property
    def finished(self) -> bool:
        """Whether no window is open or to come."""
        if self._schedule.open_ended and self._started:
            return False
        return self._next_due_step == NEVER or (self._no_more_windows and self._recording is None)

    @property
    def window_near(self) -> bool:
        """Whether a window is open, opens or ends within two steps."""
        return self._next_due_step - self.step_num <= 2

    def step(self, global_step: int | None = None) -> None:
        """Count a step: the current one ends, the next one begins.

        Costs two comparisons unless a window is open or due.

        Args:
            global_step: the number of the step that begins, which is the number of steps done so far: the
                ``state.global_step`` of a Trainer after an update; ``step + 1`` in ``for step in range(...)``. It
                may be any step, as after a checkpoint was loaded. None is the next number.

        Raises:
            TypeError, ValueError: ``global_step`` is not an integer >= 0.
        """
        if global_step is not None and global_step != self.step_num + 1:
            self._request_change(self._go_to, integer("global_step", global_step))
            return
        try:
            self.step_num += 1
            if self.step_num >= self._next_due_step:
                cuda_graphs.end_stale_captures()
                self._changes.make(self._advance)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise

    def _step_for_daemon(self, global_step: int | None = None) -> None:
        """Count a step in Kineto too, whose daemon can record a number of iterations."""
        Profile.step(self, global_step)
        with guard.contained("counting a step in Kineto"):
            profilers.kineto_step(job_without_nccl())

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: nullcontext())
    def phase(self, name: str, schedule: Schedule | str | None = None) -> AbstractContextManager[None]:
        """Return a context manager for a part of the program that is no training step, such as an evaluation.

        Calls of `step` in its block do not count. Each block is one step of a profile of its own, counted from 0,
        whose windows are called ``window-eval-0001``. Such a window is skipped while one of the training is open.

        Args:
            name: the name of the phase: "eval". It is a region, too.
            schedule: the blocks to record, as `instrument.schedule` takes steps: "0" is the first one. The
                schedule of the first call with this ``name`` applies. None records none.

        Raises:
            TypeError, ValueError: an argument is not accepted; the message gives its name and value.
        """
        check_name(name)
        if not self._initialized:
            return nullcontext()
        if name not in self._phases:
            self._phases[name] = self.new_phase(name, schedule)
        return Phase(name, self, self._phases[name])

    def suspend_steps(self) -> None:
        """Leave out calls of `step` until `resume_steps`."""
        self.step = _nothing  # type: ignore[method-assign]
        if self._slow_steps is not None:
            self._slow_steps.box.pause()

    def resume_steps(self) -> None:
        """Count calls of `step` again."""
        self._choose_step()
        if self._slow_steps is not None and self._recording is None:
            self._slow_steps.box.resume()

    def _choose_step(self) -> None:
        """Have `step` end a step in the black box too, while it runs."""
        step = self._plain_step
        if self._slow_steps is not None and self._started:
            step = self._slow_steps.followed_by(step)
        self.step = step  # type: ignore[method-assign]

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def trigger(
        self,
        reason: str = "requested by the program",
        *,
        steps: int = 3,
        warmup: int = 1,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Request a window that opens at the next step; may be called on any thread and in a signal handler.

        If a window is open then, the requested one follows it. If a window of the schedule is about to begin, that
        one serves the request too. The manifest has the reason in ``opened_by``.

        Args:
            reason: who requests the window, for the manifest.
            steps: the number of recorded steps.
            warmup: the number of warm-up steps before them.
            ranks: the ranks that record it; None for those of the profile.

        Raises:
            TypeError, ValueError: an argument is not accepted; the message gives its name and value.
        """
        if not isinstance(reason, str):
            raise TypeError(f'"reason" must be a text: {reason!r}')
        active, warmup = integer("steps", steps, least=1), integer("warmup", warmup)
        self.request(WindowRequest(reason, active, warmup, ranks=chosen_ranks(ranks)))

    def request(self, request: WindowRequest) -> None:
        """Have a window opened as `trigger` does; with `triggers` in a job, at the same step on all ranks."""
        agreement = self._agreement
        if agreement is not None and agreement.active:
            agreement.propose(request)
        elif self._initialized:
            self._add_request(request)

    def _add_request(self, request: WindowRequest) -> None:
        self._requests.append(request)
        # In this order: `_advance` looks for requests after it has set the step.
        if self._started and not self._paused:
            self._next_due_step = 0

    @guard.contained(FEATURE)
    def start(self, *, late: bool = False) -> None:
        """Begin with step `step_num`, also after `stop` or `pause`.

        Args:
            late: the first step began earlier, at an unknown time.
        """
        if self._initialized:
            self._changes.make(functools.partial(self._start, late))

    def _start(self, late: bool) -> None:
        try:
            self._begin(late)
        except BaseException as error:
            if is_interrupt(error):
                self._end(False)
            raise

    def _begin(self, late: bool) -> None:
        self._finalizer.stderr = (stderr.at_start() if self._preemptible else None) or sys.stderr
        if self._paused:
            self._paused = False
            self._follow_schedule()
            self.report_steps()
        if self._started or self._calling_on_trace_ready or not settings.enabled:
            return
        others = [profile for profile in Profile._running if profile is not self]
        if self._preemptible and others:
            return
        for profile in others:
            if profile._preemptible:
                profile.stop()
        self._started, self._end_was_interrupted, self._windows_to_account_for = True, False, None
        Profile._running.add(self)
        self._first = self.step_num
        self._process = os.getpid()
        atexit.register(self._exit)
        self._outcomes.rank = rank()
        if self._marks_steps:
            program_steps.follow(self)
        self._schedule.records_planned = not self._outcomes.excluded
        if self._never_records:
            self.report_steps()
            return
        with guard.contained(FEATURE):
            self._graphs = GraphFollower()
            self._graphs.follow()
        with guard.contained("preparing the exporter"):
            following = self._schedule.next_window(self.step_num)
            # May decrease: a window that the end of a loop cut short is continued.
            self._last_finished_index = self._schedule.last_before(self.step_num)
            if following is not None or self._schedule.open_ended or self._requests:
                self._outcomes.check_folder(warned=self._preemptible)  # by `instrument run`
                self._exporter.prepare()
        self._triggers.begin(self.request, self._state)
        if self._slow_steps is not None:
            with guard.contained("the black box"):
                self._slow_steps.begin(self.step_num)
                self._choose_step()
        if self._schedule.open_ended:
            with guard.contained("agreeing on windows"):
                self._agreement = Agreement.begin(self._add_request, lambda: self.step_num)
        self._times.start(self.step_num, late=late)
        for call in Profile.start_callbacks:
            call()
        self._follow_schedule()
        self.report_steps()
        if self._has_schedule and self._outcomes.stepped_by_hand:
            self._forgotten_step.follow()
            self._next_due_step = min(self._next_due_step, self.step_num + 1)

    @guard.contained(FEATURE)
    def stop(self) -> None:
        """Close an open window, wait for its files, account for windows not reached, and print the summary.

        In a signal handler that interrupts the opening or closing of a window, this takes effect only after the
        handler has returned or raised: a handler that calls ``os._exit`` leaves the window without its files.
        """
        self.end(begun=self.step_num > self._first)

    @guard.contained(FEATURE)
    def end(self, *, begun: bool = False, complete: bool = False, error: BaseException | None = None) -> None:
        """Stop as `stop` does, given the progress of the current step.

        Args:
            begun: `step` announced the current step, as after a loop's last iteration; it may never have run.
            complete: the current step ran to its end without a call of `step`, and counts.
            error: what ended the loop, for the manifest; None if it ended otherwise.
        """
        self._request_change(self._end, begun, complete, error)
        self.step_num += complete

    @guard.contained(FEATURE)
    def _end(self, begun: bool, complete: bool = False, error: BaseException | None = None) -> None:
        try:
            mine = self._end_windows(begun, complete, error)
        except BaseException:
            self._end_windows(begun, complete, error)  # the rest, after an interrupt; exit waits for the files
            raise
        for phase in self._phases.values():
            phase.stop()
        if mine:
            self._finish()

    def _end_windows(self, begun: bool, complete: bool, error: BaseException | None) -> bool:
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
            if self._windows_to_account_for is None:
                left = () if self._never_records else self._schedule.after(self._last_finished_index)
                self._windows_to_account_for = list(islice(left, 1000))
            while self._windows_to_account_for:
                self._outcomes.note(self._windows_to_account_for[0], "not reached", self._end_reason)
                del self._windows_to_account_for[0]
        return True

    def _finish(self) -> None:
        with guard.contained("ending"):
            self._outcomes.report()
            self._finalizer.finish()
            if not self._calling_on_trace_ready:  # else on_trace_ready called `stop`
                steps = self.step_num - self._first
                self._outcomes.warn_if_nothing_was_recorded(
                    self._first, steps, self._schedule.planned_count, self._end_reason
                )
        self._notify_idle()
        if not self._calling_on_trace_ready:
            self._end_was_interrupted = False
            atexit.unregister(self._exit)

    @guard.contained(FEATURE)
    def pause(self, *, begun: bool, cut: bool = False, error: BaseException | None = None) -> None:
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
        """
        self._request_change(self._pause, begun, cut, error)

    @guard.contained(FEATURE)
    def _pause(self, begun: bool, cut: bool, error: BaseException | None) -> None:
        recording = self._recording
        if not self._started or self._paused or self._process != os.getpid() or self._calling_on_trace_ready:
            return
        self._paused = True
        self._close_unclosed()
        self._end_reason = loop_ended(self.step_num, begun=begun, error=error)
        empty = recording is not None and (
            recording.steps is None or (begun and recording.steps[0] == self.step_num)
        )
        if recording is not None and empty and recording.on_own_thread():
            self._abandon(recording)
        elif recording is not None:
            self._continued_index = recording.window.index
            try:
                self._close_window(recording, begun=begun, cut=cut)
            finally:
                if self._end_was_interrupted:  # on_trace_ready called `stop`
                    self._end(begun)
        self._times.cancel()
        self._complete_last_window(self.step_num)
        with guard.contained("ending"):
            self._outcomes.report()
            if self._schedule.is_last(self._last_finished_index):
                self._finalizer.finish()

    @classmethod
    def stop_all(cls) -> None:
        """Stop every running profile, as the program is interrupted in its current step."""
        for profile in list(cls._running):
            profile.end()

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
        self._finalizer.finish()
        self._notify_idle()
        self._end_was_interrupted = False
        atexit.unregister(self._exit)

    @classmethod
    def _notify_idle(cls) -> None:
        if cls.idle_callbacks and all(profile.finished for profile in cls._running):
            for call in cls.idle_callbacks:
                call()

    @guard.contained(FEATURE)
    def account_for_earlier(self, before: Profile, reason: str) -> None:
        """Note windows that end before the first step as not reached, unless ``before`` accounted for them."""
        if not self._started or self._outcomes.excluded:
            return
        planned = [window["window"] for window in before.windows if isinstance(window["window"], int)]
        accounted = max(planned, default=0)
        for window in islice(self._schedule.after(accounted), 1000):
            if window.index <= self._last_finished_index:
                self._outcomes.note(window, "not reached", reason)

    def _end_run(self, begun: bool = False, complete: bool = False, error: BaseException | None = None) -> bool:
        """End the run; return False if it had ended and nothing is left to do."""
        started = self._started
        if started:
            if not self._paused:
                self._end_reason = loop_ended(self.step_num, begun=begun, complete=complete, error=error)
            elif error is not None:
                self._end_reason += f"; the program ended with {first_line(error)}"
            if self._postponement_reason:
                self._end_reason += f"; {self._postponement_reason}"
            self._started, self._paused, self._end_was_interrupted, self._next_due_step = False, False, True, NEVER
        elif not self._end_was_interrupted or self._calling_on_trace_ready:
            return False
        if self._graphs is not None:
            with guard.contained(FEATURE):
                self._graphs.remove()
        self._triggers.end()
        self._forgotten_step.remove()
        if self._slow_steps is not None:
            self._slow_steps.box.stop()
            self._choose_step()
        if self._agreement is not None:
            self._agreement.end()
        Profile._running.discard(self)
        return True

    @property
    def black_box(self) -> BlackBox | None:
        """The black box that times the steps, if the profile has one."""
        return None if self._slow_steps is None else self._slow_steps.box

    def _state(self) -> dict[str, Any]:
        """Return what `instrument trigger` prints about this process."""
        return {"process": self._process, "rank": self._outcomes.rank, "step": self.step_num}

    @guard.contained(FEATURE)
    def _exit(self) -> None:
        error = uncaught_error()
        with exiting():
            with guard.contained(FEATURE):
                cuda_graphs.end_stale_captures()
            begun = self.step_num > self._first and error is None
            self._changes.make(functools.partial(self._end, begun, error=error))

    def __enter__(self) -> Profile:
        try:
            self.start()
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        return self

    @guard.contained(FEATURE)
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(begun=error is None and self.step_num > self._first, error=error)

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The outcome of each window so far, as in ``manifest.jsonl``. Between epochs, waits for the files."""
        if not self._initialized:
            return []
        if self._paused and self._process == os.getpid():
            with guard.contained("ending"):
                self._finalizer.finish()
        return self._outcomes.entries

    # The methods below follow the schedule. None raises into the loop.

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
            for window in islice(self._schedule.after(self._last_finished_index), 1000):
                if window.stop <= step and not self._never_records:
                    self._outcomes.note(window, "not reached", reason)
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
                and self._marks_steps
                and not self._calling_on_trace_ready
                and self._process == os.getpid()
            ):
                program_steps.end_step()
        finally:
            self._follow_schedule()
            self.report_steps()
            if self._slow_steps is not None:
                self._slow_steps.box.resume() if self._recording is None else self._slow_steps.box.pause()
            if self._requests and self._started and not self._paused:  # made meanwhile
                self._next_due_step = min(self._next_due_step, self.step_num + 1)

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
            if postponed:
                self._next_due_step = (
                    self.step_num + 1
                )  # `step` calls ``change`` if the end of the capture is not seen
            else:
                change()

    def report_steps(self) -> None:
        """Have the next step reported, if there are listeners for the steps that the program marks."""
        if program_steps.listeners and self._started and self._marks_steps:
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
            phase, window = self._schedule.at(step)
            over = recording is not None and (window is None or window.index != recording.window.index)
            if self._must_postpone(phase, window, over):
                return
            if recording is not None and (over or recording.ended_early):
                self._close_in_loop(recording)
                if self._next_due_step == NEVER:
                    return
            if window is None:
                following = self._schedule.next_window(step)
                self._no_more_windows = following is None and not self._schedule.open_ended
                due = NEVER if following is None else following.warmup
                self._next_due_step = self._times.next_due(step, due)
                if (due == step + 1 and self._schedule.plans_ahead) or not self._times.is_timed(step):
                    self._complete_last_window(step)
                if self._next_due_step == step + 1:
                    self._times.begin(step, recording=False)
                if self._no_more_windows:
                    self._notify_idle()
            elif (
                window.index <= self._last_finished_index and window.index != self._continued_index
            ):  # the rest of a failed window
                if self._schedule.plans_ahead or window.stop < NEVER:
                    self._next_due_step = window.stop
            else:
                self._record_step(phase, window)

    def _close_in_loop(self, recording: Recording) -> None:
        """Close the window, between two steps."""
        try:
            self._close_window(recording)
        finally:
            if self._end_was_interrupted:  # on_trace_ready called `stop`
                self._end(begun=True)


def _nothing(global_step: int | None = None) -> None:
    pass
