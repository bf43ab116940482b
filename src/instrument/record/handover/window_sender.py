"""`WindowSender`: in the training process, sends each recorded window to the process that finishes it."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...base import log
from ...base.config import settings
from ...base.errors import CaptureError
from ...base.files import remove_stale_parts
from ...base.guard import guard
from ...base.interrupts import Suppressed, is_interrupt
from ...base.run_folder import how_to_show_snapshots, relative_path
from ...base.units import counted
from ..allocator_history.window_memory import SnapshotDump, WindowMemory
from ..exporters.exporter import Capture
from ..exporters.raw_trace import packed
from .finishing_process import FEATURE, FinishingProcess
from .manifest import Manifest, add_snapshot, describe_files, size_of, uncompressed_entry, with_reason
from .storage import Storage
from .summary_output import SummaryOutput

_WAIT_S = 60.0  # how long the end of a run waits for its windows, ...
_WAIT_S_PER_BYTE = 0.5e-6  # ... and a second more for each 2 MB of trace
_WAIT_S_PER_JOB = 0.5  # on a busy machine, each wait for the disk costs the process its turn


class OrderedCalls:
    """Makes a call at once, or once the calls before it are made and it is ready.

    Never waits for another thread: of two that come at the same time, one makes the calls of both.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        # Held during a call; nobody waits for it. Reentrant, as an interrupt may prevent the release.
        self._lock = threading.RLock()
        self._is_calling = False

    def add(self, call: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        """Make ``call`` now, or in a later `make` on any thread."""
        self._calls.append((is_ready, call))
        self.make()

    def make(self) -> None:
        """Make the calls that are ready, up to the first one that is not."""
        while self._next_is_ready() and self._lock.acquire(blocking=False):
            try:
                if self._is_calling:  # a signal handler interrupted a call, and the loop around that one goes on
                    return
                self._make_next()
            finally:
                self._lock.release()

    def _make_next(self) -> None:
        try:
            self._is_calling = True
            if self._next_is_ready():
                _, call = self._calls.popleft()
                call()
        finally:
            self._is_calling = False

    def _next_is_ready(self) -> bool:
        try:
            is_ready, _ = self._calls[0]
        except IndexError:  # another thread made it
            return False
        return is_ready()


class WindowSender:
    """Has the windows of one run finished in order by a `FinishingProcess`.

    The process starts with the first window that needs it, and ends with `close` or `finish`. If the process
    cannot be started or dies, traces stay as torch wrote them and the manifest gives the reason.

    Args:
        manifest: gets the line of each window.
        hint: the message for users if the exporter writes no files.
        storage: what happens to the files later.

    Attributes:
        received: the number of calls of `add_recorded`.
        last_window: the number of the window of the last call, for `add_timing`, also where an interrupt ended it.
        output: where the summary goes.
    """

    def __init__(self, manifest: Manifest, hint: str, storage: Storage) -> None:
        self._manifest = manifest
        self._storage = storage
        self._hint = hint
        self.received = 0
        self.output = SummaryOutput()
        self._process: FinishingProcess | None = None
        self._state: Any = None  # of the summary, passed from one process to the next
        self._jobs: dict[int, dict[str, Any]] = {}  # by number, until they are done
        self._last = 0  # the number of the last job
        self._unreported_windows = 0  # recorded windows without a trace to read, since the last summary
        self._windows_to_read = 0  # recorded windows whose trace is read, since the last summary
        self._snapshots: list[Path] = []  # of memory, which are written
        self._unreported_snapshots = 0  # those of them since the last summary
        self._reported_steps: list[str] = []  # the slowest ones in the last summary
        self._on_summary: Callable[[str], None] | None = None
        self._failure: Exception | None = None  # raised by `finish`, with strict settings
        self._ordered = OrderedCalls()  # of which some wait until a memory snapshot is written
        self._histories: dict[int, WindowMemory] = {}  # of windows without timing so far, by their number
        self._dumps: list[SnapshotDump] = []  # those whose threads may still run

    def add_recorded(
        self,
        capture: Capture,
        files: Sequence[Path],
        entry: dict[str, Any],
        history: WindowMemory | None,
        *,
        read: bool,
        diagnose: bool,
        ranks: Sequence[int],
    ) -> None:
        """Begin to finish a window whose ``files`` were saved; `add_timing` completes it.

        Args:
            capture: the window's capture.
            files: the files that it saved.
            entry: the line of the window, without files.
            history: recorded the history of GPU memory in it.
            read: whether the summary includes its trace.
            diagnose: whether its diagnosis is written beside its trace.
            ranks: the ranks that record it; the summary compares several.
        """
        job: dict[str, Any] = {"entry": entry}
        if capture.raw is not None:
            job |= {"raw": str(capture.raw), "beside": [str(path) for path in files if path != capture.raw]}
        self.received += 1
        self.last_window = 0
        try:
            self._drop_ended_process()
            if capture.raw is None:
                self._unreported_windows += 1
                entry["files"] = describe_files(files, self._manifest.folder)
            else:
                read = read and settings.summary
                self._windows_to_read += read
                compared = list(ranks) if settings.summary and len(ranks) > 1 else []
                job |= {"kind": "window", "folder": str(self._manifest.folder), "read": read}
                job |= {"diagnose": diagnose, "ranks": compared}
            self.last_window = self._register(**job)
            if history is not None and history.dump is not None:
                self._histories[self.last_window] = history
            if capture.raw is not None:
                self._submit(self.last_window)
        except BaseException as error:
            with guard.contained(FEATURE):
                if not self.last_window:  # else `finish` writes the line, perhaps called by a signal handler
                    entry["files"] = describe_files(files, self._manifest.folder)
                    self._finish_without_process(job, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            guard.failed(FEATURE, error)

    @property
    def is_working(self) -> bool:
        """Whether a window is being finished, or a memory snapshot written, beside the loop."""
        jobs, histories = list(self._jobs.values()), list(self._histories.values())
        return any("kind" in job and job["kind"] != "window" for job in jobs) or any(
            history.dump is not None and history.dump.is_running for history in histories
        )

    @guard.contained(FEATURE)
    def add_timing(self, number: int, timing: dict[str, Any]) -> None:
        """Write the line of a window, numbered by `last_window`, with the times of the steps around it."""
        history = self._histories.pop(number, None)
        self._after_dump(history, functools.partial(self._send_timing, number, timing, history))

    @guard.contained(FEATURE)
    def _send_timing(self, number: int, timing: dict[str, Any], history: WindowMemory | None) -> None:
        job = self._jobs.get(number)
        if job is None:  # the line is written already
            return
        entry = job["entry"]
        entry["timing"] = timing
        self._note_memory(entry, history)
        if "raw" in job:
            self._send("timed", window=number, timing=timing, memory=entry["memory"])
        elif self._jobs.pop(number, None) is not None:
            self._write_line(entry)

    def _after_dump(self, history: WindowMemory | None, call: Callable[[], object]) -> None:
        """Make ``call`` once the snapshot of ``history`` is written or failed, in order with other calls."""
        dump = history.dump if history is not None else None
        if dump is None:
            self._ordered.add(call)
            return
        self._dumps = [other for other in self._dumps if other.is_running] + [dump]
        self._ordered.add(call, lambda: dump.done)
        dump.when_done(self._ordered.make)

    @guard.contained(FEATURE)
    def add_unrecorded(self, entry: dict[str, Any], history: WindowMemory | None) -> None:
        """Write the line of a window without files, but for a snapshot that ``history`` may have taken."""
        self._after_dump(history, functools.partial(self._write_unrecorded, entry, history))

    @guard.contained(FEATURE)
    def _write_unrecorded(self, entry: dict[str, Any], history: WindowMemory | None) -> None:
        self._note_memory(entry, history)
        self._write_line(entry)

    def _note_memory(self, entry: dict[str, Any], history: WindowMemory | None) -> None:
        """Put the outcome of the memory snapshot of a window into its line; log and count it."""
        if history is None:
            return
        memory = entry["memory"] = history.entry()
        if memory is not None and history.dump is not None:
            about = {name: entry[name] for name in ("window", "rank")}
            (log.warning if memory["status"] == "failed" else log.info)("window.memory", **about, **memory)
            if memory["status"] == "recorded":
                self._snapshots.append(history.dump.path)
                self._unreported_snapshots += 1

    def _write_line(self, entry: dict[str, Any]) -> None:
        add_snapshot(entry, self._manifest.folder)
        self._drop_ended_process()
        if self._jobs:  # the lines of earlier windows come first
            self._send("line", entry=entry, folder=str(self._manifest.folder))
        else:
            self._manifest.add(entry)

    def report(self, on_summary: Callable[[str], None] | None, **said: Any) -> None:
        """Print the summary of the windows so far, unless it was printed.

        Args:
            on_summary: called with the text, on another thread; None writes it to `output` or, where the log is
                JSON, makes it an event of the log.
            said: ``hidden``: regions inside compiled code; ``diagnose``: whether the text ends with a diagnosis
                of the last window; ``phase``: of the program, that these are windows of; empty for training steps;
                ``worst_steps``: the slow steps of the run with the largest delays, in words.
        """
        self._ordered.add(functools.partial(self._report, on_summary, said))

    def _report(self, on_summary: Callable[[str], None] | None, said: dict[str, Any]) -> None:
        with guard.contained("the summary"):
            unreported, unread = self._unreported_windows, self._windows_to_read
            unreported_snapshots = self._unreported_snapshots
            new_steps = said["worst_steps"] != self._reported_steps
            self._reported_steps = said["worst_steps"]
            self._unreported_windows = self._windows_to_read = self._unreported_snapshots = 0
            if not settings.summary:
                return
            if unread:
                self._on_summary = on_summary
                places = {"folder": str(self._manifest.folder), "cwd": _cwd()}
                as_event = on_summary is None and log.output.format == "json"
                terminal = None if as_event else self.output.terminal()
                snapshots = [str(path) for path in self._snapshots]
                self._send("report", **places, **said, snapshots=snapshots, terminal=terminal)
            elif new_steps:
                lines = ("the slowest steps (the first 32 are not judged)", *said["worst_steps"])
                self.report_line(on_summary, "\n  ".join(lines))
            if unreported_snapshots and not unread:
                number, folder = len(self._snapshots), relative_path(self._manifest.folder, _cwd())
                self.report_line(on_summary, how_to_show_snapshots(number, folder))
            if unreported and self._hint:
                self.report_line(on_summary, f"{counted(unreported, 'window')} {self._hint}")

    def report_line(self, on_summary: Callable[[str], None] | None, text: str) -> None:
        """Print what was recorded without a trace or, where the log is JSON, make it an event of the log."""
        if on_summary is None and log.output.format == "json":
            log.info("summary", recorded=text)
        else:
            (on_summary or self.output.print)(f"instrument: {text}\n")

    @guard.contained(FEATURE)
    def close(self) -> None:
        """Let the process end when its work is done; no window follows."""
        self._ordered.add(self._close)

    @guard.contained(FEATURE)
    def _close(self) -> None:
        if self._process is not None:
            self._process.close()

    def finish(self) -> None:
        """Wait until everything is written: a minute, and more for large traces and for many windows."""
        self._await_dumps()
        self._end_process()
        self._abandon_jobs("did not receive all of them")  # only after a failed call are jobs left
        self._manifest.flush()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @guard.contained(FEATURE)
    def _await_dumps(self) -> None:
        with self.output.waiting_line("instrument: writing a memory snapshot") as update:
            for dump in self._dumps:
                dump.wait(_WAIT_S, update)
        self._dumps.clear()
        self._ordered.make()

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        wait_s = _WAIT_S + (self._storage.upload_timeout if self._storage.upload else 0)
        failure: Exception | None = None
        work = "the windows"
        with guard.contained(FEATURE):
            wait_s += len(self._jobs) * _WAIT_S_PER_JOB
            sizes = [size_of(Path(job["raw"])) or 0 for job in list(self._jobs.values()) if "raw" in job]
            wait_s += sum(sizes) * _WAIT_S_PER_BYTE
            megabytes = f"{sum(sizes) / 1e6:,.0f} MB"
            work = f"{counted(len(sizes), 'window')}, {megabytes}" if sizes else "the summary and the files"
        with self.output.waiting_line(f"instrument: finishing {work}") as update:
            try:
                process.end(wait_s, update)
            except Exception as error:
                if is_interrupt(error):
                    raise
                failure = error
                process.give_up(error)
                process.end(wait_s)
        self._process = None
        self._abandon_jobs(process.ended or "does not answer")  # jobs sent after it ended
        if failure is not None:
            guard.failed(FEATURE, failure)

    def _drop_ended_process(self) -> None:
        if self._process is not None and not self._process.takes_jobs:
            self._end_process()

    def _send(self, kind: str, **job: Any) -> None:
        self._drop_ended_process()
        self._submit(self._register(kind=kind, **job))

    def _register(self, **job: Any) -> int:
        """Store a job, which `finish` completes if nothing else does, and return its number."""
        number = self._last = self._last + 1
        self._jobs[number] = job | {"job": number}
        return number

    def _submit(self, number: int) -> None:
        process, numbers = self._process, [number]
        if process is None:
            try:
                process = self._process = FinishingProcess(
                    self._manifest.folder, self._handle_answer, self._handle_exit, self._storage.upload
                )
            except Exception as error:  # no memory, files, threads or interpreter
                if is_interrupt(error):
                    raise
                self._abandon_jobs(f"could not be started: {error}")
                return
            begun = {
                "folder": str(self._manifest.folder),
                "run": self._manifest.run,
                "storage": asdict(replace(self._storage, upload=None)),
                "state": self._state,
            }
            process.send({"kind": "start", "job": 0, **begun})
            numbers = sorted(self._jobs)  # also those whose process was not started, because of an interrupt
        jobs = [self._jobs.get(each, {}) for each in numbers]
        if number not in self._jobs:  # a signal handler has called `finish`
            process.close()
            return
        for job in jobs:
            if "kind" in job:
                process.send(job)

    # The methods below run on the thread that receives answers or, if there is none, in `_end_process`.

    def _handle_answer(self, answer: Mapping[str, Any]) -> None:
        try:
            self._state = answer.get("state", self._state)
            about = _about(answer if "entry" in answer else self._jobs.get(answer.get("job", 0), {}))
            job = {} if answer.get("held") else self._jobs.pop(answer.get("job", 0), {})
            for line in answer["noted"]:
                fields = {name: value for name, value in line.items() if name not in ("event", "run", "time_ns")}
                (log.warning if line.get("left") else log.info)(f"window.{line['event']}", **fields)
            failed = self._jobs.pop(answer.get("window", 0) if "entry" in answer else job.get("window", 0), job)
            if "entry" in answer:
                self._manifest.add(answer["entry"], written=answer["written"])
            elif "entry" in failed:
                self._finish_without_process(failed, "; ".join(error for _, error in answer["errors"]))
            if "summary" in answer:
                log.info("summary", **answer["summary"])
            if answer.get("text"):
                self.output.erase_waiting_line()
                with guard.contained("the summary"):
                    (self._on_summary or self.output.print)(answer["text"])
            for feature, error in answer["errors"]:
                guard.failed(feature, CaptureError(error), **about)
        except BaseException as error:  # even SystemExit, which `on_summary` may raise: the thread must continue
            self._failure = self._failure or (error if isinstance(error, Exception) else None)
            if answer.get("written"):  # its line is in the manifest
                self._jobs.pop(answer["job"], None)
                self._jobs.pop(answer.get("window", 0), None)

    def _handle_exit(self, process: FinishingProcess) -> None:
        if process is self._process and process.ended:
            self._abandon_jobs(process.ended)

    def _abandon_jobs(self, how: str) -> None:
        """Finish the jobs that the process left: keep raw traces, write the lines with the reason, and log it."""
        reason = f"the process that finishes windows {how}"
        abandoned = []
        for number in sorted(self._jobs):
            job = self._jobs.pop(number, {})  # another thread or a signal handler may have taken it
            if "entry" in job:
                self._finish_without_process(job, reason)
            if job:
                abandoned.append(_about(job))
        for about in [each for each in abandoned if each] or abandoned[:1]:
            try:
                guard.failed(FEATURE, CaptureError(reason), **about)
            except Exception as error:
                self._failure = self._failure or error

    def _finish_without_process(self, job: Mapping[str, Any], reason: str) -> None:
        entry = self._entry_with_raw_trace(job, reason) if "raw" in job else job["entry"]
        add_snapshot(entry, self._manifest.folder)
        self._manifest.add(entry)

    def _entry_with_raw_trace(self, job: Mapping[str, Any], reason: str) -> dict[str, Any]:
        raw, entry = Path(job["raw"]), job["entry"]
        path = packed(raw)
        remove_stale_parts(raw.parent)
        if path.exists():  # compressed, but not read for the summary
            with Suppressed(OSError):
                raw.unlink(missing_ok=True)
            entry = {**entry, "reason": with_reason(entry, f"not in the summary: {reason}")}
        else:
            path, entry = raw, uncompressed_entry(entry, raw.exists(), reason)
        files = [file for file in (path, *map(Path, job["beside"])) if file.exists()]
        return {**entry, "files": describe_files(files, self._manifest.folder)}


def _about(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event about the window of a job or of an answer; empty if it is about none."""
    return {name: job["entry"][name] for name in ("window", "rank")} if "entry" in job else {}


def _cwd() -> str | None:
    with Suppressed(OSError):  # the folder was deleted
        return str(Path.cwd())
    return None
