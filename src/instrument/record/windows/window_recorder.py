"""`WindowRecorder`: opens, ends and abandons windows; decides which are skipped or have failed; `ChangeQueue`."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, cast

from ...base import log
from ...base.compat import autograd
from ...base.config import settings
from ...base.disk import refuse_full_disk
from ...base.errors import CaptureError
from ...base.guard import guard
from ...base.interrupts import is_interrupt
from ...base.job import process_suffix
from ...base.process_id import machine, usable_cores
from ...base.run_lengths import BLOCK
from ...base.trace_marks import COMMAND, CORES, MACHINE, OPENED_BY, OWN_WORK
from ..allocator_history.window_memory import WindowMemory, too_early
from ..cuda_graphs import cuda_graphs
from ..exporters.exporter import Exporter
from ..handover.manifest import size_of
from ..planning.profile_box import ProfileBox
from ..planning.requests import SCHEDULE, RequestedWindows, WindowRequest
from ..planning.schedule import NEVER, StepAction, Window
from ..regions import dispatch, region
from .driver import Driver, ProfileOptions
from .outcomes import Outcomes, loop_ended
from .recording import Recording, SaveResult, WindowCompileLog, WindowCost
from .run_times import RunTimes
from .timing import WindowTiming

FEATURE = "recording windows"
_OWN_WORK = region.make(OWN_WORK, None, None, None, None)
_IN_BACKWARD = "step() was called in the backward pass, where torch.profiler cannot start or stop"
_IN_CAPTURE = "step() was called while a CUDA graph was captured, when nothing can start or stop"


class ChangeQueue:
    """Makes the changes of one profile: start or end it, open or close a window.

    CPython calls signal handlers at any point of the main thread. A change requested within another one is made
    when that one has ended, even by an error: a second stop while torch stops a recording crashes the process.
    """

    def __init__(self) -> None:
        self._queued: dict[int, list[Callable[[], None]]] = {}  # by thread: the changes requested within one

    def make(self, change: Callable[[], None]) -> None:
        """Make ``change`` now or, within another change on this thread, after that one."""
        queued = self._queued.setdefault(get_ident(), [])
        if self._is_running():
            queued.append(change)
        elif queued:  # left after an interrupt
            queued.append(change)
            self._make(queued.pop(0), queued)
        else:
            self._make(change, queued)

    def call_outside(self, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call(*args)`` within a change; changes that it requests are made at once."""
        thread = get_ident()
        queued = self._queued.pop(thread, [])
        try:
            call(*args)
        finally:
            self._queued[thread] = queued

    @classmethod
    def is_used_elsewhere(cls) -> bool:
        """Return whether another thread makes a change of a profile."""
        return any(
            thread != get_ident() and frame.f_code is cls._make.__code__
            for thread, top in sys._current_frames().items()
            for frame, _ in traceback.walk_stack(top)
        )

    def _is_running(self) -> bool:
        """Return whether this thread makes a change, by its frames, as an interrupt could leave a flag set."""
        frame = sys._getframe(1).f_back
        while frame is not None and frame.f_code is not ChangeQueue.call_outside.__code__:
            if frame.f_code is ChangeQueue._make.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _make(self, change: Callable[[], None], queued: list[Callable[[], None]]) -> None:
        try:
            change()
        finally:
            if queued:
                self._make(queued.pop(0), queued)


