"""`FileKeeping`: uploads windows and removes old ones, once they have their lines; `Uploader`, `StoredWindows`."""

from __future__ import annotations

import errno
import json
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..base.files import parse_lines
from ..base.interrupts import Suppressed
from ..base.run_folder import NAME, files_of
from ..record.handover.manifest import append
from ..record.handover.storage import Keep, Storage, masked

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


class FileKeeping:
    """Uploads windows and removes old ones, and notes both in the manifest.

    Args:
        folder: the folder of the run.
        run: the run, as in its lines.
        storage: what the user wants.
    """

    def __init__(self, folder: Path, run: str, storage: Storage) -> None:
        self._folder = folder
        self._run = run
        self._storage = storage
        self._stored = StoredWindows(folder)
        self._unwritten: list[bytes] = []  # lines, until they are in the manifest
        self._unlogged: list[Mapping[str, Any]] = []  # lines, until they are taken for the log
        self._uploader = Uploader(storage.upload) if storage.upload else None
        self._failed = False  # an upload failed, and the user was told
        if self._uploader is not None:  # those that an earlier finishing process left
            for window in self._stored.of_run(run):
                if not window.uploaded:
                    self._upload({"rank": window.rank, "window": window.window}, window.paths)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take over the files of a window, whose line is in the manifest.

        Raises:
            OSError: the manifest cannot be written; the next call tries again.
        """
        if files := files_of(entry):
            self._upload(entry, [*files, *files_of(entry, "diagnosis")])
        self._remove_old(entry["rank"])

    def note_uploads(self) -> str | None:
        """Write the lines of uploads that are done, and remove windows that waited for them.

        Returns:
            The failure of an upload, for the first one of this process.

        Raises:
            OSError: as `add`.
        """
        failure = None
        for upload in self._uploader.take_done() if self._uploader is not None else ():
            failure = failure or upload.failure
            if upload.entry is not None:
                self._note([self._upload_line(upload, upload.entry)])
                self._remove_old(upload.entry["rank"])
        told, self._failed = self._failed, self._failed or failure is not None
        return None if told else failure

    def take_unlogged(self) -> list[Mapping[str, Any]]:
        """Return the lines since the last call."""
        taken, self._unlogged = self._unlogged, []
        return taken

    def end(self) -> tuple[str | None, bool]:
        """Wait for uploads, as long as the user allows, and write their lines.

        Returns:
            The result of `note_uploads`, and whether a connection hangs.

        Raises:
            OSError: as `add`.
        """
        if self._uploader is None:
            return None, False
        deadline = time.monotonic() + self._storage.upload_timeout
        in_time = self._uploader.wait(deadline)
        failure = self.note_uploads()
        if in_time:  # the lines that followed the last window
            self._uploader.add(Upload({}, self._lines))
            in_time = self._uploader.wait(deadline)
        if not in_time:
            self._uploader.give_up()
        return self.note_uploads() or failure, not in_time

    def _upload(self, entry: Mapping[str, Any], paths: Sequence[str]) -> None:
        if self._uploader is not None:
            self._uploader.add(Upload({path: self._folder / path for path in paths}, self._lines, entry))

    def _lines(self) -> dict[str, bytes]:
        """Return the lines of this run in a file of its own, as no store can append, and runs share the folder."""
        return {f"manifest.{self._run}.jsonl": run_lines(self._folder / NAME, self._run)}

    def _upload_line(self, upload: Upload, entry: Mapping[str, Any]) -> dict[str, Any]:
        late = f"{TOO_LATE}, within {self._storage.upload_timeout:g} s"
        failure = late if upload.failure == TOO_LATE else upload.failure
        return {
            "event": "upload",
            "run": self._run,
            "rank": entry["rank"],
            "window": entry["window"],
            "files": [{"path": path} for path in upload.files],
            "url": masked(self._storage.upload or ""),
            "status": "done" if failure is None else f"failed: {failure}",
            "seconds": upload.seconds,
            "time_ns": time.time_ns(),
        }

    def _remove_old(self, rank: int) -> None:
        if self._storage.keep is not None:
            self._note(
                remove_old_windows(
                    self._stored,
                    self._storage.keep,
                    rank,
                    time.time_ns(),
                    uploaded_only=self._uploader is not None,
                )
            )

    def _note(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._unlogged += lines
        self._unwritten += [json.dumps(line).encode() + b"\n" for line in lines]
        if self._unwritten:
            append(self._folder, self._unwritten)


_ATTEMPTS = 5  # for each file
_FIRST_DELAY_S = 1.0  # before the second attempt; it doubles, and varies by half, so that ranks spread
TOO_LATE = "the run ended before it was done"


@dataclass
class Upload:
    """Files to copy, and what became of it.

    Args:
        files: the local paths, by the names in the remote folder.
        text: returns texts to write after the files, by name.
        entry: the line of the window; None for texts alone.

    Attributes:
        failure: why it failed; None if it did not.
        seconds: how long it took.
        done: whether it was copied, or failed.
    """

    files: Mapping[str, Path]
    text: Callable[[], Mapping[str, bytes]]
    entry: Mapping[str, Any] | None = None
    failure: str | None = None
    seconds: float = 0
    done: bool = False


class Uploader:
    """Copies one `Upload` after the other, with retries; a failure never touches the local files.

    Args:
        url: the remote folder, as fsspec takes it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: SimpleQueue[Upload] = SimpleQueue()
        self._uploads: list[Upload] = []  # in order, until `take_done` returns them
        self._changed = threading.Condition()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, upload: Upload) -> None:
        """Begin to copy, after those before it."""
        with self._changed:
            self._uploads.append(upload)
        self._tasks.put(upload)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="instrument upload", daemon=True)
            self._thread.start()

    def take_done(self) -> list[Upload]:
        """Return the uploads that were done or failed since the last call."""
        with self._changed:
            done = [upload for upload in self._uploads if upload.done]
            self._uploads = [upload for upload in self._uploads if not upload.done]
        return done

    def wait(self, deadline: float) -> bool:
        """Wait until all are done; return False if that is not so at ``deadline``, on the monotonic clock."""
        with self._changed:
            timeout_s = max(deadline - time.monotonic(), 0)
            return self._changed.wait_for(lambda: all(upload.done for upload in self._uploads), timeout_s)

    def give_up(self) -> None:
        """Fail unfinished uploads; one that hangs in its connection may go on."""
        self._given_up.set()
        with self._changed:
            for upload in self._uploads:
                if not upload.done:
                    upload.failure, upload.done = upload.failure or TOO_LATE, True

    def _run(self) -> None:
        while not self._given_up.is_set():
            upload = self._tasks.get()
            began, failure = time.monotonic(), None
            try:
                self._copy(upload)
            except Exception as error:
                failure = masked(f"{type(error).__name__}: {error}", self._url)
            with self._changed:
                if upload.done:  # given up
                    return
                upload.failure, upload.seconds = failure, round(time.monotonic() - began, 3)
                upload.done = True
                self._changed.notify_all()

    def _copy(self, upload: Upload) -> None:
        for name, path in upload.files.items():
            self._retry(name, path)
        for name, text in upload.text().items():
            self._retry(name, text)

    def _retry(self, name: str, content: Path | bytes) -> None:
        """Write the content of a file, or a text, to ``name`` there; try again unless the file is gone."""
        for attempt in range(_ATTEMPTS):
            try:
                self._write(name, content)
                return
            except Exception:
                delay_s = _FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.5)
                gone = isinstance(content, Path) and not content.exists()
                if gone or attempt + 1 == _ATTEMPTS or self._given_up.wait(delay_s):
                    raise

    def _write(self, name: str, content: Path | bytes) -> None:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self._url)
        path = f"{root.rstrip('/')}/{name}"

        def write() -> None:
            fs.put_file(str(content), path) if isinstance(content, Path) else fs.pipe_file(path, content)

        try:
            write()
        except FileNotFoundError:  # no such folder; object stores need none
            if not fs.exists(_top(path)):  # such as a bucket with a typing error, which must not be created
                raise
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()


def _top(path: str) -> str:
    """Return the first folder of a path: the bucket in an object store."""
    first, *rest = path.split("/")
    return first or f"/{rest[0]}"


def run_lines(manifest: Path, run: str) -> bytes:
    """Return the lines of one run in a manifest."""
    lines = parse_lines(manifest.read_bytes().splitlines())
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines if line.get("run") == run)
