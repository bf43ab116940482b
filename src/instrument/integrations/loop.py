"""`Loop`: windows, regions and waits of a training loop that a framework runs and tells of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import instrument

from .. import log
from ..guard import guard
from ..identity import IdentitySet
from ..windows.profile import Profile
from ..windows.schedule import Phase, Schedule
from ..windows.steps import PLAN, planned

FEATURE = "following the framework"
STEP_PARTS = ("optimizer", "data", "backward", "clipping", "collectives")


class Loop:
    """What an adapter drives: `start`, then `step` after each optimizer step, then `stop`.

    No method raises into the framework, but for a `SyncError` that was asked for; what is on when a step raises is
    left by `stop`, which the process calls at its end if nobody did.

    Args:
        out: the folder that windows land in.
        modules: regions of the model's modules: how many levels below the model, None for all, False for none.
        names: what these are called, as in `instrument.annotate_modules`.
        syncs: look for lines that wait for the GPU: False, or a level of `instrument.detect_syncs` ("log",
            "warn", "error"); True is "log".
        budget: waits that a step may make, as in `instrument.detect_syncs`; given alone it turns ``syncs`` on.
        tell: called with the text of the summary; standard error by default.
        record: open windows; without, there are regions for whoever else records, and waits.
        recording: the plan (``wait``, ``warmup``, ``active``, ``repeat``, ``at``, ``every``, ``schedule``, ...)
            and the options of `instrument.profile`, as for `instrument.steps`.

    Raises:
        TypeError, ValueError: arguments that are none of these.

    Attributes:
        models: those that `name` was called with, until `stop`.
    """

    _current: ClassVar[Loop | None] = None  # one at a time, or each would spoil the other's windows
    requested: ClassVar[Loop | None] = None  # by the environment, for this process
    made = False  # one that could not be made never starts
    models = IdentitySet()
    _given: tuple[Any, dict[str, Any]] = "runs/instrument", {"modules": False, "record": False}
    _open: list[tuple[str, Any]] = []  # noqa: RUF012  # each has its own
    _planned = True
    automatic = False  # nobody wrote it: it gives way to one that somebody did
    begun = False
    modes = False  # modules in evaluation mode are "(eval)": for loops that do not tell evaluations
    running = False
    record = True

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        modules: int | bool | None = 4,
        names: str = "class",
        syncs: bool | str = False,
        budget: int | Mapping[str, int] | None = None,
        tell: Callable[[str], None] | None = None,
        record: bool = True,
        **recording: Any,
    ) -> None:
        if modules is True or (modules is not None and not isinstance(modules, int)) or (modules or 0) < 0:
            raise ValueError(f'"modules" must be a number of levels >= 0, None for all, or False: {modules!r}')
        if names not in ("path", "class", "both"):
            raise ValueError(f'"names" must be "path", "class" or "both": {names!r}')
        if tell is not None and not callable(tell):
            raise TypeError(f'"tell" must be a function of the text: {tell!r}')
        given = {"modules": modules, "names": names, "syncs": syncs, "budget": budget, "tell": tell}
        self._given = out, given | {"record": record} | recording
        plan = {name: recording.pop(name) for name in PLAN if name in recording}
        self._planned = any(value is not None for value in (*plan.values(), recording.get("schedule")))
        self._recording = {"out": out, "schedule": planned(recording.pop("schedule", None), plan), **recording}
        self.record = record
        self._profile: Profile = self._new_profile()
        self._modules = modules
        self._names = names
        self._syncs = None
        if syncs or budget is not None:
            level = "log" if syncs in (True, False) else str(syncs)
            self._syncs = instrument.detect_syncs(level, budget=budget)
        self._tell = tell
        self._before: list[dict[str, Any]] = []  # what came of the windows of earlier runs
        self.models = IdentitySet()
        self._handles: list[Any] = []
        self._open = []
        self.step_on: str | None = None  # what ends the steps of an automatic one, as `StepFollower` takes it
        self.run_options: list[str] = []  # as typed, where `instrument run` made the loop
        # Of a step outside the model, which are regions; a framework may name some itself.
        self.parts: tuple[str, ...] = STEP_PARTS
        self.until_told: Callable[[], None] | None = None  # ends who tells the steps for want of a framework
        self.made = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, self._given  # a copy, as of the framework's object that holds this, begins anew

    @classmethod
    def current(cls) -> Loop | None:
        """Return the loop that runs now."""
        return cls._current

    @property
    def windows(self) -> list[dict[str, Any]]:
        """What came of each window so far, as in ``manifest.jsonl``."""
        return [*self._before, *self._profile.windows] if self.made else []

    @property
    def manifest(self) -> Path:
        """The file that says what came of each window."""
        return self._profile.out / "manifest.jsonl"

    @property
    def over(self) -> bool:
        """Whether no window is open or to come."""
        return not self.made or self._profile.over

    def records(self, step: int) -> bool:
        """Tell whether ``step`` is recorded, or warmed up for it."""
        schedule = self._recording["schedule"] if self.made else None
        return isinstance(schedule, Schedule) and schedule.at(step)[0] is not Phase.WAIT

    def suggest(self, schedule: Any, **options: Any) -> bool:
        """Take the plan that the framework was asked for, unless this was given one of its own or began.

        Args:
            schedule: the plan, as for `instrument.profile`.
            options: further arguments of `instrument.profile`, where these were not given.

        Raises:
            TypeError, ValueError: as `instrument.profile`.
        """
        if self._planned or self.begun:
            return False
        recording = {**options, **self._recording, "schedule": schedule}
        before, self._recording = self._recording, recording
        try:
            self._profile = self._new_profile()
        except (TypeError, ValueError):
            self._recording = before
            raise
        return True

    @guard.contained(FEATURE)
    def start(self, *models: Any, first_step: int | None = None, steps: bool = True, late: bool = False) -> None:
        """Begin: ``first_step`` is the number of the next step, more than 0 when a run is resumed.

        Without it the first step is 0, and after `stop` counting goes on from there; where it is another than the
        one to come, the plan begins anew. Where no ``steps`` will come, as in an evaluation by itself, there are
        regions alone. ``late``: nothing tells when the first step began, as for `Profile.late`.
        """
        if not self.made:
            return
        other = Loop._current
        if not self.automatic and Loop.requested is not None:
            Loop.requested.give_way()
        if steps and self.until_told is not None:
            self.until_told()
            self.until_told = None
        if self.running or (self.automatic and other is not None):
            return
        if other is not None and other.automatic:
            other.stop()
        self.running, Loop._current = True, self
        self._handles.append(instrument.annotate_step(*self.parts))
        self.name(*models)
        if not steps:
            return
        if first_step not in (None, self._profile.step_num):  # another run, with the same plan
            self._before += self._profile.windows
            self._profile = self._new_profile(first_step=first_step)
        self.begun = True
        self._begin(late)
        if self._syncs is not None:
            self._syncs.start()

    @guard.contained(FEATURE)
    def restart(self, first_step: int, reason: str) -> None:
        """Abandon an open window, for ``reason``, and start the plan over at ``first_step``, late.

        Planned windows that lie before that step are not reached, for the same ``reason``.
        """
        if self.running:
            before = self._profile
            before.abandon(reason)
            self._before += before.windows
            self._profile = self._new_profile(first_step=first_step)
            self._begin(late=True)
            if self.record:
                self._profile.account_for_earlier(before, reason)

    def _new_profile(self, **arguments: Any) -> Profile:
        made: Profile = instrument.profile(**self._recording, **arguments)
        made.keep_last = False
        return made

    def _begin(self, late: bool) -> None:
        profile = self._profile
        profile.late = late
        profile.tell, profile.yields = self._tell, self.automatic
        profile.how = "--steps {}" if self.automatic else 'at="{}"'
        if self.record:
            profile.start()

    @guard.contained(FEATURE)
    def name(self, *models: Any) -> None:
        """Make the modules of ``models`` regions, until `stop`."""
        for model in models:
            with guard.contained(FEATURE):
                if self.made and model not in self.models:
                    depth, names, modes = self._modules, self._names, self.modes
                    if depth is not False:
                        self._handles.append(instrument.annotate_modules(model, depth, names=names, modes=modes))
                    self.models.add(model)

    def between_steps(self) -> bool:
        """End the recorded step, as `Profile.between_steps` does."""
        return not self.made or self._profile.between_steps()

    def own_work(self) -> AbstractContextManager[None]:
        """Mark the body as the library's own work, as `Profile.own_work` does."""
        return self._profile.own_work() if self.made else nullcontext()

    @guard.contained(FEATURE)
    def step(self) -> None:
        """Tell that an optimizer step ended and the next begins."""
        if self.running:
            self._profile.step()
            if self._syncs is not None:
                self._syncs.step()

    @guard.contained(FEATURE)
    def stop(self, *, complete: bool = False, interrupted: bool = False) -> None:
        """End: close what is open, write what was recorded, take every hook out.

        Args:
            complete: the current step ran to its end, though `step` did not say so.
            interrupted: the current step was running.
        """
        if not self.running:
            return
        self.running = False
        if Loop._current is self:
            Loop._current = None
        with guard.contained(FEATURE):
            inside = any(name == "step" for name, _ in self._open)  # an error left it
            self.leave_all()
            self._profile.end(begun=not (complete or inside or interrupted), complete=complete)
            self._profile.step_num += complete
        while self._handles:
            with guard.contained(FEATURE):
                self._handles.pop().remove()
        self.models.clear()
        if self._syncs is not None:
            with guard.contained(FEATURE):
                self._syncs.stop()

    def give_way(self) -> None:
        """Say once which options of `instrument run` the program's own windows leave without effect."""
        if self.run_options:
            log.warning(
                f"the program records windows of its own, so these are ignored: {' '.join(self.run_options)}"
            )
            self.run_options = []

    @guard.contained(FEATURE)
    def enter(self, name: str) -> None:
        """Open the region ``name``, which another call of the framework closes with `leave`."""
        if self.running:
            region = instrument.annotate(name)
            region.__enter__()
            self._open.append((name, region))

    @guard.contained(FEATURE)
    def leave(self, name: str) -> None:
        """Close the region ``name`` and what an error left open in it; nothing where it is not open."""
        while any(name == other for other, _ in self._open):
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
        """Make the body the region ``name``."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)


def _again(out: str | os.PathLike[str], given: dict[str, Any]) -> Loop:
    return Loop(out, **given)
