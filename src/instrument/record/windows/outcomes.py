"""`Outcomes`: decides whether a saved window is recorded or partial, and warns of a run without any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...base import log
from ...base.config import LAUNCHED, settings
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.job import world_size
from ...base.run_folder import OpenWindow, traces_of
from ...base.run_lengths import RunLengths
from ...base.units import counted
from ..exporters.exporter import Exporter
from ..exporters.raw_trace import packed
from ..handover.manifest import Manifest
from ..handover.storage import Storage
from ..handover.window_sender import WindowSender
from ..planning.requests import RequestedWindows
from ..planning.schedule import NEVER, Window, span
from ..regions import dispatch
from ..slow_steps.step_numbers import RecordedWindow
from .driver import Driver, ProfileOptions
from .recording import Recording

_OTHER_THREAD = "steps ended on another thread than the one that opened the window"
_NOT_SEEN = "step() was not called for each of the last steps"
_logged_warnings: set[str] = set()  # texts of `warn_if_nothing_was_recorded`: each is logged once per process


class Outcomes:
    """Writes the outcome of each window to the manifest and prints the summary.

    Args:
        out: the folder of the run.
        windows: the windows of the run.
        exporter: makes the captures.
        options: what the profile was asked for.
        driver: the code that drives it, for messages.

    Attributes:
        rank: the rank of this process; set when the run starts.
        in_dry_run: whether the run is part of a dry run, which has nothing to record; set when it starts.
        manifest: holds the lines of the windows.
        sender: has the windows finished in another process.
        recorded: how many windows were saved.
        on_recorded: called with each of them.
    """

    def __init__(
        self,
        out: Path,
        windows: RequestedWindows,
        exporter: Exporter,
        options: ProfileOptions,
        driver: Driver,
    ) -> None:
        self.rank = 0
        self.in_dry_run = False
        self._out = out
        self._windows = windows
        self._exporter = exporter.name
        self._ranks = options.ranks
        self._options = options
        self._driver = driver
        file_hint = "" if os.environ.get(LAUNCHED) else exporter.hint
        storage = Storage(options.keep, options.upload, options.upload_timeout)
        self.manifest = Manifest(out)
        self.sender = WindowSender(self.manifest, file_hint, storage)
        self._with_line: set[int | str] = set()  # the labels of the windows that have a line
        self._open: OpenWindow | None = None
        self.worst_steps: Callable[[], list[str]] = list
        self.recorded = 0
        self.on_recorded: Callable[[RecordedWindow], None] = lambda _: None

    @property
    def excluded(self) -> bool:
        """Whether this rank does not record."""
        return self.in_dry_run or (self._ranks is not None and self.rank not in self._ranks)

    def is_chosen(self, ranks: frozenset[int] | None) -> bool:
        """Return whether this rank is among ``ranks``; None stands for those of the profile."""
        return not self.excluded if ranks is None else self.rank in ranks

    @property
    def _prints_summary(self) -> bool:
        """Whether this rank prints the summary."""
        return not self.in_dry_run and self.rank == min(self._ranks or {0})

    def entry(self, window: Window, recording: Recording | None) -> dict[str, Any]:
        """Return the line of ``window``, except its status and reason."""
        return self.manifest.entry(
            rank=self.rank,
            window=self._windows.label(window),
            phase=self._driver.phase or None,
            phase_of=self._driver.phase_of or None,
            opened_by=self._windows.opened_by(window),
            requested=self._windows.is_requested(window),
            planned_steps=(window.active, window.stop - 1 if window.stop < NEVER else None),
            steps=recording and recording.steps,
            cut_step=recording and recording.cut_step,
            start_ns=recording and recording.start_ns,
            end_ns=recording and recording.end_ns,
            exporter=self._exporter,
            hidden_regions=sorted(dispatch.compiled_away),
            cost=recording and recording.cost.entry(),
            memory=recording and recording.memory and recording.memory.entry(),
        )

    @guard.contained("the line of an open window")
    def note_open(self, window: Window) -> None:
        """Keep the line of ``window``, whose recording begins, for the case that the process is killed."""
        self._open = OpenWindow(self._out, self.entry(window, None) | {"status": "failed"})

    def drop_open(self) -> None:
        """Drop the line of the window that `note_open` noted, which gets its own one, or none yet."""
        noted, self._open = self._open, None
        if noted is not None:
            noted.end()

    def add_recorded(
        self,
        recording: Recording,
        files: Sequence[Path],
        entry: Mapping[str, Any],
        missing: Sequence[str],
        failures: Sequence[str],
    ) -> None:
        """Finish a window that was saved as ``files``.

        Args:
            recording: the window.
            files: its files.
            entry: its result of `entry`.
            missing: why parts of it are missing; it is partial then.
            failures: what failed after it was saved.
        """
        self._with_line.add(entry["window"])
        self.drop_open()
        reason = "; ".join([*missing, *failures]) or None
        line = {**entry, "status": "partial" if missing else "recorded", "reason": reason}
        first, last = recording.steps or (recording.opened_at_step, recording.opened_at_step)
        saved = tuple(packed(path) if path == recording.capture.raw else path for path in files)
        self.recorded += 1
        self.on_recorded(RecordedWindow(entry["window"], saved, first, last, entry["start_ns"], entry["end_ns"]))
        read = self._prints_summary and self.holds_steps(recording)
        ranks = self._ranks_of(recording.window) if recording.steps is not None else []
        diagnose = read and self._options.diagnose
        self.sender.add_recorded(
            recording.capture, files, line, recording.memory, read=read, diagnose=diagnose, ranks=ranks
        )

    def _ranks_of(self, window: Window) -> list[int]:
        """Return the ranks of the job that record ``window``."""
        chosen = self._windows.chosen_ranks(window) or self._ranks
        return sorted(range(world_size()) if chosen is None else chosen)

    def holds_steps(self, recording: Recording) -> bool:
        """Return whether ``recording`` has steps, or could not mark any."""
        return recording.steps is not None or not self._windows.has_schedule

    def note(
        self,
        window: Window,
        status: str,
        reason: str,
        recording: Recording | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """Write the line of a window without files; with ``step``, log that it was skipped or failed there."""
        self._with_line.add(self._windows.label(window))
        self.drop_open()
        history = recording.memory if recording is not None else None
        line = self.entry(window, recording) | {"status": status, "reason": reason}
        self.sender.add_unrecorded(line, history)
        if step is not None:
            log.warning(f"window.{status}", **self.fields(window, step), reason=reason)

    def note_not_reached(self, windows: Iterable[Window], reason: str) -> None:
        """Write the lines of windows that were not reached, unless they have one; all of a phase have one line.

        At most 1,000 windows are looked at, as a schedule may be long.
        """
        without = [each for each in islice(windows, 1000) if self._windows.label(each) not in self._with_line]
        if self._windows.phase and len(without) > 1:
            more = counted(len(without) - 1, "more window")
            reason += f"; {more} of this phase {'was' if len(without) == 2 else 'were'} not reached"
            without = without[:1]
        for window in without:
            self.note(window, "not reached", reason)

    def fields(self, window: Window, step: int) -> dict[str, Any]:
        """Return the fields of each event of ``window`` in the log, as the manifest has them, and ``step``."""
        return {
            "window": self._windows.label(window),
            "step": step,
            "rank": self.rank,
            "opened_by": self._windows.opened_by(window),
        }

    def missing_reasons(self, recording: Recording, next_step: int, end_reason: str, postponed: str) -> list[str]:
        """Return why steps of the window are missing; an empty list if none are.

        Args:
            recording: the window.
            next_step: the first step that did not run to its end.
            end_reason: how the loop ended.
            postponed: why a change could not be made at its step; empty if none was postponed.
        """
        steps, stop = recording.steps, recording.window.stop
        if recording.ended_early:  # `Recording.incomplete` has the reason
            return []
        if next_step < stop < NEVER or not self.holds_steps(recording):
            return [end_reason]
        if steps is not None and steps[1] + 1 < stop < NEVER:
            return [_OTHER_THREAD if recording.other_thread_stepped else postponed or _NOT_SEEN]
        if steps is not None and steps[0] > recording.window.active and postponed:
            return [postponed]
        return []

    @guard.contained("the summary")
    def report(self) -> None:
        """Print the summary of the windows so far, on the rank that prints it."""
        dispatch.log_hidden()
        if self._prints_summary:
            self.sender.report(
                self._options.on_summary,
                hidden=sorted(dispatch.compiled_away),
                diagnose=self._options.diagnose,
                phase=self._windows.phase,
                worst_steps=self.worst_steps(),
            )

    def report_lengths(self, lengths: RunLengths | None) -> None:
        """Write the lengths of all steps beside the manifest, and print where the time is, if one is recorded."""
        if self._windows.phase or lengths is None or not lengths.are_enough:
            return
        if not any(map(self._has_begun, self.manifest.entries)):
            return
        self.manifest.note_run(self.rank, lengths=lengths.as_json())
        self.say("\n  ".join(lengths.sentences(self._driver.steps_hint)))

    def say(self, text: str) -> None:
        """Print a line below the summary, on the rank that prints it; nothing if it is empty."""
        if text and self._prints_summary and settings.summary:
            self.sender.report_line(self._options.on_summary, text)

    def warn_if_nothing_was_recorded(self, first: int, steps: int, scheduled: int | None, end_reason: str) -> None:
        """Warn if no window even began, and suggest what to write instead; each text is logged once.

        Args:
            first: the number of the run's first step.
            steps: how many steps ended.
            scheduled: how many windows the schedule has; None if it has no end.
            end_reason: how the loop ended.
        """
        windows = self.manifest.entries
        if scheduled == 0 or not self._prints_summary or any(map(self._has_begun, windows)):
            return
        reason = self._reason_for_no_window(first, scheduled, end_reason)
        if steps > 0:
            low = first + 2 if steps > 4 else first
            reachable = self._driver.steps_hint.format(span(low, low + min(steps, 3)))
            fix = f"choose steps the run reaches, such as {reachable}"
            if (
                first == 0
                and windows
                and windows[0]["planned_steps"][0] >= steps
                and not self._driver.on_command_line
            ):
                fix += "; if the run was resumed, give the number of its first step: first_step="
        else:
            by_hand = "no step was counted: call step() after each step"
            fix = by_hand if self._driver.steps_by_hand else "there were no steps"
        if steps > 0 and self._driver.steps_by_hand:
            fix += "; create the profile once, outside the epoch loop: a new one starts again at step 0"
        files = [path for window in windows for path in traces_of(window)]
        rest = f" ({files[0]} covers the time after the last complete step)" if files else ""
        text = f"no {'step' if files else 'window'} was recorded in {self._out}{rest}: {reason}; {fix}"
        if text not in _logged_warnings:
            _logged_warnings.add(text)
            log.warning(text)

    def _reason_for_no_window(self, first: int, scheduled: int | None, end_reason: str) -> str:
        windows = self.manifest.entries
        if windows:
            start, last = windows[0]["planned_steps"]
            steps = f"step {start} was" if start == last else f"steps {start}-{'' if last is None else last} were"
            return f"{steps} planned, and {windows[0]['reason']}"
        if scheduled is not None:
            return f"all planned steps come before the first step, {first}"
        return f"the schedule has none, and {end_reason}"

    def _has_begun(self, window: Mapping[str, Any]) -> bool:
        """Return whether a window has steps, or a line that says why it was skipped."""
        if window["status"] in ("recorded", "partial"):
            return window["steps"] is not None or not self._windows.has_schedule
        return bool(window["status"] != "not reached")


def loop_ended(
    step: int, *, begun: bool = False, complete: bool = False, error: BaseException | str | None = None
) -> str:
    """Return how the loop ended: "the loop ended in step 7: ValueError: too large".

    Args:
        step: the number of the current step.
        begun: `step` announced the current step, which may never have run.
        complete: the current step ran to its end.
        error: what ended the loop, an error or words; None if it ended otherwise.
    """
    where = "before" if begun else "after" if complete else "in"
    return f"the loop ended {where} step {step}{f': {first_line(error)}' if error is not None else ''}"


def first_line(error: BaseException | str) -> str:
    """Return the type of ``error`` and the first line of its message: "ValueError: too large"; words as such."""
    if isinstance(error, str):
        return error
    name, message = type(error).__name__, ""
    with Suppressed(Exception):  # the program's own `__str__` may raise
        message = str(error).strip().partition("\n")[0]
    return f"{name}: {message}" if message else name
