"""`Manifest`: writes the line of each window into ``manifest.jsonl``."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ...base import log
from ...base.config import settings
from ...base.disk import unwritable
from ...base.files import make_folder
from ...base.guard import guard
from ...base.interrupts import Suppressed, is_interrupt
from ...base.run_folder import NAME, RUNS

_NUMBERS = count(1)  # the numbers of the runs in this process
_FIELDS = (
    "run", "rank", "window", "phase", "phase_of", "opened_by", "requested", "status", "reason", "planned_steps",
    "steps", "cut_step", "start_ns", "end_ns", "exporter", "files", "hidden_regions", "timing", "cost", "memory",
    "trace", "diagnosis",
)  # fmt: skip


class Manifest:
    """Appends a line for each window, and keeps the lines of this process in ``entries``.

    A line that cannot be written is tried again with the next one, and by `flush`.

    Args:
        folder: the folder of ``manifest.jsonl``; created with the first line.

    Each line has ``run`` (one value for all lines of one `profile`), ``rank``, ``window`` (its number in the
    schedule, from 1; "step-812" for one that was requested and records from step 812 on), ``phase``
    and ``phase_of`` (the phase of the program, and the ``run`` of its training; null for training steps),
    ``opened_by`` ("schedule", and the reasons of requests), ``status`` ("recorded", "partial", "skipped", "failed"
    or "not reached"), ``reason`` (in words, null without problems), ``planned_steps`` and ``steps`` (first and
    last, both included; null if there are none), ``cut_step`` (a step that did not end, which is one of ``steps``
    only if it is the only one; usually null), ``start_ns`` and ``end_ns`` (since the epoch), ``exporter``,
    ``files`` (``path`` relative to the folder, ``bytes``), ``hidden_regions`` (inside compiled code, where no
    profiler sees them), ``timing`` (see `WindowTiming.timing`; null if nothing was recorded), ``cost`` (see
    `WindowCost.entry`; null if no window was open), ``memory`` (see `WindowMemory.entry`; null without
    ``memory="snapshot"``), ``trace`` (see `trace_counts`; null without a trace of torch.profiler) and
    ``diagnosis`` (like ``files``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: list[bytes] = []  # as bytes, which take a quarter of the memory
        self._unwritten: list[bytes] = []
        self._lock = threading.RLock()  # held while writing; never waited for
        self._warned = False
        self.run = f"{time.strftime('%Y%m%dT%H%M%S')}-{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The lines so far, written or not."""
        return [json.loads(line) for line in self._lines]

    def entry(self, **fields: Any) -> dict[str, Any]:
        """Return the line of one window with ``fields``, and without files; the other fields are empty."""
        lists: dict[str, Any] = {"opened_by": [], "files": [], "hidden_regions": [], "diagnosis": []}
        return dict.fromkeys(_FIELDS) | {"run": self.run, "requested": False} | lists | fields

    def add(self, entry: Mapping[str, Any], *, written: bool = False) -> None:
        """Keep the line of one window, and write it unless it is ``written``; a failure is contained."""
        line = json.dumps(entry).encode() + b"\n"
        self._lines.append(line)
        if not written:
            self._unwritten.append(line)
        self.flush()

    @guard.contained("writing the lengths of steps")
    def note_run(self, rank: int, **fields: Any) -> None:
        """Write what is known of the whole run of a rank, as it ends, into ``runs.jsonl`` beside the manifest."""
        line = json.dumps({"run": self.run, "rank": rank, **fields, "time_ns": time.time_ns()})
        with Suppressed(OSError):  # the lines of the windows have warned of it
            append(self.folder, [line.encode() + b"\n"], RUNS)

    @guard.contained("writing the manifest")
    def flush(self) -> None:
        """Write the lines that could not be written so far.

        Never waits for another thread: the writing thread checks for new lines afterwards. A signal handler may
        call this on the thread that it interrupted here, and writes the rest.
        """
        while self._unwritten and self._lock.acquire(blocking=False):
            try:
                append(self.folder, self._unwritten)
            except OSError as error:
                if settings.strict or is_interrupt(error):
                    raise
                self._warn(unwritable(self.folder) or f"cannot write the manifest: {error}")
                return
            finally:
                self._lock.release()

    @guard.contained("checking the folder")
    def check(self, *, warned: bool = False) -> None:
        """Warn if nothing can be written to the folder, unless the user was ``warned`` before."""
        reason = unwritable(self.folder)
        if reason is not None:
            self._warned = self._warned or warned
            self._warn(f"{reason}; the program goes on, but its windows will not be saved")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(text)


def append(folder: Path, lines: list[bytes], name: str = NAME) -> None:
    """Append ``lines`` to the manifest in ``folder``; each that is written is removed from the list.

    Args:
        folder: the folder of the run.
        lines: each ends with a newline.
        name: that of another file of lines.

    Raises:
        OSError: a line cannot be written. The file may end with a part of it; the next call starts a new line.
    """
    make_folder(folder)
    path = folder / name
    # Each line is one write in append mode, and the file is never truncated: ranks share the folder.
    with path.open("a+b", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        for line in tuple(lines):
            if line not in lines:  # a signal handler wrote it meanwhile
                continue
            # A nearly full disk takes only part of a line. Readers skip the part; the whole line is tried again.
            if file.write(line) < len(line) and file.write(b"\n" + line) <= len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with suppress(ValueError):  # nothing that may fail comes between, or the line is written twice
                lines.remove(line)


def with_reason(entry: Mapping[str, Any], reason: str) -> str:
    """Return the reason in the line of a window, or of its snapshot, with ``reason`` after it."""
    return "; ".join(filter(None, (entry["reason"], reason)))


def uncompressed_entry(entry: Mapping[str, Any], kept: bool, why: str) -> dict[str, Any]:
    """Return the line of a window whose trace was not compressed; ``kept``: whether the raw trace exists."""
    reason = with_reason(entry, f"not compressed: {why}" if kept else f"not saved: {why}")
    return {**entry, "status": entry["status"] if kept else "failed", "reason": reason}


def describe_files(files: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
    """Return the ``files`` of a line: each path relative to ``folder``, and the size in bytes."""
    return [{"path": str(path.relative_to(folder)), "bytes": size_of(path)} for path in files]


def add_snapshot(entry: dict[str, Any], folder: Path) -> None:
    """Complete the line of a window whose memory snapshot was being written, by whether its file is there."""
    memory = entry["memory"]
    path = folder / memory["file"] if memory and memory["file"] else None
    if path is None:
        return
    if path.exists():  # whole, as it gets its name last
        described = describe_files([path], folder)
        entry["files"] = [*entry["files"], *described]
        entry["memory"] = {**memory, "status": "recorded", "bytes": described[0]["bytes"]}
    elif memory["status"] == "writing":
        reason = with_reason(memory, "it was not written yet when this line was")
        entry["memory"] = {**memory, "status": "failed", "reason": reason}


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it cannot be read."""
    with Suppressed(OSError):  # it was deleted
        return path.stat().st_size
    return None
