"""What follows a window leaves the training process: compression, the manifest line, the summary."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import settings
from ..errors import CaptureError
from ..exporters.capture import Capture
from ..exporters.raw_trace import packed, part
from ..guard import guard
from ..interrupts import Suppressed, is_interrupt
from .manifest import Manifest, described, not_compressed, size_of
from .process import FEATURE, FinalizerProcess

_WAIT_S = 60.0  # how long the end of a run waits for its windows, ...
_WAIT_S_PER_BYTE = 0.5e-6  # ... and a second more for each 2 MB of trace
_STDERR_S = 5.0  # how long the summary waits for whoever reads standard error
_CHUNK = 1024  # characters, which a pipe that is ready for any takes at once

Tell = Callable[[str], None]


class WindowFinalizer:
    """Finishes the windows of one run in order, in one process of their own.

    The process is started for the first window that needs it, and ends with `close` or `finish`. Where it cannot
    be started or dies, traces stay as torch wrote them and the manifest gives the reason.

    Args:
        manifest: where each window gets its line.
        hint: what to say to the user where the exporter writes no files.

    Attributes:
        received: how many windows `recorded` was called for.
        stderr: the stream for the summary; None is what ``sys.stderr`` is then.
    """

    def __init__(self, manifest: Manifest, hint: str) -> None:
        self._manifest = manifest
        self._hint = hint
        self.received = 0
        self.stderr: Any = None
        self._process: FinalizerProcess | None = None
        self._state: str | None = None  # of the summary, from one process to the next
        self._jobs: dict[int, dict[str, Any]] = {}  # that are not done yet
        self._last = 0  # the number of the last job
        self._unreported = 0  # recorded windows without a trace to read, since the last summary
        self._unread = 0  # those whose trace is read, since the last summary
        self._tell: Tell | None = None
        self._failure: Exception | None = None  # to be raised by `finish`: strict settings

    def recorded(self, capture: Capture, files: Sequence[Path], *, read: bool, **entry: Any) -> int:
        """Begin to finish a window whose ``files`` were saved; `timed` completes it.

        Args:
            capture: what recorded it.
            files: what was saved.
            read: whether its trace is for the summary.
            entry: what `Manifest.entry` takes.

        Returns:
            The number of the window for `timed`.
        """
        self.received += 1
        number = 0
        try:
            self._leave_ended()
            folder, raw = self._manifest.folder, capture.raw
            line = self._manifest.entry(**entry)
            if raw is None:
                self._unreported += 1
                number = self._register(entry={**line, "files": described(files, folder)})
            else:
                read = read and settings.summary
                self._unread += read
                number = self._register(kind="window", entry=line, folder=str(folder), raw=str(raw), read=read)
                self._submit(number)
        except BaseException as error:
            with guard.contained(FEATURE):
                if not number:  # else `finish` writes its line, or a signal handler that called it did
                    self._keep(capture, files, entry, error)
            if not isinstance(error, Exception):
                raise
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        return number

    def _keep(self, capture: Capture, files: Sequence[Path], entry: dict[str, Any], error: BaseException) -> None:
        """Write the line of a window that cannot be handed to the process, and keep its trace as it is."""
        line = {**self._manifest.entry(**entry), "files": described(files, self._manifest.folder)}
        job = {"entry": line} if capture.raw is None else {"entry": line, "raw": str(capture.raw)}
        self._abandoned(job, f"{type(error).__name__}: {error}")

    @guard.contained(FEATURE)
    def timed(self, number: int, timing: dict[str, Any]) -> None:
        """Write the line of a window, which `recorded` numbered, with the times of the steps around it."""
        job = self._jobs.get(number)
        if job is None:  # the line was written
            return
        job["entry"]["timing"] = timing
        if "raw" in job:
            self._send("timed", window=number, timing=timing)
        elif self._jobs.pop(number, None) is not None:
            self._line(job["entry"])

    @guard.contained(FEATURE)
    def unrecorded(self, **entry: Any) -> None:
        """Write the line of a window without files."""
        self._line(self._manifest.entry(**entry))

    def _line(self, entry: dict[str, Any]) -> None:
        self._leave_ended()
        if self._jobs:  # after the lines of the windows before it
            self._send("line", entry=entry, folder=str(self._manifest.folder))
        else:
            self._manifest.add(entry)

    def report(self, hidden: Sequence[str], tell: Tell | None = None) -> None:
        """Print the summary of the windows so far, unless that was done.

        Args:
            hidden: regions inside compiled code.
            tell: called with the text, on another thread; None writes it to `stderr`.
        """
        with guard.contained("the summary"):
            unreported, unread = self._unreported, self._unread
            self._unreported = self._unread = 0
            if unread and settings.summary:
                self._tell = tell
                places = {"folder": str(self._manifest.folder), "cwd": _cwd()}
                self._send("report", **places, hidden=list(hidden), terminal=_terminal(self.stderr or sys.stderr))
            if unreported and self._hint and settings.summary:
                windows = "1 window" if unreported == 1 else f"{unreported} windows"
                (tell or self._print)(f"instrument: {windows} {self._hint}\n")

    @guard.contained(FEATURE)
    def close(self) -> None:
        """Let the process end when its work is done, as no window follows."""
        if self._process is not None:
            self._process.close()

    def finish(self) -> None:
        """Wait until everything is written: for a minute, and a second more for each 2 MB of trace."""
        self._leave()
        self._abandon("was not given all of them")  # where a call failed; nothing is left otherwise
        self._manifest.flush()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _leave(self) -> None:
        process = self._process
        if process is None:
            return
        wait_s = _WAIT_S
        failure: Exception | None = None
        with guard.contained(FEATURE):
            sizes = [size_of(Path(job["raw"])) or 0 for job in list(self._jobs.values()) if "raw" in job]
            wait_s += sum(sizes) * _WAIT_S_PER_BYTE
        try:
            process.end(wait_s)
        except Exception as error:
            if is_interrupt(error):
                raise
            failure = error
            process.give_up(error)
            process.end(wait_s)
        self._process = None
        self._abandon(process.ended or "does not answer")  # what was sent when it was gone, if anything
        if failure is not None:
            guard.failed(FEATURE, failure)

    def _leave_ended(self) -> None:
        if self._process is not None and (self._process.closed or self._process.ended):
            self._leave()

    def _send(self, kind: str, **job: Any) -> None:
        self._leave_ended()
        self._submit(self._register(kind=kind, **job))

    def _register(self, **job: Any) -> int:
        """Return the number of a job that `finish` completes where nothing else does."""
        number = self._last = self._last + 1
        self._jobs[number] = job | {"job": number}
        return number

    def _submit(self, number: int) -> None:
        job, process = self._jobs.get(number), self._process
        if process is None:
            try:
                process = self._process = FinalizerProcess(self._answered, self._gone)
            except Exception as error:  # no memory, files, threads or interpreter
                if is_interrupt(error):
                    raise
                self._abandon(f"could not be started: {error}")
                return
            if self._state is not None:
                process.send({"kind": "resume", "job": 0, "state": self._state})
        if job is not None and number in self._jobs:
            process.send(job)
        else:  # a signal handler called `finish` meanwhile
            process.close()

    # What follows is called on the thread that waits for the answers or, where it cannot be started, by `_leave`.

    def _answered(self, answer: Mapping[str, Any]) -> None:
        try:
            self._state = answer.get("state", self._state)
            job = {} if answer.get("held") else self._jobs.pop(answer["job"], {})
            if "entry" in answer:
                self._jobs.pop(answer.get("window", 0), None)
                self._manifest.add(answer["entry"], written=answer["written"])
            elif "entry" in job:
                self._abandoned(job, "; ".join(error for _, error in answer["errors"]))
            if answer.get("text"):
                with guard.contained("the summary"):
                    (self._tell or self._print)(answer["text"])
            for feature, error in answer["errors"]:
                guard.failed(feature, CaptureError(error))
        except BaseException as error:  # also a SystemExit of the user's function: the thread has to go on
            self._failure = self._failure or (error if isinstance(error, Exception) else None)
            if answer.get("written"):  # its line is there
                self._jobs.pop(answer["job"], None)
                self._jobs.pop(answer.get("window", 0), None)

    def _print(self, text: str) -> None:
        """Write to `stderr`, and where that is closed or broken to ``sys.stderr``."""
        if self.stderr is None or not _written(text, self.stderr):
            _written(text, sys.stderr)

    def _gone(self, process: FinalizerProcess) -> None:
        if process is self._process and process.ended:
            self._abandon(process.ended)

    def _abandon(self, how: str) -> None:
        """Do without the process what it left undone: keep the traces, write the lines, and say why."""
        reason = f"the process that finishes windows {how}"
        abandoned = False
        for number in sorted(self._jobs):
            job = self._jobs.pop(number, {})  # another thread or a signal handler may be at this too
            abandoned = abandoned or bool(job)
            if "entry" in job:
                self._abandoned(job, reason)
        if not abandoned:
            return
        try:
            guard.failed(FEATURE, CaptureError(reason))
        except Exception as error:
            self._failure = self._failure or error

    def _abandoned(self, job: Mapping[str, Any], reason: str) -> None:
        self._manifest.add(self._kept(job, reason) if "raw" in job else job["entry"])

    def _kept(self, job: Mapping[str, Any], reason: str) -> dict[str, Any]:
        raw, entry = Path(job["raw"]), job["entry"]
        path = packed(raw)
        with Suppressed(OSError):
            part(raw).unlink(missing_ok=True)
        if path.exists():  # it was not read for the summary
            with Suppressed(OSError):
                raw.unlink(missing_ok=True)
            reasons = [entry["reason"]] if entry["reason"] else []
            entry = {**entry, "reason": "; ".join([*reasons, f"not in the summary: {reason}"])}
        else:
            path, entry = raw, not_compressed(entry, raw.exists(), reason)
        return {**entry, "files": described([path] if path.exists() else [], self._manifest.folder)}


def _written(text: str, file: Any) -> bool:
    """Write to ``file``, as far as somebody reads it; return False where it is closed, broken or missing."""
    with Suppressed(OSError, ValueError, AttributeError):
        for start in range(0, len(text), _CHUNK):
            if not _ready(file):
                break
            file.write(text[start : start + _CHUNK])
            file.flush()
        return True
    return False


def _ready(file: Any) -> bool:
    """Wait until ``file`` takes more: a thread that hangs in writing to it aborts the program's end."""
    with Suppressed(OSError, ValueError):  # no file of the system's, as in a notebook
        return bool(select.select([], [file.fileno()], [], _STDERR_S)[1])
    return True


def _terminal(stderr: Any) -> dict[str, Any]:
    """Return what rich would find out about standard error in this process."""
    columns = None
    if "COLUMNS" not in os.environ:
        for file in (0, 1, 2):
            with Suppressed(OSError):
                columns = os.get_terminal_size(file).columns
                break
    colours = None
    with Suppressed(Exception):  # it may be anything
        colours = stderr.isatty() or None
    encoding = getattr(stderr, "encoding", None)
    return {"columns": columns, "colours": colours, "encoding": encoding if isinstance(encoding, str) else "utf-8"}


def _cwd() -> str | None:
    with Suppressed(OSError):  # it is gone
        return str(Path.cwd())
    return None
