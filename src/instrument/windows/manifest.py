"""The record of what came of each window: a line of JSON in ``manifest.jsonl``."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ..guard import guard

_NUMBERS = count(1)  # of the runs of this process


class Manifest:
    """Appends a line for each window, and keeps the lines of this process in ``entries``.

    Args:
        folder: where ``manifest.jsonl`` lies; made when the first line is written.

    Each line has ``run`` (one value for all lines of one `profile`), ``rank``, ``window`` (its number in the
    schedule, from 1), ``status`` ("recorded", "partial", "skipped", "failed" or "not reached"), ``reason``
    (in words, null when all went well), ``planned_steps`` and ``steps`` (first and last, both included; null
    where there is none), ``start_ns`` and ``end_ns`` (since the epoch), ``exporter``, ``files`` (``path``
    relative to the folder, ``bytes``), ``hidden_regions`` (inside compiled code, where no profiler sees them) and
    ``timing`` (see `StepTimes.timing`; null where nothing was recorded).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[dict[str, Any]] = []
        self._run = f"{time.strftime('%Y%m%dT%H%M%S')}-{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"

    def add(
        self,
        *,
        rank: int,
        window: int,
        status: str,
        reason: str | None = None,
        planned_steps: Sequence[int | None],
        steps: Sequence[int] | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
        exporter: str,
        files: Sequence[Path] = (),
        hidden_regions: Sequence[str] = (),
        timing: Mapping[str, int | None] | None = None,
    ) -> None:
        """Add the line of one window; a folder that cannot be written leaves it in `entries` alone."""
        entry = {
            "run": self._run,
            "rank": rank,
            "window": window,
            "status": status,
            "reason": reason,
            "planned_steps": list(planned_steps),
            "steps": steps and list(steps),
            "start_ns": start_ns,
            "end_ns": end_ns,
            "exporter": exporter,
            "files": [{"path": str(f.relative_to(self.folder)), "bytes": _size(f)} for f in files],
            "hidden_regions": list(hidden_regions),
            "timing": timing and dict(timing),
        }
        self.entries.append(entry)
        with guard.contained("writing the manifest"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(self.folder / "manifest.jsonl", json.dumps(entry).encode() + b"\n")


def entry_of(trace: Path) -> dict[str, Any] | None:
    """Return the last line of the manifest of a trace that a window left; None where there is none."""
    folder = trace.absolute().parent.parent
    name = f"{trace.absolute().parent.name}/{trace.name}"
    found = None
    with suppress(OSError), (folder / "manifest.jsonl").open("rb") as lines:
        for line in lines:
            with suppress(ValueError):
                entry = json.loads(line) if name.encode() in line else None
                if isinstance(entry, dict) and any(file.get("path") == name for file in _files(entry)):
                    found = entry
    return found


def _files(entry: dict[str, Any]) -> list[dict[str, Any]]:
    files = entry.get("files")
    return [file for file in files if isinstance(file, dict)] if isinstance(files, list) else []


def _append(path: Path, line: bytes) -> None:
    # One write in append mode: ranks that share the folder do not cut each other's lines.
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        written = file.write(line)
        if written != len(line):  # a full disk: no half line that the next one would be glued to
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # somebody took it away
        return None
