"""`Loop`: windows, regions and waits of a training loop that a framework runs and tells of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import instrument

from ..errors import SyncError
from ..guard import guard
from ..windows.steps import PLAN, planned

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
        recording: the plan (``wait``, ``warmup``, ``active``, ``repeat``, ``at``, ``every``, ``schedule``, ...)
            and the options of `instrument.profile`, as for `instrument.steps`.

    Raises:
        TypeError, ValueError: arguments that are none of these.
    """

    _current: ClassVar[Loop | None] = None  # one at a time, or each would spoil the other's windows

    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        modules: int | bool | None = 4,
        names: str = "class",
        syncs: bool | str = False,
        budget: int | Mapping[str, int] | None = None,
        tell: Callable[[str], None] | None = None,
        **recording: Any,
    ) -> None:
        if modules is True or (modules is not None and not isinstance(modules, int)) or (modules or 0) < 0:
            raise ValueError(f'"modules" must be a number of levels >= 0, None for all, or False: {modules!r}')
        if names not in ("path", "class", "both"):
            raise ValueError(f'"names" must be "path", "class" or "both": {names!r}')
        plan = {name: recording.pop(name) for name in PLAN if name in recording}
        self._recording = {"out": out, "schedule": planned(recording.pop("schedule", None), plan), **recording}
        self._profile = instrument.profile(**self._recording)
        self._profile.keep_last = False
        self._modules = modules
        self._names = names
        self._syncs = None
        if syncs or budget is not None:
            level = "log" if syncs in (True, False) else str(syncs)
            self._syncs = instrument.detect_syncs(level, budget=budget)
        self._tell = tell
        self._models: list[Any] = []  # that have regions
        self._handles: list[Any] = []
        self._open: list[tuple[str, Any]] = []
        self._begun = False
        self.automatic = False  # nobody wrote it: it gives way to one that somebody did
        self.running = False

    @property
    def windows(self) -> list[dict[str, Any]]:
        """What came of each window so far, as in ``manifest.jsonl``."""
        return self._profile.windows

    def start(self, *models: Any, first_step: int = 0) -> None:
        """Begin: ``first_step`` is the number of the next step, more than 0 when a run is resumed.

        After `stop` it goes on counting from there.
        """
        with self._contained():
            other = Loop._current
            if self.running or (self.automatic and other is not None):
                return
            if other is not None and other.automatic:
                other.stop()
            self.running, Loop._current = True, self
            self._handles.append(instrument.annotate_step(*STEP_PARTS))
            self.name(*models)
            if first_step and not self._begun:
                self._profile = instrument.profile(**self._recording, first_step=first_step)
                self._profile.keep_last = False
            self._profile.tell = self._tell
            self._begun = True
            self._profile.start()
            if self._syncs is not None:
                self._syncs.start()

    def name(self, *models: Any) -> None:
        """Make the modules of ``models`` regions, until `stop`."""
        for model in models:
            with self._contained():
                if self._modules is not False and all(model is not other for other in self._models):
                    self._handles.append(instrument.annotate_modules(model, self._modules, names=self._names))
                    self._models.append(model)

    def step(self) -> None:
        """Tell that an optimizer step ended and the next begins."""
        with self._contained():
            if self.running:
                self._profile.step()
                if self._syncs is not None:
                    self._syncs.step()

    def stop(self, *, complete: bool = False) -> None:
        """End: close what is open, write what was recorded, take every hook out.

        Args:
            complete: the current step ran to its end, though `step` did not say so.
        """
        if not self.running:
            return
        self.running = False
        if Loop._current is self:
            Loop._current = None
        with self._contained():
            self.leave_all()
            self._profile.end(begun=not complete, complete=complete)
        while self._handles:
            with self._contained():
                self._handles.pop().remove()
        self._models.clear()
        if self._syncs is not None:
            with self._contained():
                self._syncs.stop()

    def enter(self, name: str) -> None:
        """Open the region ``name``, which another call of the framework closes with `leave`."""
        with self._contained():
            if self.running:
                region = instrument.annotate(name)
                region.__enter__()
                self._open.append((name, region))

    def leave(self, name: str) -> None:
        """Close the region ``name`` and what an error left open in it; nothing where it is not open."""
        with self._contained():
            while any(name == other for other, _ in self._open):
                inner, region = self._open.pop()
                region.__exit__(None, None, None)
                if inner == name:
                    return

    def leave_all(self) -> None:
        """Close every region."""
        while self._open:
            self.leave(self._open[-1][0])

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Make the body the region ``name``."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    @staticmethod
    @contextmanager
    def _contained() -> Iterator[None]:
        try:
            yield
        except SyncError:  # asked for, by level "error"
            raise
        except Exception as error:
            guard.failed("following the framework", error)
