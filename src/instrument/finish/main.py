"""The program that `FinishingProcess` starts: compresses traces, writes manifest lines, renders the summary.

The training process does not import this module; that of `FinishingProcess` says how they talk to each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import process_id
from ..base.files import LineFile, part_file, remove_stale_parts, sync
from ..base.run_folder import DIAGNOSIS, NAME, killed, relative_path
from ..record.exporters.raw_trace import compress, launches_graphs, trace_counts
from ..record.handover.finishing_process import ANSWERS, JOBS, UPLOAD, is_left
from ..record.handover.manifest import add_snapshot, append, describe_files, uncompressed_entry, with_reason
from ..record.handover.storage import Storage
from ..record.planning.command_files import remove_stale_commands
from .file_keeping import FileKeeping

if TYPE_CHECKING:
    from ..read.measures.summary import Summary
    from ..read.measures.timing import Timing

Job = Mapping[str, Any]
_UPLOADING = "uploading windows"  # the name of the feature in the log
_ORPHAN_LIMIT_S = 600  # time limit for the work after the training process has exited, ...
_CHECK_INTERVAL_S = 1.0  # ... which is checked this often
_POLL_S = 0.05  # how often it looks for jobs
_RANKS_WAIT_S = 5.0  # how long the summary waits for the times of other ranks, after its own


class FinishingJobs:
    """Does the jobs; one summary covers all windows whose traces were read."""

    def __init__(self) -> None:
        self._summary: Summary | None = None
        self._missing = ""  # a package that reading traces needs, as on a machine that only records
        self._files: list[str] = []
        self._compared: list[tuple[str, list[int]]] = []  # its times of each window; all ranks that record it
        self._wait_until = 0.0  # for the times of other ranks
        self._windows_without_timing: dict[int, Job] = {}
        self._keeping: FileKeeping | None = None
        self._folder: Path | None = None  # of the run
        self._unsynced: set[Path] = set()  # files and folders that a loss of power could undo
        self._errors: list[tuple[str, str]] = []  # of the current job: what failed, and how
        self._kinds: dict[str, Callable[[Job], dict[str, Any]]] = {
            "window": self._hold_window,
            "timed": self._add_timing,
            "line": self._write_line,
            "report": self._render_summary,
            "start": self._start,
            "trace": self._process_trace,
            "end": self._return_state,
        }

    def do(self, job: Job) -> dict[str, Any]:
        """Do one job, and return the answer, which names failures."""
        self._errors = []
        answer: dict[str, Any] = {}
        with self._collect_error(f"job {job['kind']!r}"):
            answer = self._kinds[job["kind"]](job)
        return self._completed(answer)

    def _completed(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        noted = self._keeping.take_unlogged() if self._keeping is not None else []
        return {**answer, "noted": noted, "errors": self._errors}

    def jobs_without_timing(self) -> list[Job]:
        """Return jobs that write the lines of windows whose timing never came."""
        return [
            {"kind": "timed", "job": 0, "window": number, "timing": None}
            for number in self._windows_without_timing
        ]

    def _hold_window(self, job: Job) -> dict[str, Any]:
        """Wait for the times of the steps after a window, which work beside them would make longer."""
        self._windows_without_timing[job["job"]] = job
        return {"held": True}

    def _save_window(self, job: Job) -> tuple[dict[str, Any], Summary | None, Path | None]:
        """Compress the trace of a window, and read it; return the line, the summary and the trace to diagnose."""
        entry, raw, folder = job["entry"], Path(job["raw"]), Path(job["folder"])
        try:
            path = compress(raw)
        except Exception as error:
            path = raw
            self._add_error("saving a window", error)
            self._unsynced.add(raw)
            entry = uncompressed_entry(entry, raw.exists(), f"{type(error).__name__}: {error}")
        beside = [file for file in map(Path, job["beside"]) if file.exists()]
        self._unsynced.update((path.parent, *beside))
        entry["files"] = describe_files([path, *beside] if path.exists() else beside, folder)
        if path.exists() and job["read"]:
            self._files.append(str(path))
        summary = None
        if raw.exists():
            with self._collect_error("the summary"):
                try:
                    summary = self._read(raw, job)
                except ModuleNotFoundError as error:
                    self._missing = str(error.name)
        if path != raw:
            with self._collect_error("saving a window"):
                raw.unlink(missing_ok=True)
        return entry, summary, path if job["diagnose"] and path.exists() else None

    def _read(self, raw: Path, job: Job) -> Summary | None:
        """Put the counts of the trace into the line, and its losses; return its summary if ``job`` asks for it.

        A trace that neither the summary nor the comparison of ranks needs is read only if it lacks kernels.
        """
        entry = job["entry"]
        counts = entry["trace"] = trace_counts(raw)
        kernels, wanted = counts["kernels_recorded"], job["read"] or job["ranks"]
        if not (wanted or kernels < counts["kernels_launched"] or (kernels == 0 and launches_graphs(raw))):
            return None
        from ..read.kineto.kineto import read_kineto
        from ..read.measures.launches import launches_of, lost_at_head
        from ..read.measures.summary import summarize

        trace = read_kineto(raw)
        if lost := lost_at_head(trace):
            said = (
                f"the GPU's profiling interface lost the kernels of the first {lost} launches; "
                "record with warmup=1"
            )
            entry["reason"] = with_reason(entry, said)
        elif not trace.gpu and len(launches_of(trace).rows):
            said = "the GPU's profiling interface gave no record of a kernel"
            entry |= {"status": "partial", "reason": with_reason(entry, said)}
        if job["ranks"] and trace.steps:
            with self._collect_error("comparing ranks"):
                from .other_ranks import write_times

                self._compared.append((str(write_times(trace, raw, entry["rank"])), job["ranks"]))
                self._wait_until = time.monotonic() + _RANKS_WAIT_S
        return summarize(trace) if job["read"] else None

    def _add_timing(self, job: Job) -> dict[str, Any]:
        """Save and diagnose a window, write its line, and add it to the summary."""
        window = self._windows_without_timing.pop(job["window"], None)
        if window is None:  # it was lost with an earlier process
            return {}
        folder = window["folder"]
        entry, summary, diagnosed = self._save_window(window)
        entry["timing"] = job["timing"]
        entry["memory"] = job.get("memory", entry["memory"])
        add_snapshot(entry, Path(folder))
        if diagnosed is not None:
            with self._collect_error("the diagnosis"):
                from ..read.measures.timing import Timing

                written = write_diagnosis(diagnosed, Timing.from_manifest(entry))
                entry["diagnosis"] = describe_files(written, Path(folder))
        answer = self._write_line({"entry": entry, "folder": folder})
        with self._collect_error("the summary"):
            self._add_to_summary(summary, entry)
        if answer["written"] and self._keeping is not None:
            with self._collect_error("keeping files"):
                self._keeping.add(entry)
        return {**answer, "window": job["window"]}

    def _write_line(self, job: Job) -> dict[str, Any]:
        """Write the line of a window."""
        written = False
        with (
            self._collect_error("writing the manifest"),
            suppress(OSError),
        ):  # the training process tries again, and warns
            append(Path(job["folder"]), [json.dumps(job["entry"]).encode() + b"\n"])
            written = True
            self._unsynced.add(Path(job["folder"]) / NAME)
        return {"entry": job["entry"], "written": written}

    def _add_to_summary(self, summary: Summary | None, entry: Mapping[str, Any]) -> None:
        """Add a window to the summary; if it was not read, as it has no steps, only its timing."""
        before = self._summary
        if summary is None and before is None:
            return
        from ..read.measures.summary import merge
        from ..read.measures.timing import Timing

        timing = Timing.from_manifest(entry)
        if summary is not None:
            summary = replace(summary, timing=timing)
            self._summary = merge([before, summary]) if before is not None else summary
        elif before is not None and timing is not None:
            self._summary = replace(before, timing=before.timing + timing if before.timing else timing)

    def _render_summary(self, job: Job) -> dict[str, Any]:
        """Render the summary of all windows: as text for a ``terminal``, else as fields of an event."""
        if self._summary is None:
            return self._without_summary(job) if self._missing else {}
        from ..show.terminal.summary import RunSummary

        there = _existing(self._files)  # others were removed, as `keep` says
        diagnosis = None
        if job["diagnose"] and there:
            with self._collect_error("the diagnosis"):
                from ..explain.diagnosis.diagnose import diagnose

                diagnosis = diagnose(Path(there[-1]))
        rendered = RunSummary(
            self._summary,
            windows=len({Path(path).parent for path in self._files}),
            phase=job["phase"],
            files=[relative_path(path, job["cwd"]) for path in there],
            folder=relative_path(job["folder"], job["cwd"]),
            removed_files=len(self._files) - len(there),
            snapshots=[relative_path(path, job["cwd"]) for path in _existing(job["snapshots"])],
            ranks=self._describe_ranks(),
            hidden=job["hidden"],
            worst_steps=job["worst_steps"],
            diagnosis=diagnosis,
        )
        if job["terminal"] is None:
            return {"summary": rendered.as_fields()}
        return {"text": rendered.as_text(job["terminal"])}

    def _without_summary(self, job: Job) -> dict[str, Any]:
        """Say what the summary lacks, and how to get one elsewhere."""
        command = f"instrument summarize {relative_path(job['folder'], job['cwd'])}"
        why = f"no summary, as {self._missing} is not installed here; where it is: {command}"
        return {"summary": {"reason": why}} if job["terminal"] is None else {"text": f"instrument: {why}\n"}

    def _describe_ranks(self) -> list[str]:
        """Return who arrived late at the collectives of the windows; waits a few seconds for other ranks."""
        with self._collect_error("comparing ranks"):
            if self._compared:
                from ..show.terminal.ranks import describe_ranks
                from .other_ranks import gather_times

                compared = [(Path(path), ranks) for path, ranks in self._compared]
                return describe_ranks(*gather_times(compared, self._wait_until))
        return []

    def _process_trace(self, job: Job) -> dict[str, Any]:
        """Compress a trace that the program exported; write its summary and its diagnosis beside it."""
        from ..read.jobs.read import read_trace
        from ..read.measures.summary import summarize
        from ..show.terminal.summary import summary_text

        path = Path(job["path"])
        if path.suffix != ".gz":
            raw, path = path, compress(path)
            raw.unlink(missing_ok=True)
        with self._collect_error("the summary"):
            text = summary_text(summarize(read_trace(path)), files=[path], folder=path.parent)
            _write(_beside(path, "summary.txt"), text)
        write_diagnosis(path)
        return {}

    def _start(self, job: Job) -> dict[str, Any]:
        """Continue from the state of an earlier process; remove what killed processes left unfinished."""
        if job["state"] is not None:
            import msgspec

            from ..read.measures.summary import Summary

            state = tuple[Summary | None, list[str], list[tuple[str, list[int]]]]
            self._summary, self._files, self._compared = msgspec.convert(job["state"], state)
        folder = self._folder = Path(job["folder"])
        self._keeping = FileKeeping(
            folder, job["run"], Storage.from_json(job["storage"] | {"upload": os.environ.get(UPLOAD)})
        )
        for written in (folder, *folder.glob("window-*")):
            remove_stale_parts(written)
        for left in folder.glob(".*.jobs"):
            if is_left(left):
                shutil.rmtree(left, ignore_errors=True)
        return {}

    def note_uploads(self) -> dict[str, Any] | None:
        """Write the lines of uploads that are done; return an answer about them, None if there is nothing."""
        self._errors = []
        with self._collect_error("keeping files"):
            if self._keeping is not None and (failure := self._keeping.note_uploads()):
                self._errors.append((_UPLOADING, failure))
        answer = self._completed({})
        return answer if any(answer.values()) else None

    def sync(self) -> None:
        """Wait for the disk; after each window, a busy machine would make this process wait for its turn too."""
        for path in self._unsynced:
            with suppress(OSError):  # it was removed, or is a folder on a system that cannot sync one
                sync(path)
        self._unsynced.clear()

    def account_for_killed(self) -> None:
        """Write the lines of windows that were open when their process was killed; remove their commands."""
        if self._folder is not None:
            with self._collect_error("the lines of killed windows"):
                for path, entry in killed(self._folder):
                    mine = path.with_suffix(f".{os.getpid()}")
                    try:
                        path.replace(mine)
                    except FileNotFoundError:  # the finishing process of another rank writes this line
                        continue
                    try:
                        append(self._folder, [json.dumps(entry).encode() + b"\n"])
                    except OSError:  # the disk is full: the next run tries again
                        mine.replace(path)
                        raise
                    mine.unlink()
            remove_stale_commands(self._folder)

    def end(self) -> tuple[dict[str, Any], bool]:
        """Wait for uploads; return the failure as an answer without a job, and whether a connection hangs."""
        self._errors, hangs = [], False
        with self._collect_error("keeping files"):
            if self._keeping is not None:
                failure, hangs = self._keeping.end()
                self._errors += [(_UPLOADING, failure)] if failure else []
        return self._completed({}), hangs

    def _return_state(self, _: Job) -> dict[str, Any]:
        """Return the state that `_start` takes."""
        if self._missing:
            return {"state": None}
        import msgspec

        return {"state": msgspec.to_builtins((self._summary, self._files, self._compared))}

    def _add_error(self, what: str, error: Exception) -> None:
        self._errors.append((what, f"{type(error).__name__}: {error}"))

    @contextmanager
    def _collect_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._add_error(what, error)


def write_diagnosis(trace: Path, timing: Timing | None = None) -> list[Path]:
    """Diagnose ``trace``, write NAME.diagnosis.json and NAME.diagnosis.html beside it, and return their paths.

    Args:
        trace: the file, plain or gzipped.
        timing: the steps around the window; by default those in the manifest, if it has a line for the trace.

    Raises:
        TraceError, OSError: the trace cannot be read, or a file cannot be written.
    """
    from ..explain.diagnosis.diagnose import diagnose

    diagnosis = diagnose(trace, timing=timing)
    data = _write(_beside(trace, DIAGNOSIS[1:]), diagnosis.to_json())
    return [data, diagnosis.to_html(_beside(trace, "diagnosis.html"))]


def _beside(trace: Path, suffix: str) -> Path:
    stem = trace.name
    for part in (".gz", ".json", ".trace", ".pt"):
        stem = stem.removesuffix(part)
    return trace.with_name(f"{stem}.{suffix}")


def _write(path: Path, text: str) -> Path:
    with part_file(path) as part:
        part.write_text(text, "utf-8")
        part.replace(path)
    return path


def _existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


def main(folder: str, parent: int) -> None:
    """Do the jobs in a folder until an "end" job comes, or none can come as the process ``parent`` has exited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # inherited from the training process
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # short of memory, the kernel ends this process first
    exited = threading.Event()
    threading.Thread(target=_watch, args=(parent, exited), daemon=True).start()
    answers, jobs, end = LineFile(Path(folder) / ANSWERS), FinishingJobs(), None
    for job in _jobs(LineFile(Path(folder) / JOBS), exited):
        if job is None:
            jobs.sync()
            if (noted := jobs.note_uploads()) is not None:
                _reply(answers, {}, noted)
        elif job["kind"] == "end":
            end = job
            break
        else:
            _reply(answers, job, jobs.do(job))
    for late in jobs.jobs_without_timing() if end is None else ():
        _reply(answers, late, jobs.do(late))
    jobs.account_for_killed()
    jobs.sync()
    ended, hangs = jobs.end()
    _reply(answers, {}, ended)
    if end is not None:
        _reply(answers, end, jobs.do(end))
    if process_id.start_time(parent) is None:
        shutil.rmtree(folder, ignore_errors=True)
    if hangs:
        os._exit(0)  # threads of a connection may wait for minutes


def _watch(parent: int, exited: threading.Event) -> None:
    """Set ``exited`` when a process has exited; the work after that has a time limit."""
    started = process_id.start_time(parent)
    while started is not None and process_id.start_time(parent) == started:
        time.sleep(_CHECK_INTERVAL_S)
    signal.alarm(_ORPHAN_LIMIT_S)
    exited.set()


def _jobs(jobs: LineFile, exited: threading.Event) -> Iterator[Job | None]:
    """Yield the jobs, and None where there is none; ends when none can come any more."""
    over = False
    while not over:
        over = exited.is_set() or not jobs.path.exists()  # before the last jobs are taken
        yield from jobs.take()
        yield None
        time.sleep(_POLL_S)


def _reply(answers: LineFile, job: Job, answer: Mapping[str, Any]) -> None:
    number = {"job": job["job"]} if "job" in job else {}
    with suppress(OSError):  # the folder was removed; the disk is full
        answers.append({**number, **answer})
