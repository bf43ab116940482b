"""The folder of a run: the lines of its manifest, also of windows killed while open, and their traces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from . import process_id
from .files import make_folder, parse_lines
from .interrupts import Suppressed
from .printable import shell_line
from .units import counted

_OPEN_NAME = re.compile(rf"\.{process_id.WRITER}\.open\.json")
_KILLED_REASON = (
    "the program was killed while the window was open, by SIGKILL for example, or because memory ran out"
)


class OpenWindow:
    """A hidden file with the line of a window, from its opening to its end: about 0.1 ms for both.

    Args:
        folder: the folder of the run; if it cannot be written to, no file is kept.
        entry: the line, without status and reason.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any]) -> None:
        self._process = os.getpid()
        self._path = folder / f".{process_id.writer()}.open.json"
        with Suppressed(OSError):
            make_folder(folder)
            self._path.write_text(json.dumps({**entry, "status": "failed", "reason": _KILLED_REASON}))

    def end(self) -> None:
        """Remove the file, as the window gets its own line."""
        if self._process != os.getpid():  # a forked child
            return
        with Suppressed(OSError):
            self._path.unlink(missing_ok=True)


def killed(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the windows that were open when processes of this machine were killed: their files and lines."""
    with Suppressed(OSError):
        for path in sorted(folder.glob(".*.open.json")):
            if process_id.has_exited(_OPEN_NAME.fullmatch(path.name)):
                with Suppressed(OSError, ValueError):
                    entry = json.loads(path.read_bytes())
                    if isinstance(entry, dict):
                        yield path, entry


NAME = "manifest.jsonl"
COMPILE_LOG = ".compile.log"  # how the name of torch's log ends that a window wrote beside its trace
BLACK_BOX = ".black_box.json"  # ... and that of the times of the steps before it
DIAGNOSIS = ".diagnosis.json"  # ... and that of the diagnosis of a trace beside it
RUNS = "runs.jsonl"  # a line for each rank of a run that has ended, with the lengths of all its steps
MEMORY_SNAPSHOT = ".memory.pickle"  # ... and that of the history of GPU memory
_OF_ONE_RUN = "manifest.*.jsonl"  # in a folder that windows were uploaded to


def entries_of(folder: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the readable lines of windows in the manifest in ``folder``, and of those that were killed open.

    Lines with the key ``event`` say what happened to the files later, and are left out. The lengths of steps in
    ``timing`` are those of the whole run, where it has ended.

    Args:
        folder: the folder of the manifest.
        start: the number of bytes to skip, as returned by `size_of`.
    """
    ended: dict[tuple[str, str], Any] = {}
    with Suppressed(OSError), (folder / RUNS).open("rb") as lines:
        ended = {_of_rank(run): run.get("lengths") for run in parse_lines(lines)}
    for path in (folder / NAME, *sorted(folder.glob(_OF_ONE_RUN))):
        with Suppressed(OSError), path.open("rb") as lines:
            lines.seek(start if path.name == NAME else 0)
            for entry in parse_lines(lines):
                if isinstance(entry.get("timing"), dict) and (lengths := ended.get(_of_rank(entry))) is not None:
                    entry["timing"]["lengths"] = lengths
                if "event" not in entry:
                    yield entry
    if start == 0:  # a window that was killed open has no place among the lines
        yield from (entry for _, entry in killed(folder))


def _of_rank(line: Mapping[str, Any]) -> tuple[str, str]:
    return str(line.get("run")), str(line.get("rank"))


def entry_of(trace: Path) -> dict[str, Any] | None:
    """Return the last line of the manifest that names ``trace``; None if there is none."""
    window = trace.absolute().parent
    name = f"{window.name}/{trace.name}"
    entries = [entry for entry in entries_of(window.parent) if name in files_of(entry)]
    return entries[-1] if entries else None


def files_of(entry: Mapping[str, Any], key: str = "files") -> list[str]:
    """Return the paths of the files that a line names under ``key``, relative to the folder and inside it."""
    files = entry.get(key)
    names = [file.get("path") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return [name for name in names if isinstance(name, str) and _inside(Path(name))]


def traces_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the paths of the traces among `files_of`, without the files that a window wrote beside them."""
    return [name for name in files_of(entry) if not name.endswith((COMPILE_LOG, BLACK_BOX, MEMORY_SNAPSHOT))]


def snapshots_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the paths of the memory snapshots among `files_of`."""
    return [name for name in files_of(entry) if name.endswith(MEMORY_SNAPSHOT)]


def existing(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of files that are there; a name that the system does not accept is that of none."""
    for name in names:
        with Suppressed(OSError, ValueError):
            if (folder / name).is_file():
                yield name


def relative_path(path: str | Path, cwd: str | None) -> Path:
    """Return ``path`` relative to the current folder ``cwd``, if it lies below."""
    with Suppressed(ValueError):
        return Path(path).relative_to(cwd) if cwd else Path(path)
    return Path(path)


def how_to_show_snapshots(number: int, folder: Path) -> str:
    """Return how many memory snapshots are in ``folder``, and the command that shows them."""
    return f"{counted(number, 'memory snapshot')}, shown by: {shell_line(['instrument', 'memory', str(folder)])}"


def _inside(path: Path) -> bool:
    return not path.is_absolute() and ".." not in path.parts


def phase_of(entry: Mapping[str, Any]) -> str:
    """Return the phase of the program that a window recorded; empty for steps of the training."""
    phase = entry.get("phase")
    return phase if isinstance(phase, str) else ""


def training_of(entry: Mapping[str, Any]) -> str:
    """Return the run of the training that a window, perhaps of a phase, belongs to."""
    return str(entry.get("phase_of") or entry.get("run"))


class Phase(NamedTuple):
    """The recorded blocks of a phase of a run.

    Attributes:
        name: the name.
        blocks: how many blocks are recorded.
        median_ns: the median of their lengths in ns, by window; None if these are not known.
        window: the folder of its last window.
    """

    name: str
    blocks: int
    median_ns: int | None
    window: Path


def phases_beside(folder: Path, entry: Mapping[str, Any]) -> list[Phase]:
    """Return the phases in the folder of a run that the rank of ``entry`` recorded beside the steps in it."""
    windows: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for file, other in traces_in(folder):
        if phase_of(other) not in ("", phase_of(entry)) and training_of(other) == training_of(entry):
            windows.setdefault(phase_of(other), []).append((file, other))
    return [_phase(name, own) for name, own in sorted(windows.items())]


def _phase(name: str, windows: list[tuple[Path, Mapping[str, Any]]]) -> Phase:
    timings = [entry.get("timing") for _, entry in windows]
    lengths = [timing.get("recorded_ns") for timing in timings if isinstance(timing, dict)]
    known = [ns for ns in lengths if isinstance(ns, int)]
    blocks = sum(steps[1] - steps[0] + 1 if (steps := _steps_of(entry)) else 1 for _, entry in windows)
    return Phase(name, blocks, round(median(known)) if known else None, windows[-1][0].parent)


def last_window(path: str, steps: tuple[int, int] | None = None, phase: str | None = None) -> str:
    """Return the folder of the window that ended last if ``path`` is the folder of a run, else ``path``.

    A run that recorded steps of its training and phases beside them ends with its last steps.

    Args:
        path: a folder, or anything else.
        steps: only windows that recorded all steps from the first to the last of these count.
        phase: only windows of this phase count.

    Raises:
        ValueError: the run has windows, but none with these steps, or of this phase.
    """
    windows = [(file, entry) for file, entry in traces_in(Path(path)) if isinstance(entry.get("end_ns"), int)]
    if phase is None:
        trained = {training_of(entry) for _, entry in windows if not phase_of(entry)}
        windows = [each for each in windows if not phase_of(each[1]) or training_of(each[1]) not in trained]
    else:
        phases = sorted({phase_of(entry) for _, entry in windows} - {""})
        if phase not in phases:
            raise ValueError(f'"phase" must be one that {path} recorded, {", ".join(phases) or "none"}: {phase!r}')
        windows = [each for each in windows if phase_of(each[1]) == phase]
    ended = [(entry["end_ns"], file) for file, entry in windows if steps is None or _has_steps(entry, *steps)]
    if steps is not None and windows and not ended:
        recorded = ", ".join(dict.fromkeys(str(entry["steps"]) for _, entry in windows))
        raise ValueError(f'"steps" must be in one window of {path}, {recorded}: {steps[0]}-{steps[1]}')
    return str(max(ended)[1].parent) if ended else path


def last_snapshots(folder: Path) -> list[Path]:
    """Return the memory snapshots of the window of a run that ended last and has some, the newest last.

    Of a window without a line in the manifest, as of a job that was killed, the time of its snapshot counts.

    Args:
        folder: the folder of a run; that of a window has its own.
    """
    ended = [
        (entry["end_ns"], folder / name)
        for entry in entries_of(folder)
        for name in existing(folder, snapshots_of(entry))
        if isinstance(entry.get("end_ns"), int)
    ]
    named = {file for _, file in ended}
    others = [file for file in folder.glob(f"window-*/*{MEMORY_SNAPSHOT}") if file not in named and file.is_file()]
    newest = max(ended + [(_taken_ns(file), file) for file in others], default=None)
    window = newest[1].parent if newest else folder
    return sorted(window.glob(f"*{MEMORY_SNAPSHOT}"), key=_taken_ns)


def count_snapshots(folder: Path) -> int:
    """Return how many memory snapshots the windows in ``folder`` have, of all ranks."""
    with Suppressed(OSError, ValueError):
        return sum(1 for _ in folder.glob(f"window-*/*{MEMORY_SNAPSHOT}"))
    return 0


def _taken_ns(snapshot: Path) -> int:
    """Return the time in the name of a snapshot; 0 without one."""
    time = snapshot.name.removesuffix(MEMORY_SNAPSHOT).rpartition(".")[2]
    return int(time) if time.isdecimal() and len(time) < 20 else 0


def _has_steps(entry: Mapping[str, Any], first: int, last: int) -> bool:
    steps = _steps_of(entry)
    return steps is not None and steps[0] <= first and last <= steps[1]


def _steps_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the first and the last step that a line names; None if it names none."""
    steps = entry.get("steps")
    if isinstance(steps, list) and len(steps) == 2 and all(isinstance(step, int) for step in steps):
        return steps[0], steps[1]
    return None


def without_files(folder: Path, *statuses: str) -> list[str]:
    """Return which windows of the last run in ``folder`` have one of the statuses and no files, in words."""
    entries = list(entries_of(folder))
    last = max(map(training_of, entries), default="")  # it begins with the time of the start
    return [
        f"window {entry.get('window')} {entry['status']}: {entry.get('reason')}"
        for entry in entries
        if entry.get("status") in statuses and training_of(entry) == last and not files_of(entry)
    ]


def without_line(folder: Path) -> list[Path]:
    """Return the files of torch.profiler in the folder of a run that no line of its manifest names so far."""
    if not (folder / NAME).is_file():
        return []
    named = {name for entry in entries_of(folder) for name in files_of(entry)}
    files = [path for end in ("", ".gz") for path in sorted(folder.glob(f"window-*/*.pt.trace.json{end}"))]
    traces = {path.with_name(path.name.removesuffix(".gz")): path for path in files}
    return [path for path in traces.values() if str(path.relative_to(folder)) not in named]


def traces_in(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the traces with steps in a folder, each with its line of the manifest."""
    for entry in entries_of(folder) if folder.is_dir() else ():
        for name in existing(folder, traces_of(entry)) if entry.get("steps") else ():
            yield folder / name, entry
