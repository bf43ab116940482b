"""`Loop`: windows, regions and synchronizations of a framework's loop; what `instrument run` requests."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import instrument

from ..base import log
from ..base.config import RUN
from ..base.guard import guard, uncaught_error
from ..base.live_objects import IdentitySet
from ..record.planning.schedule import NOTHING, Schedule, StepAction
from ..record.windows.api import DEPTH, STEP_PARTS, Driver, new_profile
from ..record.windows.profile import Profile
from ..record.windows.steps import SCHEDULE_OPTIONS, asked, schedule_of

FEATURE = "following the framework"


class Loop:
    """Driven by an adapter: `start`, then `step` after each optimizer step, then `stop`.

    No method raises into the framework, except for a `SyncError` that was requested. `stop` closes what an error
    in a step left open; the process calls `stop` at its end if nothing else did.

    Args:
        out: the folder that windows are written to.
        modules: regions of the model's modules: how many levels below the model, None for all, False for none.
        names: how these regions are named, as in `instrument.annotate_modules`.
        syncs: whether to detect lines that make the CPU wait for the GPU: False, or a level of
            `instrument.detect_syncs` ("log", "warn", "error"); True is "log".
        budget: how many synchronizations a step may make, as in `instrument.detect_syncs`; on its own it turns
            ``syncs`` on.
        record: whether to open windows; without them there are regions, for other profilers, synchronizations, and
            the numbers of ``on_steps``.
        recording: the schedule (``wait``, ``warmup``, ``active``, ``repeat``, ``at``, ``every``, ``schedule``,
            ...)
            and the arguments of `instrument.profile` (``on_summary``, ``exporter``, ...), as for
            `instrument.steps`.

    Raises:
        TypeError, ValueError: an argument that is not accepted; the message gives its name and value.

    Attributes:
        models: the models that `name` was called with, until `stop`.
        parts: the parts of a step outside the model that become regions.
        record: whether the loop has a profile that counts its steps.
        labels_evaluation: whether regions of modules in evaluation mode are marked "(eval)", for loops whose
            evaluations cannot be followed.
        on_framework_start: called once, when a framework starts this loop and counts its steps from then on.
    """

    _current: ClassVar[Loop | None] = None  # only one runs at a time: two would record each other's windows
    requested: ClassVar[AutomaticLoop | None] = None  # the one that `instrument run` requests for this process
    automatic = False
    initialized = False  # a loop with wrong arguments never starts
    models = IdentitySet()
    parts: tuple[str, ...] = STEP_PARTS
    _arguments: tuple[Any, dict[str, Any]] = "runs/instrument", {"modules": False, "record": False}
    _open: list[tuple[str, Any]] = []  # noqa: RUF012  # each loop has its own
    _has_schedule = True
    labels_evaluation = False
    on_framework_start: Callable[[], None] | None = None
    has_begun = False
    running = False
    record = True

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        modules: int | bool | None = DEPTH,
        names: str = "class",
        syncs: bool | str = False,
        budget: int | Mapping[str, int] | None = None,
        record: bool = True,
        **recording: Any,
    ) -> None:
        if modules is True or (modules is not None and not isinstance(modules, int)) or (modules or 0) < 0:
            raise ValueError(f'"modules" must be a number of levels >= 0, None for all, or False: {modules!r}')
        if names not in ("path", "class", "both"):
            raise ValueError(f'"names" must be "path", "class" or "both": {names!r}')
        given = {"modules": modules, "names": names, "syncs": syncs, "budget": budget, "record": record}
        self._arguments = out, given | recording
        named = {name: recording.pop(name) for name in SCHEDULE_OPTIONS if name in recording}
        self._has_schedule = any(value is not None for value in (*named.values(), recording.get("schedule")))
        self._recording = {
            "out": out,
            "schedule": schedule_of(recording.pop("schedule", None), named, requested=asked(recording)),
            **recording,
        }
        self._profile: Profile = self._new_profile()
        if not record:
            self.record_nothing()
        self._modules = modules
        self._names = names
        self._syncs = None
        if syncs or budget is not None:
            level = "log" if syncs in (True, False) else str(syncs)
            self._syncs = instrument.detect_syncs(level, budget=budget)
        self._earlier_windows: list[dict[str, Any]] = []  # the outcomes of the windows of earlier runs
        self.models = IdentitySet()
        self._handles: list[Any] = []
        self._open = []
        self.initialized = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, made with the framework's object that holds the loop, starts afresh
        return _new_loop, self._arguments

    @classmethod
    def current(cls) -> Loop | None:
        """Return the loop that runs now."""
        return cls._current

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The outcome of each window so far, as in ``manifest.jsonl``."""
        return [*self._earlier_windows, *self._profile.windows] if self.initialized else []

    @property
    def manifest(self) -> Path:
        """The file that holds the outcome of each window."""
        return self._profile.out / "manifest.jsonl"

    @property
    def finished(self) -> bool:
        """Whether no window is open or to come."""
        return self._profile.finished

    @property
    def recording_thread(self) -> int | None:
        """The thread that records a window, which only that thread can end; None if none does."""
        return self._profile.recording_thread

    def records(self, step: int) -> bool:
        """Return whether ``step`` is recorded, or is warm-up for a recorded step."""
        schedule = self._recording["schedule"]
        return isinstance(schedule, Schedule) and schedule.at(step)[0] is not StepAction.WAIT

    def suggest(self, schedule: Any, **options: Any) -> bool:
        """Use the schedule in the framework's own arguments, unless this loop has one or has begun.

        Args:
            schedule: the steps to record, as for `instrument.profile`.
            options: further arguments of `instrument.profile`; those of this loop take precedence.

        Raises:
            TypeError, ValueError: as `instrument.profile`.
        """
        if self._has_schedule or self.has_begun:
            return False
        recording = {**options, **self._recording, "schedule": schedule}
        before, self._recording = self._recording, recording
        try:
            self._profile = self._new_profile()
        except (TypeError, ValueError):
            self._recording = before
            raise
        return True

    def record_nothing(self) -> None:
        """Open no window from the next `start` on, as when another profiler records."""
        self.record = bool(self._recording.get("on_steps"))
        if self.record:
            self._recording |= {"schedule": NOTHING, "triggers": (), "black_box": False}
            self._profile = self._new_profile()

    @guard.contained(FEATURE)
    def start(self, *models: Any, first_step: int | None = None, steps: bool = True, late: bool = False) -> None:
        """Begin, and annotate ``models``.

        Args:
            models: as for `name`.
            first_step: the number of the next step; more than 0 when a run is resumed. None is 0, or after `stop`
                the step that comes next. The schedule starts over if this is not the step that comes next.
            steps: whether steps will follow; an evaluation on its own has only regions.
            late: the first step began earlier, at a time that is not known.
        """
        if not self.initialized:
            return
        other = Loop._current
        if not self.automatic and Loop.requested is not None:
            Loop.requested.warn_if_ignored()
        if steps and self.on_framework_start is not None:
            self.on_framework_start()
            self.on_framework_start = None
        if self.running or (self.automatic and other is not None):
            return
        if other is not None and other.automatic:
            other.stop()
        self.running, Loop._current = True, self
        self._handles.append(instrument.annotate_step(*self.parts))
        self.name(*models)
        if not steps:
            return
        if first_step not in (None, self._profile.step_num):  # another run, with the same schedule
            self._earlier_windows += self._profile.windows
            self._profile = self._new_profile(first_step=first_step)
        self.has_begun = True
        self._begin(late)
        if self._syncs is not None:
            self._syncs.start()

    @guard.contained(FEATURE)
    def restart(self, first_step: int, reason: str, *, late: bool = True) -> None:
        """Give up an open window for ``reason`` and start the schedule over at ``first_step``, as `start` does.

        Planned windows before that step are noted as not reached, for the same ``reason``.
        """
        if self.running:
            before = self._profile
            before.abandon(reason)
            self._earlier_windows += before.windows
            self._profile = self._new_profile(first_step=first_step)
            self._begin(late)
            if self.record:
                self._profile.account_for_earlier(before, reason)

    def _new_profile(self, **arguments: Any) -> Profile:
        hint = "--steps {}" if self.automatic else 'at="{}"'
        driver = Driver(steps_hint=hint, preemptible=self.automatic, keeps_events=False)
        return new_profile(driver, **{**self._recording, **arguments})

    def _begin(self, late: bool) -> None:
        if self.record:
            self._profile.start(late=late)

    @guard.contained(FEATURE)
    def name(self, *models: Any) -> None:
        """Annotate the modules of ``models`` until `stop`."""
        for model in models:
            with guard.contained(FEATURE):
                if self.initialized and model not in self.models:
                    depth, names, modes = self._modules, self._names, self.labels_evaluation
                    if depth is not False:
                        self._handles.append(instrument.annotate_modules(model, depth, names=names, modes=modes))
                    self.models.add(model)

    def between_steps(self) -> bool:
        """End the recorded step, as `Profile.between_steps` does."""
        return self._profile.between_steps()

    def own_work(self) -> AbstractContextManager[None]:
        """Mark the body as the library's own work, as `Profile.own_work` does."""
        return self._profile.own_work()

    @guard.contained(FEATURE)
    def step(self) -> None:
        """Count an optimizer step: the current one ended, the next one begins."""
        if self.running:
            self._profile.step()
            if self._syncs is not None:
                self._syncs.step()

    @property
    def step_num(self) -> int:
        """The number of the current step."""
        return self._profile.step_num

    @guard.contained(FEATURE)
    def begin_epoch(self, step: int | None = None) -> None:
        """Note that ``step``, by default the current one, is the first of an epoch."""
        if self.running:
            self._profile.begin_epoch(step)

    @guard.contained(FEATURE)
    def end_epoch(self) -> None:
        """Report the steps since the last call of the functions of ``on_steps``."""
        self._profile.report_rest()

    @guard.contained(FEATURE)
    def pause(self) -> None:
        """Write an open window and print the summary so far, where no step may follow; `resume` goes on."""
        if self.running and self.record:
            self._profile.pause(begun=True)

    @guard.contained(FEATURE)
    def resume(self) -> None:
        """Go on after `pause`."""
        if self.running:
            self._begin(late=False)

    @guard.contained(FEATURE)
    def stop(self, *, complete: bool = False, interrupted: str = "") -> None:
        """Close every open region, write an open window, and remove every hook.

        Args:
            complete: the current step ran to its end without a call of `step`.
            interrupted: what interrupted the current step, for the manifest.
        """
        if not self.running:
            return
        self.running = False
        if Loop._current is self:
            Loop._current = None
        with guard.contained(FEATURE):
            inside = self.is_open("step")  # an error left it
            self.leave_all()
            self._profile.end(
                begun=not (complete or inside or interrupted),
                complete=complete,
                error=interrupted or (sys.exc_info()[1] or uncaught_error() if inside else None),
            )
        while self._handles:
            with guard.contained(FEATURE):
                self._handles.pop().remove()
        self.models.clear()
        if self._syncs is not None:
            with guard.contained(FEATURE):
                self._syncs.stop()

    def leave_out_part(self, part: str) -> None:
        """Open no region for ``part`` of a step, as the framework's adapter opens it."""
        self.parts = tuple(other for other in self.parts if other != part)

    @guard.contained(FEATURE)
    def enter(self, name: str) -> None:
        """Open the region ``name``, for a later call of `leave` to close."""
        if self.running:
            region = instrument.annotate(name)
            region.__enter__()
            self._open.append((name, region))

    def is_open(self, name: str) -> bool:
        """Return whether the region ``name`` is open."""
        return any(name == other for other, _ in self._open)

    @guard.contained(FEATURE)
    def leave(self, name: str) -> None:
        """Close the region ``name`` and regions that an error left open in it; do nothing if it is not open."""
        while self.is_open(name):
            inner, region = self._open.pop()
            region.__exit__(None, None, None)
            if inner == name:
                return

    @guard.contained(FEATURE)
    def leave_all(self) -> None:
        """Close every region."""
        for name, _ in reversed(self._open.copy()):
            self.leave(name)
        self._open.clear()

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Open the region ``name`` around the body."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)


