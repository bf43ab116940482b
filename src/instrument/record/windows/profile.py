"""`Profile`: the object that a training loop steps; it starts runs, takes requests for windows, and has phases."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...base import stderr
from ...base.config import settings
from ...base.errors import CaptureError
from ...base.guard import guard
from ...base.interrupts import Suppressed, is_interrupt
from ...base.job import rank, world_size
from ...base.live_objects import IdentitySet
from ...base.trace_marks import SAMPLES
from ...base.units import integer
from ..cuda_graphs import GraphFollower
from ..exporters.exporter import Exporter
from ..planning.agreement import NOTICE_S, Agreement
from ..planning.profile_box import ProfileBox
from ..planning.ranks import chosen_ranks
from ..planning.requests import RequestedWindows, WindowRequest
from ..planning.schedule import Schedule
from ..planning.triggers import Triggers
from ..regions.annotation import annotate
from ..slow_steps.box import BlackBox
from ..slow_steps.step_reports import Reported
from ..stepping.explicit_steps import program_steps
from .driver import Driver, ProfileOptions
from .schedule_follower import ForgottenStep, ScheduleFollower, running_profiles
from .window_recorder import FEATURE

if TYPE_CHECKING:
    from torch import nn


_PHASE_NAME = re.compile(r"[A-Za-z][\w.]*")
_USER_NAMES = (
    "add_metadata", "black_box", "events", "export_chrome_trace", "export_memory_timeline", "export_stacks",
    "key_averages", "out", "phase", "start", "step", "step_num", "stop", "trigger", "windows",
)  # fmt: skip


class Profile(ScheduleFollower):
    """The profiler of a training loop, as `profile` returns it.

    It is a context manager, and has the methods of `torch.profiler.profile` that loops call: ``step``, ``start``,
    ``stop``, ``export_chrome_trace``, ``key_averages``, ...

    Args:
        out: the folder that everything is written to.
        schedule: the windows to record.
        exporter: makes the captures.
        triggers: request further windows while the profile runs.
        options: what was asked for.
        driver: the code that calls `step`.

    Attributes:
        out: the folder that everything is written to.
        step_num: the number of the current step.
        new_phase: makes the profile of a phase, given its name and its schedule.
    """

    start_callbacks: ClassVar[list[Callable[[], None]]] = []  # called when a profile starts
    _agreement: Agreement | None = None  # with the other ranks, while a profile with triggers runs in a job
    new_phase: Callable[[str, Schedule | str | None], Profile]
    _phases: dict[str, Profile]
    _initialized = False  # a profile with wrong arguments only counts steps

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def __init__(
        self,
        out: Path,
        schedule: RequestedWindows,
        exporter: Exporter,
        triggers: Triggers,
        options: ProfileOptions,
        driver: Driver,
    ) -> None:
        super().__init__(out, schedule, exporter, options, driver)
        self._phases = {}
        self._threads_in_phase = []  # a thread is in it once for each of its open phases
        self._triggers = triggers
        schedule.open_ended = bool(triggers) or options.black_box
        if options.black_box or options.on_steps:
            reported = Reported(
                options.on_steps or (), lambda: self._outcomes.recorded, out, self._leave_out_since_end
            )
            request = self.request if options.black_box else None
            box = self._profile_box = ProfileBox(request, options.trigger_steps, reported)
            self._outcomes.on_recorded = box.add_window
        told = [
            each.counts["samples"] for each in options.on_steps or () if isinstance(each.counts["samples"], int)
        ]
        if told:
            self._metadata[SAMPLES] = str(told[0])
        if options.black_box:
            self._outcomes.worst_steps = lambda: box.worst
        if os.environ.get("KINETO_USE_DAEMON"):
            self.step = self._step_for_daemon  # type: ignore[method-assign]  # without a daemon `step` costs nothing
        self._forgotten_step = ForgottenStep()
        self._regions = StepRegions()
        self._graphs: GraphFollower | None = None  # detects captures of CUDA graphs while the profile runs
        self._initialized = True

    def __dir__(self) -> list[str]:
        """List the names for users, without the library's own interface."""
        return list(_USER_NAMES)

    def __repr__(self) -> str:
        return f"<instrument.profile of {str(self.out)!r}, at step {self.step_num}>"

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: nullcontext())
    def phase(self, name: str, schedule: Schedule | str | None = None) -> AbstractContextManager[object]:
        """Return a context manager for a part of the program between training steps, such as an evaluation.

        Calls of `step` in its block do not count. Each block is one step of a profile of its own, counted from 0,
        whose windows are called ``window-eval-0001``. Such a window is skipped while one of the training is open.

        Args:
            name: the name of the phase: "eval". It is a region, too.
            schedule: the blocks to record, as `instrument.schedule` takes steps: "0" is the first one. The
                schedule of the first call with this ``name`` applies. None records none.

        Raises:
            TypeError, ValueError: an argument is not accepted; the message gives its name and value.
        """
        if not isinstance(name, str) or not _PHASE_NAME.fullmatch(name) or name == "step":
            raise ValueError(f'"name" must be a word such as "eval", and not "step": {name!r}')
        if not self._initialized or self._process not in (0, os.getpid()):  # the windows are those of the parent
            return annotate(name)
        if name not in self._phases:
            self._phases[name] = self.new_phase(name, schedule)
        return PhaseBlock(name, self, self._phases[name])

    def suspend_steps(self, thread: int) -> None:
        """Leave out calls of `step` on ``thread`` until `resume_steps`."""
        if not self._threads_in_phase:
            self._run_times.enter_phase()
        self._threads_in_phase.append(thread)
        if self._profile_box is not None:
            self._profile_box.box.pause()

    def resume_steps(self, thread: int) -> None:
        """Count calls of `step` on ``thread`` again, unless it is in an outer phase or `suspend_steps` failed."""
        with Suppressed(ValueError):
            self._threads_in_phase.remove(thread)
            if not self._threads_in_phase:
                self._run_times.leave_phase()
        if self._profile_box is not None and self._recording is None and not self._threads_in_phase:
            self._profile_box.box.resume()

    def begin_epoch(self, step: int | None = None) -> None:
        """Note that ``step``, by default the current one, is the first of an epoch."""
        self._run_times.begin_epoch(self.step_num if step is None else step)

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
        self._sender.output.stream = (stderr.at_start() if self._driver.preemptible else None) or sys.stderr
        if self._paused:
            self._paused = False
            self._follow_schedule()
            self._time_steps()
            self.report_steps()
            self._run_times.begin()
        if self._started or self._calling_on_trace_ready or not settings.enabled:
            return
        others = [profile for profile in running_profiles if profile is not self]
        if self._driver.preemptible and others:
            return
        for profile in others:
            if profile._driver.preemptible:
                profile.stop()
        self._started, self._end_was_interrupted = True, False
        running_profiles.add(self)
        self._first = self.step_num
        self._process = os.getpid()
        atexit.register(self._exit)
        self._outcomes.rank, self._outcomes.in_dry_run = rank(), settings.dry_run
        if self._driver.marks_steps:
            program_steps.follow(self)
        self._schedule.records_planned = not self._outcomes.excluded
        if not self._outcomes.in_dry_run:
            self._begin_profile_box()
        if self._never_records:
            self.report_steps()
            return
        with guard.contained(FEATURE):
            self._graphs = GraphFollower()
            self._graphs.follow()
        self._regions.attach()
        self._prepare_exporter()
        self._attach_sources()
        self._times.start(self.step_num, late=late)
        for call in Profile.start_callbacks:
            call()
        self._follow_schedule()
        self.report_steps()
        if self._schedule.has_schedule and self._driver.steps_by_hand:
            self._forgotten_step.follow()
            self._next_due_step = min(self._next_due_step, self.step_num + 1)
        self._run_times.begin(late=late, early=self._driver.preemptible)

    @guard.contained("preparing the exporter")
    def _prepare_exporter(self) -> None:
        following = self._schedule.next_window(self.step_num)
        # May decrease: a window that the end of a loop cut short is continued.
        self._last_finished_index = self._schedule.last_before(self.step_num)
        if following is not None or self._schedule.open_ended or self._requests:
            self._outcomes.manifest.check(warned=self._driver.preemptible)  # by `instrument run`
            self._exporter.prepare()

    def annotate(self, models: Iterable[Any]) -> None:
        """Show the modules of ``models``, and the other parts of their steps, in windows of this profile."""
        if self._initialized:
            self._regions.add(models)
            if self._started:
                self._regions.attach()

    def _attach_sources(self) -> None:
        """Attach what requests windows while the profile runs."""
        self._triggers.begin(self.request, self._request_and_answer, self._window_of)
        if self._schedule.open_ended:
            with guard.contained("agreeing on windows"):
                self._agreement = Agreement.begin(
                    self._add_request, lambda: self.step_num, lambda: self.step_num - self._first
                )

    @guard.contained("the black box")
    def _begin_profile_box(self) -> None:
        if self._profile_box is not None:
            self._profile_box.begin(self.step_num)
            self._end_timed_step = self._profile_box.after(self._run_times.end_step)

    def _detach(self) -> None:
        if self._graphs is not None:
            with guard.contained(FEATURE):
                self._graphs.remove()
        self._regions.remove()
        self._triggers.end()
        self._forgotten_step.remove()
        if self._profile_box is not None:
            self._profile_box.box.halt()
            self._end_timed_step = self._run_times.end_step
        if self._agreement is not None:
            self._agreement.end()

    @guard.contained(FEATURE)
    def account_for_earlier(self, before: Profile, reason: str) -> None:
        """Note windows that end before the first step as not reached, unless ``before`` accounted for them."""
        if not self._started or self._outcomes.excluded:
            return
        planned = [window["window"] for window in before.windows if isinstance(window["window"], int)]
        accounted = max(planned, default=0)
        later = self._schedule.after(accounted)
        earlier = takewhile(lambda window: window.index <= self._last_finished_index, later)
        self._outcomes.note_not_reached(earlier, reason)

    @property
    def black_box(self) -> BlackBox | None:
        """The black box that times the steps, if the profile has one."""
        return self._profile_box.box if self._profile_box is not None and self._options.black_box else None

    def _request_and_answer(self, request: WindowRequest) -> dict[str, Any]:
        """Make a request; return what `instrument trigger` prints about it.

        Returns:
            ``process``, ``rank``, ``step``; ``records``: whether this rank records the window; ``opens``: whether
            any rank does, as far as this one knows; ``within_s``: the time until then, null for the next step.
        """
        agreed = self._agreement is not None and self._agreement.active
        self.request(request)
        records = self._outcomes.is_chosen(request.ranks)
        elsewhere = request.ranks is None or min(request.ranks) < world_size()
        return {
            "process": self._process,
            "rank": self._outcomes.rank,
            "step": self.step_num,
            "records": records,
            "opens": records or (agreed and elsewhere),
            "within_s": NOTICE_S if agreed else None,
        }

    def _window_of(self, request_id: str) -> dict[str, Any]:
        """Return the window that serves a request, for `instrument trigger`.

        Returns:
            ``run``, ``rank``, ``window``: as in the manifest, and ``folder``: of its files; the last two are null
            until the next step begins or, in a job, the ranks have agreed.
        """
        window, folder = self._served.get(request_id, (None, None))
        return {
            "run": self._outcomes.manifest.run,
            "rank": self._outcomes.rank,
            "window": window,
            "folder": folder,
        }

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(begun=error is None and self.step_num > self._first, error=error)

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The outcome of each window so far, as in ``manifest.jsonl``. Between epochs, waits for the files."""
        if not self._initialized:
            return []
        if self._paused and self._process == os.getpid():
            with guard.contained("ending"):
                self._sender.finish()
        return self._outcomes.manifest.entries

    # The methods of torch.profiler.profile, which apply to the last window

    def export_chrome_trace(self, path: str | os.PathLike[str], use_python_export: bool = False) -> None:
        """Copy the trace of the last window to ``path``, gzipped if it ends in ".gz".

        ``use_python_export``, which torch's own handlers pass from torch 2.13 on, changes nothing.
        """
        self._recorded("export_chrome_trace").export(os.fspath(path))

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the trace of each window that ends from now on."""
        for name, text in (("key", key), ("value", value)):
            if not isinstance(text, str):
                raise TypeError(f'"{name}" must be a string: {text!r}')
        self._metadata[key] = value
        recording = self._recording
        if recording is not None and recording.start_ns is not None and recording.end_ns is None:
            with guard.contained("adding metadata"):
                recording.capture.add_metadata(key, value)

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `torch.profiler.profile.key_averages`: 30 s and 2 GB for 500,000 events."""
        return self._recorded("key_averages").profiler.key_averages(*args, **kwargs)

    def events(self) -> Any:
        """Return the result of `torch.profiler.profile.events`."""
        return self._recorded("events").profiler.events()

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total") -> Any:
        """Export stacks like `torch.profiler.profile.export_stacks`."""
        return self._recorded("export_stacks").profiler.export_stacks(path, metric)

    def export_memory_timeline(self, path: str, device: str | None = None) -> Any:
        """Export the memory timeline like `torch.profiler.profile.export_memory_timeline`."""
        return self._recorded("export_memory_timeline").profiler.export_memory_timeline(path, device)

    def _recorded(self, method: str) -> Any:
        if not hasattr(self._last_capture, "profiler"):
            raise CaptureError(f"{method}: no window was recorded by torch.profiler so far")
        return self._last_capture


class PhaseBlock:
    """A context manager that counts its block as one step of ``profile``, within a region.

    Args:
        name: the name of the region.
        training: the profile of the training loop, whose steps do not count meanwhile.
        profile: the profile of these blocks.
    """

    def __init__(self, name: str, training: Profile, profile: Profile) -> None:
        self._training = training
        self._profile = profile
        self._region = annotate(name)
        self._thread: int | None = None  # whose steps are left out

    def __enter__(self) -> None:
        try:
            with guard.contained(FEATURE):
                self._thread = threading.get_ident()  # first, for an interrupt
                self._training.suspend_steps(self._thread)
                self._profile.start()
            self._region.__enter__()
        except BaseException:
            self._resume()
            raise

    @guard.contained(FEATURE)
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self._region.__exit__(kind, error, traceback)
            if error is None:
                self._profile.step()
            self._profile.pause(begun=error is None, cut=error is not None, error=error, wait=False)
        finally:
            self._resume()

    def _resume(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._training.resume_steps(thread)


DEPTH = 4
"""How many levels of modules below a model are regions, unless the user says."""
STEP_PARTS = ("optimizer", "data", "backward", "clipping", "collectives")
"""The parts of a step that are regions beside the modules."""


def models_in(modules: nn.Module | Iterable[nn.Module] | None) -> list[nn.Module]:
    """Return the models that the argument ``modules`` names.

    Raises:
        TypeError: it is neither a module nor several.
    """
    if modules is None:
        return []
    kind = getattr(sys.modules.get("torch.nn"), "Module", ())  # before torch is imported, nothing can be one
    several = not isinstance(modules, kind) and isinstance(modules, Iterable) and not isinstance(modules, str)
    models = list(modules) if several else [modules]  # type: ignore[arg-type]
    if not all(isinstance(model, kind) for model in models):
        raise TypeError(f'"modules" must be a torch.nn.Module, or several: {modules!r:.200}')
    return models  # type: ignore[return-value]


class StepRegions:
    """Annotates models and their steps from `attach` to `remove`; keeps no model alive."""

    def __init__(self) -> None:
        self._models = IdentitySet()
        self._attached = IdentitySet()
        self._handles: list[Any] = []

    def add(self, models: Iterable[nn.Module]) -> None:
        """Annotate ``models`` as well, from the next `attach` on."""
        for model in models:
            self._models.add(model)

    @guard.contained("annotating modules")
    def attach(self) -> None:
        """Annotate the models that are not annotated yet."""
        new = [model for model in self._models if model not in self._attached]
        if not new:
            return
        from ..modules.installer import annotate_modules  # imports torch
        from ..modules.parts import annotate_step

        if not self._handles:
            self._handles.append(annotate_step(*STEP_PARTS))
        for model in new:
            self._attached.add(model)
            self._handles.append(annotate_modules(model, DEPTH, names="class"))

    def remove(self) -> None:
        """Undo it; `attach` may follow."""
        self._attached.clear()
        while self._handles:
            self._handles.pop().remove()
