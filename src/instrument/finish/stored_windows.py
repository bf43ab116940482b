"""The windows that a folder still has files of, as its manifest says, and the removal of old ones."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.files import parse_lines
from ..base.interrupts import Suppressed
from ..base.run_folder import NAME, files_of
from ..record.handover.storage import Keep

PIN = "keep"
"""The name of a file that a person puts into the folder of a window that is to stay."""
_TRACE = ".pt.trace.json"
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}


@dataclass
class StoredWindow:
    """The files of one window of one run; a window that was recorded in parts has several.

    Attributes:
        run: the run.
        rank: the rank.
        window: the window, as in its line.
        paths: the paths of the files relative to the folder of the run.
        end_ns: when the recording ended, in ns since the epoch; 0 if unknown.
        uploaded_paths: those of the files that were uploaded.
        has_steps: whether a file has steps.
        requested: whether somebody asked for it, not only a schedule or a slow step.
    """

    run: str
    rank: int
    window: int | str
    paths: list[str] = field(default_factory=list)
    end_ns: int = 0
    uploaded_paths: set[str] = field(default_factory=set)
    has_steps: bool = False
    requested: bool = False

    @property
    def uploaded(self) -> bool:
        """Whether all files were uploaded."""
        return self.uploaded_paths.issuperset(self.paths)


class StoredWindows:
    """Follows the manifest of a folder, without reading a line twice.

    Args:
        folder: the folder of the run.

    Attributes:
        folder: as given.
        unremovable: the files that could not be removed, as the manifest says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unremovable: set[Path] = set()
        self._read_bytes = 0
        self._windows: dict[tuple[Any, ...], StoredWindow] = {}

    def of_rank(self, rank: int) -> list[StoredWindow]:
        """Return the windows of a rank whose files were not removed, of all runs into the folder, oldest first."""
        self._read()
        return [window for window in self._windows.values() if window.rank == rank]

    def of_run(self, run: str) -> list[StoredWindow]:
        """Return the windows of a run whose files were not removed, oldest first."""
        self._read()
        return [window for window in self._windows.values() if window.run == run]

    def _read(self) -> None:
        with Suppressed(OSError), (self.folder / NAME).open("rb") as file:
            if file.seek(0, 2) < self._read_bytes:  # another file, as the folder was removed meanwhile
                self._read_bytes, self._windows = 0, {}
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0].splitlines(keepends=True)  # another rank may write the last
            self._read_bytes += sum(map(len, whole))
            for line in parse_lines(whole):
                self._note(line)

    def _note(self, line: dict[str, Any]) -> None:
        key: Any = line.get("run"), line.get("rank"), line.get("window")
        paths = files_of(line)
        if line.get("event") == "removed":
            left = [path for path in self._windows[key].paths if path not in paths] if key in self._windows else []
            if left:
                self._windows[key].paths = left
            else:
                self._windows.pop(key, None)
        elif line.get("event") == "upload":
            if key in self._windows and line.get("status") == "done":
                self._windows[key].uploaded_paths.update(paths)
        elif "event" not in line and paths:
            window = self._windows.pop(key, None) or StoredWindow(*key)  # to the end: it is the newest
            window.paths += paths
            window.has_steps |= line.get("steps") is not None
            window.requested |= line.get("requested") is True
            window.end_ns = line["end_ns"] if isinstance(line.get("end_ns"), int) else 0
            self._windows[key] = window


def files_on_disk(folder: Path, window: StoredWindow) -> dict[Path, int]:
    """Return the files of a window that are there, and their sizes in bytes.

    These are the regular files in window folders that the manifest names, and those beside a trace that begin
    with its name, such as its page. No symbolic link is followed.
    """
    sizes: dict[Path, int] = {}
    for place in _places(window):
        beside = f"{place.name.partition(_TRACE)[0]}." if _TRACE in place.name else None
        for file in _regular_files(folder / place.parent):
            if file.name == place.name or (beside is not None and file.name.startswith(beside)):
                with Suppressed(OSError):  # it was removed meanwhile
                    sizes[file] = file.stat().st_size
    return sizes