class WindowRecorder:
    """The part of a profile that records: what happens when a window opens, ends or fails.

    `ScheduleFollower` decides when; nothing here follows the schedule or the loop.

    Args:
        out: the folder that everything is written to.
        schedule: the windows to record.
        exporter: makes the captures.
        options: what was asked for.
        driver: the code that calls `step`.
    """

    # A profile that could not be made has only these.
    _changes = ChangeQueue()
    _run_times = RunTimes()
    _end_timed_step: Callable[[int], None] = deque[int](maxlen=0).append
    _started = False
    _next_due_step = NEVER  # the next step at which something is due
    _next_fold_step = BLOCK  # the next step at which the times of steps are added up
    _profile_box: ProfileBox | None = None  # with a black box
    out = Path()
    step_num = 0
    _first = 0  # the number of the first step

    _recording: Recording | None = None  # of the open window
    _last_capture: Any = None  # of the last recorded window
    _metadata: dict[str, str] = {}  # noqa: RUF012  # each profile that is made has its own
    _unclosed_recording: Recording | None = None  # its end was interrupted; the next step ends it
    _last_trace_bytes = 0  # the size of the last window's files before compression
    _last_finished_index = 0  # the number of the last window that is over
    _continued_index = 0  # the number of the window that a loop's end cut short and the next loop continues
    _untimed_number: int | None = None  # the window that is over while the steps after it are timed
    _calling_on_trace_ready = False  # on_trace_ready is being called
    _postponement_reason = ""  # why a change that was due could not be made; for the current or the next window
    _end_reason = "the schedule changed"  # how the loop ended, in words

    def __init__(
        self, out: Path, schedule: RequestedWindows, exporter: Exporter, options: ProfileOptions, driver: Driver
    ) -> None:
        self.out = out
        self.step_num = self._first = options.first_step
        self._metadata = {}
        self._changes = ChangeQueue()
        self._schedule = schedule
        self._requests: deque[WindowRequest] = deque()  # those that the next step adds to the schedule
        # The windows, by the id of a request, and their folders
        self._served: dict[str, tuple[int | str, str]] = {}
        self._exporter = exporter
        self._options = options
        self._driver = driver
        self._outcomes = Outcomes(out, schedule, exporter, options, driver)
        self._sender = self._outcomes.sender
        self._last_memory: WindowMemory | None = None  # of the last window that recorded the history
        self._times = WindowTiming()
        self._run_times = RunTimes()
        self._end_timed_step = self._run_times.end_step  # so that `step` need not look it up
        self._missed_windows: dict[int, Window] = {}  # by number: due at a postponed change

    @property
    def run(self) -> str:
        """The value of ``run`` in the lines of the manifest."""
        return self._outcomes.manifest.run

    @property
    def recording_thread(self) -> int | None:
        """The thread that records a window, which only that thread can end; None if none does."""
        return None if self._recording is None else self._recording.thread

    @guard.contained(FEATURE)
    def between_steps(self) -> bool:
        """End the recorded step early, so that work before the next `step` belongs to no step.

        Returns:
            Whether the window continues after that step. If it ends, the caller should defer its work.
        """
        recording = self._recording
        if recording is None or recording.steps is None or not recording.on_own_thread():
            return True
        self._times.end()
        self._changes.make(functools.partial(self._end_recorded_step, recording))
        window = self._schedule.at(self.step_num + 1)[1]
        return window is not None and window.index == recording.window.index

    def _end_recorded_step(self, recording: Recording) -> None:
        with suppress(CaptureError):  # the step that closes the window reports it
            recording.end_step()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Record the body as the library's own work, and leave its time out of the step."""
        recording = self._recording
        if recording is None or recording.steps is None:
            yield
            return
        began_ns, token = time.perf_counter_ns(), dispatch.enter(_OWN_WORK)
        try:
            yield
        finally:
            dispatch.leave(token)
            took_ns = time.perf_counter_ns() - began_ns
            self._times.leave_out(took_ns)
            self._run_times.leave_out(took_ns)

    @property
    def _is_recorded(self) -> bool:
        """Whether the steps since the last change are recorded."""
        return self._recording is not None and self._recording.start_ns is not None

    def _fold_times(self) -> None:
        """Add up the steps so far; they are all recorded, or none is, as this comes before each change."""
        self._next_fold_step = self.step_num + BLOCK
        self._run_times.fold(self.step_num, recorded=self._is_recorded)

    def _leave_out_since_end(self) -> None:
        """Leave out the time since the last step ended, after that one is added up."""
        self._fold_times()
        self._run_times.leave_out_since_end()

    @property
    def _never_records(self) -> bool:
        """Whether this rank opens no window, whatever is requested."""
        outcomes = self._outcomes
        return outcomes.in_dry_run or (outcomes.excluded and not self._schedule.open_ended)

    def _add_requested(self, step: int) -> None:
        """Add the requested windows to the schedule, before ``step``."""
        while self._requests:
            request = self._requests.popleft()
            if request.first is not None and request.first < step:
                late = f" (agreed for step {request.first}, learned of at step {step})"
                request = replace(request, reason=request.reason + late)
            window = self._schedule.add(request, step, recorded=self._outcomes.is_chosen(request.ranks))
            if request.id:
                self._served[request.id] = self._schedule.label(window), str(self._folder(window).absolute())

    def _must_postpone(self, action: StepAction, window: Window | None, over: bool) -> bool:
        """Return whether a change that is due at this step has to wait for the next one.

        At the end of a backward pass, torch undoes a start or stop of its profiler in that pass. The start and the
        stop synchronize, which invalidates the capture of a CUDA graph; marking a step does not.
        """
        recording = self._recording
        if self._exporter.name == "torch_profiler" and autograd.in_backward():
            self._postponement_reason = _IN_BACKWARD
        elif cuda_graphs.capturing and self._is_due(action, window, over):
            self._postponement_reason = _IN_CAPTURE
            if over and recording is not None:
                self._end_recorded_step(recording)
        else:
            self._note_missed(window)
            return False
        opened = recording.window.index if recording is not None else self._last_finished_index
        if window is not None and window.index > opened:
            self._missed_windows[window.index] = window  # opens later, if at all
        return True

    def _is_due(self, action: StepAction, window: Window | None, over: bool) -> bool:
        """Return whether a recording opens, starts or ends at this step."""
        if self._recording is None:
            return window is not None and (
                window.index > self._last_finished_index or window.index == self._continued_index
            )
        return (
            over
            or self._recording.ended_early
            or (action is StepAction.ACTIVE and self._recording.start_ns is None)
        )

    def _note_missed(self, window: Window | None) -> None:
        """Note windows that ended before they could open, now that ``window`` can."""
        put_off, self._missed_windows = self._missed_windows, {}
        for missed in put_off.values():
            if window is None or missed.index != window.index:
                self._last_finished_index = missed.index
                self._outcomes.note(missed, "skipped", self._postponement_reason, step=self.step_num)
        if put_off and window is None:
            self._postponement_reason = ""

    def _record_step(self, action: StepAction, window: Window) -> None:
        capture = None
        try:
            if self._recording is None:
                self._complete_last_window(self.step_num)
                dispatch.active.detect()
                if not self._exporter.hint:  # else a vendor's tool writes its own files
                    refuse_full_disk(self.out, self._last_trace_bytes)
                cost = WindowCost()
                with cost.stall():
                    capture = self._exporter.capture()
                compile_log = WindowCompileLog(self._folder(window)) if self._options.compile_log else None
                self._recording = Recording(
                    window,
                    capture,
                    self.step_num,
                    cost,
                    self._on_thread_end,
                    compile_log,
                    self._window_memory(window),
                )
                if compile_log is not None:
                    compile_log.start()
                self._times.open()
                log.info("window.opened", **self._outcomes.fields(window, self.step_num))
            self._recording.window = window
            if action is StepAction.ACTIVE:
                about = {}
                if self._recording.start_ns is None:
                    reasons = "; ".join(self._schedule.opened_by(window))
                    about = self._metadata | {OPENED_BY: reasons, MACHINE: machine(), CORES: str(usable_cores())}
                    if self._driver.on_command_line:
                        about[COMMAND] = "1"
                    with self._recording.cost.stall():
                        self._outcomes.note_open(window)
                self._recording.step(
                    self.step_num, about, self._schedule.has_schedule or self.step_num > self._first
                )
                self._times.begin(self.step_num, recording=True)
            else:
                self._recording.warm_up()
                self._next_due_step = window.active
        except BaseException as error:
            if self._recording is None and capture is not None:  # interrupted in between
                with guard.contained("leaving a capture"):
                    capture.discard()
            recording = self._recording
            if self._started and recording is not None and recording.steps is not None and is_interrupt(error):
                self._end_reason = loop_ended(self.step_num, begun=True, error=error)
                self._close_window(recording, cut=True)  # the steps before this one
            elif self._started:
                self._fail_window(window, error)
            if is_interrupt(error):
                raise
        finally:
            if self._recording is not None and not self._started:  # by another thread's `stop`
                self._next_due_step = NEVER
                self._abandon(self._recording)

    def _on_thread_end(self, recording: Recording) -> None:
        """End ``recording``, as its thread is about to end."""
        raise NotImplementedError

    def _close_window(
        self, recording: Recording, *, begun: bool = False, complete: bool = False, cut: bool = False
    ) -> None:
        """End the window: on time, or early because the loop ended (see `end` and `pause`)."""
        window = recording.window
        if begun or cut:
            self._times.cancel()
        else:
            self._times.end()
        if (cut and recording.ends_with(self.step_num)) or (recording.ended_early and not begun):
            recording.mark_last_step_cut()
        try:
            files, entry, missing = self._save_window(recording, begun, complete)
        except BaseException as error:
            self._fail_window(window, error)
            if is_interrupt(error):
                raise
            return
        self._last_finished_index, self._last_capture = window.index, recording.capture
        failure, failures = None, list[str]()
        self._calling_on_trace_ready = True
        try:
            on_trace_ready = self._options.on_trace_ready
            if on_trace_ready is not None and not recording.on_trace_ready_called:
                recording.on_trace_ready_called = True
                self._changes.call_outside(on_trace_ready, self)
        except Exception as error:
            if is_interrupt(error):
                raise
            failure = error
            failures.append(f"on_trace_ready failed: {type(error).__name__}: {error}")
        finally:  # also after an interrupt, to keep the files
            self._recording, self._calling_on_trace_ready, self._postponement_reason = None, False, ""
            if not self._driver.keeps_events:
                self._last_capture = None
            received = self._sender.received
            try:
                self._outcomes.add_recorded(recording, files, entry, missing, failures)
            finally:
                if self._sender.received == received:  # interrupted before: `_end` accounts for it
                    self._recording = recording
                else:
                    self._untimed_number = self._sender.last_window
            self._times.close(self.step_num)
        log.info(
            "window.closed",
            **self._outcomes.fields(window, self.step_num),
            steps=recording.steps and list(recording.steps),
            seconds=recording.seconds,
            stall_s=entry["cost"]["stall_s"],
            bytes=self._last_trace_bytes,
        )
        if failure is not None:
            guard.failed("on_trace_ready", failure)

    def _save_window(self, recording: Recording, begun: bool, complete: bool) -> SaveResult:
        """Stop and save the window; only once, even if it is closed again after an interrupt."""
        if recording.save_result is not None:
            return recording.save_result
        if recording.end_ns is not None:
            raise CaptureError("interrupted before it was saved")
        if recording.start_ns is None:
            raise CaptureError(f"{self._postponement_reason or self._end_reason}, in warm-up")
        if begun:
            recording.leave_out(self.step_num)
        recording.stop()
        window = recording.window
        stem = f"{self._prefix}.{recording.end_ns}"
        with recording.cost.stall():
            traces = recording.capture.save(self._folder(window), stem)
            compiled = recording.compile_log.save(stem) if recording.compile_log is not None else None
        box = self._profile_box if self._options.black_box else None
        times = box.write(traces[0]) if box is not None and traces else None
        files = [path for path in (*traces, compiled, times) if path is not None]
        self._last_trace_bytes = sum(size_of(path) or 0 for path in traces)
        missing = self._outcomes.missing_reasons(
            recording, self.step_num + complete, self._end_reason, self._postponement_reason
        )
        result = files, self._outcomes.entry(window, recording), missing + recording.incomplete
        recording.save_result = result
        return result

    def _window_memory(self, window: Window) -> WindowMemory | None:
        """Return what records the history of GPU memory in ``window``."""
        options = self._options.memory
        if options is None:
            return None
        requested = any(reason != SCHEDULE for reason in self._schedule.opened_by(window))
        skipped = None if requested else too_early(options, self._last_memory)
        memory = WindowMemory(options, self._folder(window), self._prefix, skipped)
        if skipped is None:
            self._last_memory = memory
        return memory

    @property
    def _prefix(self) -> str:
        """How the names of the files of a window begin; the time follows."""
        return f"rank{self._outcomes.rank}{process_suffix()}"

    def _folder(self, window: Window) -> Path:
        """Return the folder of the files of ``window``."""
        label = self._schedule.label(window)
        return self.out / (f"window-{label:04d}" if isinstance(label, int) else f"window-{label}")

    @guard.contained(FEATURE)
    def _complete_last_window(self, step: int) -> None:
        """Complete the last window, unless that is done, with the times of the steps before ``step``."""
        number, self._untimed_number = self._untimed_number, None
        if number is None:
            return
        timing, lengths = self._times.timing(step), self._run_times.lengths(step)
        if timing and lengths:
            timing["lengths"] = lengths.as_json()
        self._sender.add_timing(number, timing)
        if self._schedule.is_last(self._last_finished_index) and not self._continued_index:
            self._outcomes.report()
            self._sender.close()

    def _fail_window(self, window: Window, error: BaseException) -> None:
        """End the capture of a window that failed, note the reason, and continue with the next window."""
        recording = self._recording
        interrupted = is_interrupt(error)
        if isinstance(error, CaptureError):
            status, reason = "skipped", str(error)
        else:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            status, reason = "failed", f"{'interrupted by ' * interrupted}{what}"
        try:
            if recording is not None:
                self._abandon(recording)
        finally:  # also if a signal handler of the program raises
            if self._recording is not None:  # interrupted before `_abandon` took it
                self._unclosed_recording, self._recording = self._recording, None
            self._last_finished_index, self._continued_index = window.index, 0
            self._outcomes.note(window, status, reason, recording, step=self.step_num)
        refused = isinstance(error, OSError) and error.errno is not None and not settings.strict
        if status == "failed" and not interrupted and not refused:  # the system refused, as the log says
            guard.failed(f"exporter {self._exporter.name}", cast(Exception, error))

    def _abandon(self, recording: Recording) -> None:
        """End ``recording`` without a trace: now or, after an interrupt, at the next step of its thread."""
        self._outcomes.drop_open()
        due, self._next_due_step = self._next_due_step, self.step_num
        self._unclosed_recording, self._recording = recording, None
        if self._close_unclosed():
            self._next_due_step = due

    def _close_unclosed(self) -> bool:
        """End a recording whose end was interrupted, if this thread can; return whether none is left."""
        if (
            self._unclosed_recording is not None
            and self._unclosed_recording.on_own_thread()
            and not cuda_graphs.capturing
        ):
            with guard.contained("leaving a window"):
                self._unclosed_recording.abandon()
            self._unclosed_recording = None
        return self._unclosed_recording is None
