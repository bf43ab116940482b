"""`detect_syncs` and `no_syncs`: finds or forbids the synchronizations of a program while it runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ..base import log
from ..base.findings import Site, SyncFinding
from ..base.guard import guard
from ..base.patch import transparent
from ..base.units import integer
from ..explain.waits.comments import mistaken_comments
from ..explain.waits.events import CountByStep, SyncEvent
from ..explain.waits.report import SyncReport
from ..record.regions import dispatch as regions
from ..record.regions.dispatch import active
from ..record.regions.emitters import RegionPath
from ..record.slow_steps.step_reports import sync_totals
from . import coverage, policy
from .budget import Budget
from .listener import LiveRecorder, SyncListener, describe
from .monitor import monitor

ALWAYS_CHECKED_STEPS = 3  # steps that are always checked
_MAX_LOGGED = 20  # findings in the log


class SyncDetector(SyncListener):
    """Finds synchronizations from `start` to `stop`; each start drops earlier findings."""

    def __init__(self, level: str, budget: Budget, every: int) -> None:
        super().__init__()
        self._level = level
        self._budget = budget
        self._every = every
        self._path = RegionPath()
        self._follower: Any = None  # counts steps until `step` is called
        self._explanation: str | None = None  # what counts as a step
        self._starts = 0
        self._running = False
        self._attached = False
        self._unavailable: str | None = "not started"  # why nothing is checked
        self._traced = self._error_mode = False
        self._warned: set[tuple[Site | None, str]] = set()

    @property
    def findings(self) -> list[SyncFinding]:
        """The findings so far, worst first."""
        return self.report.findings

    @property
    def report(self) -> SyncReport:
        """The report so far."""
        recorder = self.recorder
        reason = self._unavailable or self._reason_nothing_was_checked()
        covered = coverage.sentences(
            reason, traced=self._traced, error_mode=self._error_mode, every=self._every, steps=recorder.steps
        )
        unmatched = [] if self._running or reason is not None else self._unmatched(recorder.findings)
        covered += unmatched
        explanation = self._explanation if self._follower is None else self._follower.explanation
        covered += [explanation] if explanation else []
        return SyncReport(
            "live", recorder.findings, recorder.steps, covered, dropped=recorder.dropped,
            unavailable_reason=reason or "", budgeted=self._budget.given,
            exceeded=self._budget.exceeded(recorder.steps), unmatched=unmatched,
        )  # fmt: skip

    def _unmatched(self, findings: list[SyncFinding]) -> list[str]:
        return [*self._budget.unmatched(), *mistaken_comments(findings)]

    def start(self) -> None:
        """Begin without findings; nested calls have no effect, and the outermost `stop` ends it."""
        self._starts += 1
        if self._starts > 1:
            return
        self._path = RegionPath(self._budget.note_region if self._budget.given else None)
        self.recorder = LiveRecorder(self._path.names)
        self._warned.clear()
        self.clear_pending()
        self._unavailable = coverage.reason_unavailable()
        if self._unavailable is not None:
            if self._unavailable == coverage.NO_GPU:
                log.warning(self._unavailable)
            return
        self._running, self._explanation = True, None
        sync_totals.append(self.recorder)
        self.recorder.step = 0
        self._budget.clear()
        with guard.contained("counting the steps"):
            from ..record.stepping.follower import StepFollower  # which imports torch

            self._follower = StepFollower(self._on_follower_step, self._restart_steps)
            self._follower.follow()
        self._attach()

    def stop(self) -> None:
        """End; at level "log", log the findings.

        Raises:
            SyncError: at level "error", for a synchronization that could not be raised where it happened.
        """
        if self._ends_outermost():
            self.raise_pending()

    def step(self) -> None:
        """End the current step and begin the next one."""
        if not self._running:
            return
        if self._follower is not None:
            self._stop_following()
            self._restart_steps()
        self._next_step(counts=True)

    def __enter__(self) -> SyncDetector:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ends_outermost() and kind is None:  # nothing may hide the program's error
            self.raise_pending()

    def _reason_nothing_was_checked(self) -> str | None:
        """Return why nothing was found, if the program did not initialize CUDA meanwhile."""
        return coverage.reason_unused() if self._running and self.recorder.empty else None

    def _ends_outermost(self) -> bool:
        """Count a stop; end if it is the outermost one, and return whether it is."""
        self._starts = max(self._starts - 1, 0)
        if self._starts or not self._running:
            return False
        self._end()
        return True

    def check(self, event: SyncEvent, thread: int) -> None:
        """Queue a warning or an error for ``event`` by the level, or if it exceeds a budget."""
        if event.allowed is not None:
            return
        limited, exceeded = self._budget.count_sync(event)
        if (limited and exceeded is None) or (exceeded is None and self._level == "log"):
            return
        text = describe(event) + (f"; {exceeded}" if exceeded else "")
        if self._level == "error":
            self.queue(text, event, thread, error=True)
            return
        key = (event.site, event.op)
        if key in self._warned:
            return
        self._warned.add(key)
        if self._level == "warn":
            self.queue(text, event, thread, error=False)
        else:
            log.warning(text)

    def _attach(self) -> None:
        with guard.contained("detecting synchronizations"):
            active.add(self._path)
            self._attached = True
            monitor.add(self)
            self._traced, self._error_mode = monitor.traced, monitor.error_mode

    def _detach(self) -> None:
        if self._attached:
            self._attached = False
            monitor.remove(self)
            active.remove(self._path)

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._explanation = self._follower.explanation
            self._follower.remove()
            self._follower = None

    def _end(self) -> None:
        self._unavailable = self._reason_nothing_was_checked()
        if self._unavailable is not None:
            log.warning(self._unavailable)
        self._running = False
        sync_totals.remove(self.recorder)
        self._stop_following()
        self._detach()
        if self.recorder.steps:
            self._relabel(None, self.recorder.step)  # events after the last step are outside steps
        if self._level == "log":
            self._log()
        for sentence in self._unmatched(self.recorder.findings) if self._unavailable is None else ():
            log.warning(sentence)

    def _restart_steps(self) -> None:
        """Make everything so far a part of the first step."""
        self.recorder.step = self.recorder.steps = 0
        self._relabel(0)

    def _on_follower_step(self) -> None:
        """Begin the next step; everything before the end of the first step is outside steps."""
        first = self.recorder.step == 0
        if first:
            monitor.flush()
            self._relabel(None, 0)
        self._next_step(counts=not first)

    def _next_step(self, *, counts: bool) -> None:
        if self._attached:
            monitor.flush()
            self.recorder.steps += counts
        self.recorder.step = number = (self.recorder.step or 0) + 1
        self._budget.next_step()
        wanted = number < ALWAYS_CHECKED_STEPS or number % self._every == 0
        if wanted and not self._attached:
            self._attach()
        elif not wanted:
            self._detach()
        self.raise_pending(threading.get_ident())

    def _relabel(self, new: int | None, old: int | None = None) -> None:
        """Move the synchronizations of step ``old``, or of all steps, to step ``new``."""

        def assign(steps: CountByStep) -> CountByStep:
            moved = sum([steps.pop(step, 0) for step in ([old] if old is not None else list(steps))])
            steps[new] += moved
            return +steps

        self.recorder.reassign_steps(assign)

    def _log(self) -> None:
        report = self.report
        syncs = report.syncs
        for finding in syncs[:_MAX_LOGGED]:
            log.warning(
                "sync.found", at=str(finding.site or finding.via or finding.thread), op=finding.op,
                count=finding.count, seconds=None if finding.blocked_ns is None else finding.blocked_ns / 1e9,
                often=str(report.pattern(finding)),
            )  # fmt: skip
        if len(syncs) > _MAX_LOGGED:
            log.warning("the CPU waited for the GPU at more lines than shown", lines=len(syncs) - _MAX_LOGGED)


P = ParamSpec("P")
R = TypeVar("R")
LEVELS = ("log", "warn", "error")
EVERY = 10


def detect_syncs(
    level: str = "log", *, budget: int | Mapping[str, int] | None = None, every: int | None = None
) -> SyncDetector:
    """Find the lines that make the CPU wait for the GPU.

    A step ends where ``.step()`` of the returned detector is called; without such calls, after each step of the
    first optimizer. Of nested detectors each records what happens inside it, so the outer one has everything.
    torch's own synchronization warnings are not shown meanwhile.

    Args:
        level: what to do about a synchronization that is not allowed: "log" logs all of them at the end, "warn"
            warns once for each line and operation, "error" raises `SyncError` when the call returns.
        budget: number of synchronizations that a step may make, in total or by region: ``{"train/step": 1}``.
            Warnings and errors then concern only what exceeds it, or is in none of the regions.
        every: check the first 3 steps, then one in ``every``, by default 10: a checked step costs 1.5 us for each
            allocation of GPU memory. On other steps nothing is installed. With a budget, or at level "error",
            every step is checked.

    Raises:
        TypeError, ValueError: an argument is not accepted.

    Example:
        >>> with detect_syncs() as syncs:
        ...     for batch in loader:
        ...         train_step(batch)
        ...         syncs.step()
        >>> print(syncs.report)
    """
    if level not in LEVELS:
        raise ValueError(f'"level" must be one of {", ".join(LEVELS)}: {level!r}')
    limits = Budget(budget)
    if every is not None:
        every = integer("every", every, least=1)
    if level == "error" or limits.given:
        if every not in (None, 1):
            raise ValueError(f'"every" must be 1 with a budget or level "error", which check each step: {every!r}')
        every = 1
    return SyncDetector(level, limits, every or EVERY)


class _NoSyncsListener(SyncListener):
    """Raises an error for synchronizations inside `no_syncs`."""

    def check(self, event: SyncEvent, thread: int) -> None:
        """Queue an error if ``event`` is forbidden."""
        if event.forbidden:
            self.queue(f"{describe(event)}, which no_syncs forbids", event, thread, error=True)


class NoSyncs:
    """The context manager and decorator that `no_syncs` returns."""

    def __init__(self) -> None:
        self._blocks: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        if not regions.tracing():
            block = _forbidden_block()
            block.__enter__()
            self._blocks.append(block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not regions.tracing():
            self._blocks.pop().__exit__(kind, error, traceback)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with this block around each of its calls."""
        policy.check_decorable(function, "no_syncs")

        @transparent
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if regions.tracing():
                return function(*args, **kwargs)
            with _forbidden_block():
                return function(*args, **kwargs)

        return wrapper


@contextlib.contextmanager
def _forbidden_block() -> Iterator[None]:
    with policy.forbid_syncs():
        if coverage.reason_unavailable() is not None:
            yield
            return
        listener = _NoSyncsListener()
        with guard.contained("detecting synchronizations"):
            monitor.add(listener)
        try:
            yield
        finally:
            monitor.remove(listener)
        listener.raise_pending()


def no_syncs() -> NoSyncs:
    """Raise an error if the CPU waits for the GPU in this block or function, except inside `allow_sync`.

    An explicit synchronization raises the error before it begins, any other one when its call returns. Without a
    GPU nothing is checked. Threads that start in the block are not checked.

    Raises:
        SyncError: names the line.

    Example:
        >>> with no_syncs():
        ...     train_step(batch)
    """
    return NoSyncs()
