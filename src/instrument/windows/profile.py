"""`Profile`: the object that a training loop steps, which opens and closes windows as the schedule says."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

from .. import compat, log, stderr
from ..config import LAUNCHED, settings
from ..cuda_graphs import GraphFollower, cuda_graphs
from ..errors import CaptureError
from ..exporters.capture import Exporter
from ..guard import exiting, guard
from ..interrupts import is_interrupt
from ..regions import dispatch, region
from ..stepping.program_steps import program_steps
from .changes import Changes
from .finalizer import WindowFinalizer
from .manifest import Manifest
from .rank import process_suffix, rank
from .recording import Recording, Saved
from .schedule import Phase, Schedule, Window, span
from .timing import StepTimes
from .torch_api import TorchProfilerApi
from .torch_schedule import FromTorch

FEATURE = "recording windows"
NEVER = sys.maxsize
_OWN_WORK = region.make(region.OWN_WORK, None, None, None, None)
_ELSEWHERE = "steps ended on another thread than the one that opened the window"
_IN_BACKWARD = "step() was called in the backward pass, where torch.profiler cannot start or stop"
_IN_CAPTURE = "step() was called while a CUDA graph was captured, where nothing can start or stop"
_UNSEEN = "step() was not called for each of the last steps"


class Profile(TorchProfilerApi):
    """A loop's profiler; made by `profile`.

    Attributes:
        step_num: the number of the current step.
        out: the folder that everything lands in.
        keep_last: whether the last window's events stay in memory for those who ask for them after the loop.
        tell: called with the text of the summary, on another thread; None is standard error as `start` finds it.
        how: how the steps to record are written where this was made, with "{}" for the steps.
        yields: it ends when another one starts, and does not start while one runs.
        late: nothing tells when its first step began, as steps are seen where they end.
    """

    _running: ClassVar[weakref.WeakSet[Profile]] = weakref.WeakSet()
    _warnings: ClassVar[set[str]] = set()
    started: ClassVar[list[Callable[[], None]]] = []  # called when one starts
    idle: ClassVar[list[Callable[[], None]]] = []  # called when none has a window open or to come
    _made = False  # one that could not be made counts steps, and no more
    _changes = Changes()
    _started = False
    _change = NEVER
    _last: Any = None
    _recording: Recording | None = None
    out = Path()
    step_num = 0

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def __init__(
        self,
        out: Path,
        plan: Schedule | FromTorch,
        exporter: Exporter,
        on_trace_ready: Callable[[Profile], Any] | None,
        ranks: frozenset[int] | None,
        first_step: int,
    ) -> None:
        super().__init__()
        self.step_num = first_step
        self.out = out
        self._change = NEVER  # the next step at which there is something to do
        self._changes = Changes()
        self._plan = plan
        self._exporter = exporter
        self._on_trace_ready = on_trace_ready
        self._ranks = ranks
        self._still_on: Recording | None = None  # by another thread's `stop` or an interrupt, until the next step
        self._over = 0  # the number of the last window that is over
        self._goes_on = 0  # the number of the window that the end of a loop cut, and the next one goes on with
        self._manifest = Manifest(self.out)
        self._finalizer = WindowFinalizer(self._manifest, "" if os.environ.get(LAUNCHED) else exporter.hint)
        self._times = StepTimes()
        self._untimed: int | None = None  # the window that is over while steps after it are timed
        self._all_begun = False  # no window is to come
        self._planned = True  # without a schedule torch marks no steps; here those that `step` announces
        if os.environ.get("KINETO_USE_DAEMON"):
            self.step = self._step_for_daemon  # type: ignore[method-assign]  # at no cost where there is none
        self.keep_last = True
        self.tell: Callable[[str], None] | None = None
        self.how = 'schedule="{}"'
        self.yields = self.late = False
        self._first = first_step
        self._started = False
        self._end_unfinished = False  # it ended, but for what an interrupt cut off
        self._unaccounted: list[Window] | None = None  # those that were not reached, once it ended
        self._paused = False
        self._closing = False  # on_trace_ready is called
        self._postponed = ""  # why what was due at a step could not be done; of the current window, or before it
        self._put_off: list[Window] = []  # those that were to open then
        self._graphs: GraphFollower | None = None  # so that captures are seen while it runs
        self._end_reason = "the plan changed"  # how the loop ended, in words
        self._process = 0
        self._rank = 0
        self._left_out = False  # by `ranks`: it counts steps, and no more
        self._made = True

    @property
    def over(self) -> bool:
        """Whether no window is open or to come."""
        return self._change == NEVER or (self._all_begun and self._recording is None)

    @property
    def near(self) -> bool:
        """Whether a window is open, or opens, or ends, within two steps."""
        return self._change - self.step_num <= 2

    def step(self) -> None:
        """Tell that a step ended and the next begins: an integer compare, unless a window is open or due."""
        try:
            self.step_num += 1
            if self.step_num >= self._change:
                cuda_graphs.settle()
                self._changes.make(self._advance)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise

    @guard.contained(FEATURE)
    def between_steps(self) -> bool:
        """End the step that is recorded, so that what is done before `step` belongs to none.

        Returns:
            False where the window ends with that step, and what can wait should.
        """
        recording = self._recording
        if recording is None or recording.steps is None or not recording.here():
            return True
        self._times.end()
        self._changes.make(functools.partial(self._end_recorded_step, recording))
        window = self._plan.at(self.step_num + 1)[1]
        return window is not None and window.index == recording.window.index

    def _end_recorded_step(self, recording: Recording) -> None:
        with suppress(CaptureError):  # the step that closes the window finds out as well
            recording.end_step()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Show the body as the library's own work where it is recorded, and leave its time out of the step's."""
        recording = self._recording
        if recording is None or recording.steps is None:
            yield
            return
        began_ns, token = time.perf_counter_ns(), dispatch.enter(_OWN_WORK)
        try:
            yield
        finally:
            dispatch.leave(token)
            self._times.leave_out(time.perf_counter_ns() - began_ns)

    def _step_for_daemon(self) -> None:
        """Do what `step` does, and tell Kineto, whose daemon may have asked for so many iterations."""
        Profile.step(self)
        with guard.contained("telling Kineto of a step"):
            compat.kineto_step()

    @guard.contained(FEATURE)
    def start(self) -> None:
        """Begin with step `step_num`; after `stop` or `pause`, go on from where that was."""
        if self._made:
            self._changes.make(self._start)

    def _start(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            if is_interrupt(error):
                self._end(False)
            raise

    def _begin(self) -> None:
        self._finalizer.stderr = (stderr.at_start() if self.yields else None) or sys.stderr
        if self._paused:
            self._paused = False
            self._follow_plan()
            self.report_steps()
        if self._started or self._closing or not settings.enabled:
            return
        others = [profile for profile in Profile._running if profile is not self]
        if self.yields and others:
            return
        for profile in others:
            if profile.yields:
                profile.stop()
        self._started, self._end_unfinished, self._unaccounted = True, False, None
        Profile._running.add(self)
        self._first = self.step_num
        self._process = os.getpid()
        atexit.register(self._exit)
        self._rank = rank()
        if not self.yields:
            program_steps.follow(self)
        self._left_out = self._ranks is not None and self._rank not in self._ranks
        if self._left_out:
            self.report_steps()
            return
        with guard.contained(FEATURE):
            self._graphs = GraphFollower()
            self._graphs.follow()
        with guard.contained("preparing the exporter"):
            following = self._plan.next_window(self.step_num)
            # Also less than before: a window that the loop ended in goes on.
            self._over = following.index - 1 if following is not None else self._plan.count or 0
            if following is not None:
                self._manifest.check(warned=self.yields)  # by the command
                self._exporter.prepare()
        self._times.start(self.step_num, late=self.late)
        for call in Profile.started:
            call()
        self._follow_plan()
        self.report_steps()

    @guard.contained(FEATURE)
    def stop(self) -> None:
        """End: close an open window, wait for its files, account for windows not reached, print the summary.

        Where a signal handler calls this while a window opens or closes, it is done as soon as that is, after the
        handler returned or raised: one that calls ``os._exit`` then leaves the window without its files.
        """
        self.end(begun=self.step_num > self._first)

    @guard.contained(FEATURE)
    def end(self, *, begun: bool = False, complete: bool = False) -> None:
        """Do what `stop` does, and say how far the current step came.

        Args:
            begun: `step` announced it, as at the end of a loop's last round, and it may never have run.
            complete: it ran to its end, though `step` did not say so.
        """
        self._make(self._end, begun, complete)

    @guard.contained(FEATURE)
    def _end(self, begun: bool, complete: bool = False) -> None:
        try:
            mine = self._end_windows(begun, complete)
        except BaseException:
            self._end_windows(begun, complete)  # what an interrupt cut off; the process's end waits for the files
            raise
        if mine:
            self._finish()

    def _end_windows(self, begun: bool, complete: bool) -> bool:
        """Close an open window and account for those not reached; return False where that was done."""
        if not self._leave(begun, complete):
            return False
        if self._process != os.getpid():  # a forked child: the windows are its parent's
            return False
        self._abandon_left()
        recording = self._recording
        if recording is not None and not self._closing:
            self._close(recording, begun=begun, complete=complete, cut=not (begun or complete))
        self._hand_over(self.step_num + complete)
        with guard.contained("ending"):
            if self._unaccounted is None:
                self._unaccounted = [] if self._left_out else list(islice(self._unreached(), 1000))
            while self._unaccounted:
                self._note(self._unaccounted[0], "not reached", self._end_reason)
                del self._unaccounted[0]
        return True

    def _finish(self) -> None:
        with guard.contained("ending"):
            self._report()
            self._finalizer.finish()
            if not self._closing:  # else on_trace_ready called `stop`
                self._warn_of_nothing()
        self._tell_idle()
        if not self._closing:
            self._end_unfinished = False
            atexit.unregister(self._exit)

    @guard.contained(FEATURE)
    def pause(self, *, begun: bool, cut: bool = False) -> None:
        """Close an open window, as the loop stops here and may go on: `start` continues with the current step.

        The rest of the window is recorded then, into a trace of its own; all of it where no step of it ran yet.
        torch's profiler does not stay on, as this may be the last loop. Windows that are not reached are accounted
        for by `stop`, or at the end of the process. After the last window this waits for the files, which programs
        read after the loop. While windows may follow it does not: `windows`, `stop` and the process's end do.

        Args:
            begun: as for `end`.
            cut: the current step did not end, as far as that is known.
        """
        self._make(self._pause, begun, cut)

    @guard.contained(FEATURE)
    def _pause(self, begun: bool, cut: bool) -> None:
        recording = self._recording
        if not self._started or self._paused or self._process != os.getpid() or self._closing:
            return
        self._paused = True
        self._abandon_left()
        self._end_reason = f"the loop ended {_where(begun)} step {self.step_num}"
        empty = recording is not None and (
            recording.steps is None or (begun and recording.steps[0] == self.step_num)
        )
        if recording is not None and empty and recording.here():
            self._abandon(recording)
        elif recording is not None:
            self._goes_on = recording.window.index
            try:
                self._close(recording, begun=begun, cut=cut)
            finally:
                if self._end_unfinished:  # on_trace_ready called `stop`
                    self._end(begun)
        self._times.cancel()
        self._hand_over(self.step_num)
        with guard.contained("ending"):
            self._report()
            if self._over == self._plan.count:
                self._finalizer.finish()

    @classmethod
    def stop_all(cls) -> None:
        """Stop each that runs, as the program is interrupted in its current step."""
        for profile in list(cls._running):
            profile.end()

    @guard.contained(FEATURE)
    def abandon(self, reason: str) -> None:
        """End without accounting for windows that are not reached; one that is open is left, for ``reason``."""
        self._make(self._abandon_for, reason)

    @guard.contained(FEATURE)
    def _abandon_for(self, reason: str) -> None:
        left = self._leave()
        if self._process != os.getpid():  # a forked child: the windows are its parent's
            return
        self._abandon_left()
        if left and self._recording is not None:
            self._give_up(self._recording.window, CaptureError(reason))
        self._hand_over(self.step_num)
        self._finalizer.finish()
        self._tell_idle()
        self._end_unfinished = False
        atexit.unregister(self._exit)

    @classmethod
    def _tell_idle(cls) -> None:
        if cls.idle and all(profile.over for profile in cls._running):
            for call in cls.idle:
                call()

    @guard.contained(FEATURE)
    def account_for_earlier(self, before: Profile, reason: str) -> None:
        """Note the windows that end before this one's first step, but for those that ``before`` accounted for."""
        if not self._started or self._left_out:
            return
        accounted = max((window["window"] for window in before.windows), default=0)
        for index in range(accounted + 1, min(self._over, accounted + 1000) + 1):
            window = self._plan.window(index)
            if window is not None:
                self._note(window, "not reached", reason)

    def _leave(self, begun: bool = False, complete: bool = False) -> bool:
        """Take part in nothing more; False where that is so already and nothing is left to do."""
        started = self._started
        if started:
            if not self._paused:
                self._end_reason = f"the loop ended {_where(begun, complete)} step {self.step_num}"
            if self._postponed:
                self._end_reason += f"; {self._postponed}"
            self._started, self._paused, self._end_unfinished, self._change = False, False, True, NEVER
        elif not self._end_unfinished or self._closing:
            return False
        if self._graphs is not None:
            with guard.contained(FEATURE):
                self._graphs.remove()
        Profile._running.discard(self)
        return True

    @guard.contained(FEATURE)
    def _exit(self) -> None:
        failed = getattr(sys, "last_value", None) is not None  # an error that nothing caught ends the program
        with exiting():
            with guard.contained(FEATURE):
                cuda_graphs.settle()
            self._changes.make(functools.partial(self._end, self.step_num > self._first and not failed))

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
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(begun=kind is None and self.step_num > self._first)

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The outcome of each window so far, as in ``manifest.jsonl``; between epochs this waits for the files."""
        if not self._made:
            return []
        if self._paused and self._process == os.getpid():
            with guard.contained("ending"):
                self._finalizer.finish()
        return self._manifest.entries

    # The way through the schedule. Nothing below raises into the loop.

    def _advance(self) -> None:
        """Pass the end of a step on, and do what is due at the next."""
        try:
            if self._started and not (self._closing or self.yields) and self._process == os.getpid():
                program_steps.ended()
        finally:
            self._follow_plan()
            self.report_steps()

    def _make(self, change: Callable[..., None], *args: Any) -> None:
        """Make the change ``change(*args)`` once no other is made and no capture of a CUDA graph forbids it."""
        self._changes.make(functools.partial(self._after_capture, functools.partial(change, *args)))

    def _after_capture(self, change: Callable[[], None]) -> None:
        """Make ``change`` now, or after this thread's capture of a CUDA graph if a window is open.

        An interrupt while this waits for another thread's capture does not leave the profiler on.
        """
        postponed = False
        try:
            mine = self._recording is not None and self._process == os.getpid()
            postponed = mine and cuda_graphs.postpone(functools.partial(self._changes.make, change))
        finally:
            if postponed:
                self._change = self.step_num + 1  # where the capture has ended unseen, `step` makes the change
            else:
                change()

    def report_steps(self) -> None:
        """Come back at the next step if something counts the steps that the program marks."""
        if program_steps.listeners and self._started and not self.yields:
            self._change = min(self._change, self.step_num + 1)

    def _follow_plan(self) -> None:
        """Do what is due at this step and set the step at which to come back."""
        step, recording = self.step_num, self._recording
        self._times.cancel() if recording is not None and recording.ended_early else self._times.end()
        if self._paused:
            return
        if self._left_out or self._process != os.getpid():
            self._change = NEVER
            return
        if self._closing:  # on_trace_ready calls `step`, which counts and no more
            return
        self._abandon_left()
        if not self._started:
            self._change = NEVER if self._still_on is None else step + 1
            return
        self._change = step + 1
        with guard.contained("following the schedule"):
            if recording is not None and not recording.here():
                recording.stepped_elsewhere()
                return
            phase, window = self._plan.at(step)
            over = recording is not None and (window is None or window.index != recording.window.index)
            if self._postpones(phase, window, over):
                return
            if recording is not None and (over or recording.ended_early):
                try:
                    self._close(recording)
                finally:
                    if self._end_unfinished:  # on_trace_ready called `stop`
                        self._end(begun=True)
                if self._change == NEVER:
                    return
            if window is None:
                following = self._plan.next_window(step)
                self._all_begun = following is None
                due = NEVER if following is None else following.warmup
                self._change = self._times.next(step, due)
                if (due == step + 1 and self._plan.foreseen) or not self._times.waits(step):
                    self._hand_over(step)
                if self._change == step + 1:
                    self._times.begin(step, recording=False)
                if self._all_begun:
                    self._tell_idle()
            elif window.index <= self._over and window.index != self._goes_on:  # the rest of one that failed
                if self._plan.finite or window.stop < NEVER:
                    self._change = window.stop
            else:
                self._follow(phase, window)

    def _postpones(self, phase: Phase, window: Window | None, over: bool) -> bool:
        """Leave what is due at this step to the next one, where it cannot be done now.

        torch undoes at the end of a backward pass what starts or stops in it. What synchronizes, as the start and
        stop of a profiler do, invalidates the capture of a CUDA graph. To mark a step does not.
        """
        recording = self._recording
        if self._exporter.name == "torch_profiler" and compat.in_backward():
            self._postponed = _IN_BACKWARD
        elif cuda_graphs.capturing and self._is_due(phase, window, over):
            self._postponed = _IN_CAPTURE
            if over and recording is not None:
                self._end_recorded_step(recording)
        else:
            self._account_for_put_off(window)
            return False
        if recording is None and window is not None and window.index > self._over:
            self._put_off = [other for other in self._put_off if other.index != window.index] + [window]
        return True

    def _is_due(self, phase: Phase, window: Window | None, over: bool) -> bool:
        """Tell whether a recording opens, starts or ends at this step."""
        if self._recording is None:
            return window is not None and (window.index > self._over or window.index == self._goes_on)
        return over or self._recording.ended_early or (phase is Phase.ACTIVE and self._recording.start_ns is None)

    def _account_for_put_off(self, window: Window | None) -> None:
        """Note the windows that were over before they could open; ``window`` is the one that can."""
        put_off, self._put_off = self._put_off, []
        for missed in put_off:
            if window is None or missed.index != window.index:
                self._over = missed.index
                self._note(missed, "skipped", self._postponed)
        if put_off and window is None:
            self._postponed = ""

    def _follow(self, phase: Phase, window: Window) -> None:
        capture = None
        try:
            if self._recording is None:
                self._hand_over(self.step_num)
                dispatch.active.detect()
                capture = self._exporter.capture()
                self._recording = Recording(window, capture, self.step_num)
                self._times.open()
            self._recording.window = window
            if phase is Phase.ACTIVE:
                self._recording.step(self.step_num, self._metadata, self._planned or self.step_num > self._first)
                self._times.begin(self.step_num, recording=True)
            else:
                self._recording.warm_up()
                self._change = window.active
        except BaseException as error:
            if self._recording is None and capture is not None:  # interrupted in between
                with guard.contained("leaving a capture"):
                    capture.discard()
            if self._started:
                self._give_up(window, error)
            if is_interrupt(error):
                raise
        finally:
            if self._recording is not None and not self._started:  # by another thread's `stop`
                self._change = NEVER
                self._abandon(self._recording)

    def _close(
        self, recording: Recording, *, begun: bool = False, complete: bool = False, cut: bool = False
    ) -> None:
        """End the window: on time, or early because the loop ended (see `end` and `pause`)."""
        window = recording.window
        if begun or cut:
            self._times.cancel()
        else:
            self._times.end()
        if (cut and recording.holds(self.step_num)) or (recording.ended_early and not begun):
            recording.cut_short()
        try:
            files, entry, reasons = self._save(recording, begun, complete)
        except BaseException as error:
            self._give_up(window, error)
            if is_interrupt(error):
                raise
            return
        self._over, self._last = window.index, recording.capture
        status, failure = "partial" if reasons else "recorded", None
        self._closing = True
        try:
            if self._on_trace_ready is not None and not recording.announced:
                recording.announced = True
                self._changes.outside(self._on_trace_ready, self)
        except Exception as error:
            if is_interrupt(error):
                raise
            failure = error
            reasons = [*reasons, f"on_trace_ready failed: {type(error).__name__}: {error}"]
        finally:  # a KeyboardInterrupt, too, leaves the files
            self._recording, self._closing, self._postponed = None, False, ""
            if not self.keep_last:
                self._last = None
            received = self._finalizer.received
            try:
                entry |= {"status": status, "reason": "; ".join(reasons) or None}
                read = self._reports and (recording.steps is not None or not self._planned)
                self._untimed = self._finalizer.recorded(recording.capture, files, read=read, **entry)
            except BaseException:
                if self._finalizer.received == received:  # an interrupt came before: `_end` accounts for it
                    self._recording = recording
                raise
            self._times.close(self.step_num)
        if failure is not None:
            guard.failed("on_trace_ready", failure)

    def _save(self, recording: Recording, begun: bool, complete: bool) -> Saved:
        """Stop and save the window; once, also where an interrupt has the window closed again."""
        if recording.saved is not None:
            return recording.saved
        if recording.end_ns is not None:
            raise CaptureError("interrupted before it was saved")
        if recording.start_ns is None:
            raise CaptureError(f"{self._end_reason}, in warm-up")
        if begun:
            recording.leave_out(self.step_num)
        recording.stop()
        window = recording.window
        folder = self.out / f"window-{window.index:04d}"
        files = recording.capture.save(folder, f"rank{self._rank}{process_suffix()}.{recording.end_ns}")
        held = recording.steps is not None or not self._planned
        reasons = self._missing(recording, held, complete) + recording.incomplete
        recording.saved = files, self._entry(window, recording), reasons
        return recording.saved

    def _missing(self, recording: Recording, held: bool, complete: bool) -> list[str]:
        """Return why steps of the window are missing; nothing where none are."""
        stop = recording.window.stop
        if recording.ended_early:  # which `Recording.incomplete` explains
            return []
        if self.step_num + complete < stop < NEVER or not held:
            return [self._end_reason]
        if recording.steps is not None and recording.steps[1] + 1 < stop < NEVER:
            return [_ELSEWHERE if recording.elsewhere else self._postponed or _UNSEEN]
        if recording.steps is not None and recording.steps[0] > recording.window.active and self._postponed:
            return [self._postponed]
        return []

    @guard.contained(FEATURE)
    def _hand_over(self, step: int) -> None:
        """Complete the window that is over, if one is left, with the times of steps before ``step``."""
        number, self._untimed = self._untimed, None
        if number is None:
            return
        self._finalizer.timed(number, self._times.timing(step))
        if self._plan.count == self._over:
            self._report()
            self._finalizer.close()

    def _give_up(self, window: Window, error: BaseException) -> None:
        """Leave nothing on, take note of why a window is not recorded, and go on to the next."""
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
        finally:  # also where a signal handler of the program raises
            if self._recording is not None:  # an interrupt came before `_abandon` took it
                self._still_on, self._recording = self._recording, None
            self._over, self._goes_on = window.index, 0
            self._note(window, status, reason, recording)
        log.warning("window not recorded", window=window.index, reason=reason)
        refused = isinstance(error, OSError) and error.errno is not None and not settings.strict
        if status == "failed" and not interrupted and not refused:  # by the system, as the line says
            guard.failed(f"exporter {self._exporter.name}", cast(Exception, error))

    def _abandon(self, recording: Recording) -> None:
        """End ``recording`` without a trace: now, or at its thread's next step if an interrupt comes."""
        change, self._change = self._change, self.step_num
        self._still_on, self._recording = recording, None
        if self._abandon_left():
            self._change = change

    def _abandon_left(self) -> bool:
        """End what is still on, if that can be done here and now; return whether nothing is on any more."""
        if self._still_on is not None and self._still_on.here() and not cuda_graphs.capturing:
            with guard.contained("leaving a window"):
                self._still_on.abandon()
            self._still_on = None
        return self._still_on is None

    def _unreached(self) -> Iterable[Window]:
        following = self._plan.window(self._over + 1)
        if following is None or not self._plan.finite:
            return [following] if following is not None else []
        return filter(None, map(self._plan.window, range(following.index, (self._plan.count or 0) + 1)))

    def _warn_of_nothing(self) -> None:
        """Warn where no window was even begun, with what to write instead; once in a process for each text."""
        windows = self._manifest.entries
        begun = any(self._holds_steps(window) for window in windows)
        if begun or self._rank != min(self._ranks or {0}) or self._plan.count == 0:
            return
        steps = self.step_num - self._first
        by_hand = self.how.startswith("schedule")
        if windows:
            first, last = windows[0]["planned_steps"]
            asked = f"step {first} was" if first == last else f"steps {first}-{'' if last is None else last} were"
            reason = f"{asked} asked for, and {windows[0]['reason']}"
        elif self._plan.count is not None:
            reason = f"all steps asked for come before the first step, {self._first}"
        else:
            reason = f"the schedule asked for none, and {self._end_reason}"
        if steps > 0:
            low = self._first + 2 if steps > 4 else self._first
            cure = f"choose steps the run reaches, such as {self.how.format(span(low, low + min(steps, 3)))}"
        else:
            cure = "no step was counted: call step() after each step" if by_hand else "there were no steps"
        if steps > 0 and by_hand:
            cure += "; create the profile once, outside the epoch loop: a new one starts again at step 0"
        files = [file["path"] for window in windows for file in window["files"]]
        rest = f" ({files[0]} has what followed the last step that ended)" if files else ""
        text = f"no {'step' if files else 'window'} was recorded in {self.out}{rest}: {reason}; {cure}"
        if text not in Profile._warnings:
            Profile._warnings.add(text)
            log.warning(text)

    def _holds_steps(self, window: Mapping[str, Any]) -> bool:
        """Return whether a window has steps, or was warned of."""
        if window["status"] in ("recorded", "partial"):
            return window["steps"] is not None or not self._planned
        return bool(window["status"] != "not reached")

    def _entry(self, window: Window, recording: Recording | None) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "window": window.index,
            "planned_steps": (window.active, window.stop - 1 if window.stop < NEVER else None),
            "steps": recording and recording.steps,
            "cut_step": recording and recording.cut_step,
            "start_ns": recording and recording.start_ns,
            "end_ns": recording and recording.end_ns,
            "exporter": self._exporter.name,
            "hidden_regions": sorted(dispatch.compiled_away),
        }

    def _note(self, window: Window, status: str, reason: str, recording: Recording | None = None) -> None:
        entry = self._entry(window, recording) | {"status": status, "reason": reason}
        self._finalizer.unrecorded(**entry)

    @property
    def _reports(self) -> bool:
        """Whether this rank is the one that prints the summary."""
        return self._rank == min(self._ranks or {0})

    @guard.contained("the summary")
    def _report(self) -> None:
        dispatch.tell_hidden()
        if self._reports:
            self._finalizer.report(sorted(dispatch.compiled_away), self.tell)


def _where(begun: bool, complete: bool = False) -> str:
    return "before" if begun else "after" if complete else "in"