def is_pinned(folder: Path, window: StoredWindow) -> bool:
    """Return whether a person pinned the folder of a window; in doubt, as of a disk that fails, it is pinned."""
    for pin in {folder / place.parent / PIN for place in _places(window)}:
        try:
            pin.lstat()
        except OSError as error:
            if error.errno in _ABSENT:
                continue
        return True
    return False


def _places(window: StoredWindow) -> Iterator[Path]:
    """Yield the paths in folders of windows, as only such are written."""
    for path in map(Path, window.paths):
        if len(path.parts) == 2 and path.parts[0].startswith("window-") and "\0" not in path.name + path.parts[0]:
            yield path


def _regular_files(folder: Path) -> Iterator[Path]:
    with Suppressed(OSError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            yield from (path for path in folder.iterdir() if stat.S_ISREG(path.lstat().st_mode))


def remove_old_windows(
    stored: StoredWindows, keep: Keep, rank: int, now_ns: int, *, uploaded_only: bool = False
) -> list[dict[str, Any]]:
    """Remove the files of the windows of ``rank`` that are beyond the limits of ``keep``.

    The newest window stays, and so do those that a person pinned, which do not count. Windows that somebody asked
    for go after the others. Other ranks' files stay; a folder goes when it is empty.

    Args:
        stored: the windows of the folder.
        keep: the limits.
        rank: the rank of this process.
        now_ns: the time since the epoch.
        uploaded_only: whether a window that was not uploaded stays.

    Returns:
        A line for the manifest for each window whose files were removed, or cannot be, which is reported once.
    """
    lines = []
    for window, files, reason in _beyond_limits(stored, keep, rank, now_ns):
        if uploaded_only and not window.uploaded:
            continue
        removed, left = _remove(files)
        for folder in {path.parent for path in removed}:
            with suppress(OSError):  # not empty
                folder.rmdir()
        if removed or left.keys() - stored.unremovable:
            stored.unremovable.update(left)
            lines.append(
                {
                    "event": "removed",
                    "run": window.run,
                    "rank": window.rank,
                    "window": window.window,
                    "files": [
                        {"path": path.relative_to(stored.folder).as_posix(), "bytes": size}
                        for path, size in removed.items()
                    ],
                    "left": [
                        {"path": path.relative_to(stored.folder).as_posix(), "reason": why}
                        for path, why in left.items()
                    ],
                    "reason": reason,
                    "time_ns": now_ns,
                }
            )
    return lines


def _beyond_limits(
    stored: StoredWindows, keep: Keep, rank: int, now_ns: int
) -> list[tuple[StoredWindow, dict[Path, int], str]]:
    """Return the windows to remove, the first to go first, with their files and the reason.

    A window without steps, as at the end of a loop, counts as older than those with steps; a window that somebody
    asked for as newer than all but the newest.
    """
    beyond, number, total = [], 0, 0
    newest_first = stored.of_rank(rank)[::-1]
    newest_first.sort(key=lambda window: not window.has_steps)
    others = sorted(newest_first[1:], key=lambda window: (not window.has_steps, not window.requested))
    for window in [*newest_first[:1], *others]:
        files = files_on_disk(stored.folder, window)
        if not files or is_pinned(stored.folder, window):
            continue
        number, total = number + 1, total + sum(files.values())
        reason = _reason(keep, number, total, (now_ns - window.end_ns) / 1e9)
        if number > 1 and reason:
            beyond.append((window, files, reason))
    return beyond[::-1]


def _reason(keep: Keep, number: int, total: int, age_s: float) -> str:
    """Return which limit a window exceeds that is the ``number``-th from the newest; empty for none."""
    if keep.windows is not None and number > keep.windows:
        return f"more than {keep.windows} windows"
    if keep.age_s is not None and age_s > keep.age_s:
        return f"older than {keep.age}"
    if keep.total_bytes is not None and total > keep.total_bytes:
        return f"more than {keep.total}"
    return ""


def _remove(files: Mapping[Path, int]) -> tuple[dict[Path, int], dict[Path, str]]:
    """Remove files; return those that were removed, and the others with the reason."""
    removed, left = dict[Path, int](), dict[Path, str]()
    for path, size in files.items():
        try:
            path.unlink()
            removed[path] = size
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:  # such as a folder that cannot be written to
            left[path] = error.strerror or repr(error)
    return removed, left
