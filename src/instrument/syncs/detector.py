"""`SyncDetector`: from its start to its stop, which lines wait; step by step, at its level, within its budget."""

from __future__ import annotations

import threading
from typing import Any

from .. import log
from ..findings import Finding, Site
from ..guard import guard
from ..regions.dispatch import active
from ..regions.path import RegionPath
from . import coverage
from .budget import Budget
from .events import SyncEvent
from .monitor import monitor
from .recorder import Recorder, Steps, SyncListener, describe
from .report import SyncReport

FIRST = 3  # steps that are looked at in any case
_SHOWN = 20  # findings in the log


class SyncDetector(SyncListener):
    """Finds waits from `start` to `stop`; made by `detect_syncs`. Each start begins anew."""

    def __init__(self, level: str, budget: Budget | None, every: int) -> None:
        super().__init__()
        self._level = level
        self._budget = budget
        self._every = every
        self._path = RegionPath()
        self._follower: Any = None  # counts the steps, until `step` is called
        self._told = False  # it was
        self._explanation: str | None = None  # of what a step is
        self._starts = 0
        self._running = False
        self._armed = False
        self._why: str | None = "not started"  # nothing is looked for
        self._traced = self._error_mode = False
        self._said: set[tuple[Site | None, str]] = set()

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, worst first."""
        return self.report.findings

    @property
    def report(self) -> SyncReport:
        """What was found so far, and what could not be."""
        recorder = self.recorder
        why = self._why or self._unused()
        covered = coverage.sentences(
            why, traced=self._traced, error_mode=self._error_mode, every=self._every, steps=recorder.steps
        )
        explanation = self._explanation if self._follower is None else self._follower.explanation
        covered += [explanation] if explanation else []
        return SyncReport(
            "live", recorder.findings, recorder.steps, covered, dropped=recorder.dropped,
            unavailable_reason=why or "", budgeted=self._budget is not None,
            exceeded=[] if self._budget is None else self._budget.exceeded(recorder.steps),
        )  # fmt: skip

    def start(self) -> None:
        """Begin, with nothing found; inside of itself it goes on, until the outermost `stop`."""
        self._starts += 1
        if self._starts > 1:
            return
        self._path = RegionPath()
        self.recorder = Recorder(self._path.names)
        self._said.clear()
        self.clear_pending()
        self._why = coverage.missing()
        if self._why is not None:
            if self._why == coverage.NO_GPU:
                log.warning(self._why)
            return
        self._running, self._told, self._explanation = True, False, None
        self.recorder.step = 0
        if self._budget is not None:
            self._budget.clear()
        with guard.contained("following the steps"):
            from ..stepping.follower import StepFollower  # which imports torch

            self._follower = StepFollower(self._follower_stepped, self._restarted)
            self._follower.follow()
        self._arm()

    def stop(self) -> None:
        """End, and log what was found at level "log".

        Raises:
            SyncError: for a wait that could not be raised where it happened, at level "error".
        """
        if self._last() and self._running:
            self._end()
            self.raise_pending()

    def step(self) -> None:
        """Tell that a step ended and the next begins."""
        if not self._running:
            return
        if not self._told:
            self._told = True
            self._unhook()
            self._restarted()
        self._next_step(counts=True)

    def __enter__(self) -> SyncDetector:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        elif self._last() and self._running:  # nothing may hide that error
            self._end()

    def _unused(self) -> str | None:
        """Return why nothing was found where the program did not initialize CUDA while it was looked for."""
        return coverage.unused() if self._running and self.recorder.empty else None

    def _last(self) -> bool:
        self._starts = max(self._starts - 1, 0)
        return not self._starts

    def check(self, event: SyncEvent, thread: int) -> None:
        """Take note of ``event`` where the level says so, or a budget is exceeded."""
        if event.allowed is not None:
            return
        held, exceeded = self._budget.spend(event) if self._budget is not None else (False, None)
        if (held and exceeded is None) or (exceeded is None and self._level == "log"):
            return
        text = describe(event) + (f"; {exceeded}" if exceeded else "")
        if self._level == "error":
            self.queue(text, event, thread, error=True)
            return
        key = (event.site, event.op)
        if key in self._said:
            return
        self._said.add(key)
        if self._level == "warn":
            self.queue(text, event, thread, error=False)
        else:
            log.warning(text)

    def _arm(self) -> None:
        with guard.contained("looking for waits"):
            active.add(self._path)
            self._armed = True
            monitor.add(self)
            self._traced, self._error_mode = monitor.traced, monitor.error_mode

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            monitor.remove(self)
            active.remove(self._path)

    def _unhook(self) -> None:
        if self._follower is not None:
            self._explanation = self._follower.explanation
            self._follower.remove()
            self._follower = None

    def _end(self) -> None:
        self._why = self._unused()
        if self._why is not None:
            log.warning(self._why)
        self._running = False
        self._unhook()
        self._disarm()
        if self.recorder.steps:
            self._relabel(None, self.recorder.step)  # the rest after the last step is none
        if self._level == "log":
            self._log()

    def _restarted(self) -> None:
        """All that ended so far is a part of the first step."""
        self.recorder.step = self.recorder.steps = 0
        self._relabel(0)

    def _follower_stepped(self) -> None:
        """Go on to the next step; what came before the end of the first one is a part of one only."""
        first = self.recorder.step == 0
        if first:
            monitor.flush()
            self._relabel(None, 0)
        self._next_step(counts=not first)

    def _next_step(self, *, counts: bool) -> None:
        if self._armed:
            monitor.flush()
            self.recorder.steps += counts
        self.recorder.step = number = (self.recorder.step or 0) + 1
        if self._budget is not None:
            self._budget.next_step()
        wanted = number < FIRST or number % self._every == 0
        if wanted and not self._armed:
            self._arm()
        elif not wanted:
            self._disarm()
        self.raise_pending(threading.get_ident())

    def _relabel(self, new: int | None, old: int | None = None) -> None:
        """Count the waits of step ``old``, or of all, to ``new``."""

        def assign(steps: Steps) -> Steps:
            for step in [old] if old is not None else list(steps):
                waits = steps.pop(step, 0)
                if waits:
                    steps[new] += waits
            return steps

        self.recorder.reassign_steps(assign)

    def _log(self) -> None:
        report = self.report
        syncs = report.syncs
        for found in syncs[:_SHOWN]:
            blocked = f"{found.blocked_ns / 1e6:.3f} ms" if found.blocked_ns is not None else "unknown"
            log.warning(
                "the CPU waited for the GPU", at=found.site or found.via or found.thread, op=found.op,
                count=found.count, blocked=blocked, often=str(report.pattern(found)),
            )  # fmt: skip
        if len(syncs) > _SHOWN:
            log.warning("the CPU waited for the GPU at more lines than shown", lines=len(syncs) - _SHOWN)