def _new_loop(out: str | os.PathLike[str], given: dict[str, Any]) -> Loop:
    return Loop(out, **given)


class AutomaticLoop(Loop):
    """The loop that `instrument run` requests for a program: it stops when the program starts a loop of its own.

    Args:
        step_on: what ends a step, as for `StepFollower`; None for the best sign that the program gives.
        run_options: the options of `instrument run` that made this loop, as they were typed.
        given: as for `Loop`.

    Attributes:
        step_on: as given.
    """

    automatic = True

    def __init__(self, *, step_on: str | None = None, run_options: Sequence[str] = (), **given: Any) -> None:
        super().__init__(**given)
        self.step_on = step_on
        self._run_options = run_options

    def warn_if_ignored(self) -> None:
        """Warn once about options of `instrument run` that the program's own windows make useless."""
        if self._run_options:
            log.warning(
                f"the program records windows of its own, so these are ignored: {' '.join(self._run_options)}"
            )
            self._run_options = ()


@functools.cache
def loop_from_environment() -> AutomaticLoop | None:
    """Return the loop that the environment requests; None if it requests none.

    The adapters that ``instrument run`` attaches drive this loop, which yields to a loop of the program's own.
    """
    text = os.environ.get(RUN)
    if not text:
        return None
    try:
        loop = _loop(**json.loads(text))
    except (TypeError, ValueError) as error:  # an environment variable must not stop a training job
        log.warning(f"{RUN} is ignored", reason=str(error))
        return None
    if not loop.initialized:
        return None
    Loop.requested = loop
    return loop


def _loop(**given: Any) -> AutomaticLoop:
    """Return the loop of the arguments ``given``, in which ``keep`` and ``memory`` have those of a function."""
    made: dict[str, Callable[..., Any]] = {"keep": instrument.keep, "memory": instrument.memory_history}
    return AutomaticLoop(**{name: made[name](**value) if name in made else value for name, value in given.items()})
