"""`FileKeeping`: uploads windows and removes old ones, once they have their lines."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..base.files import parse_lines
from ..base.run_folder import NAME, files_of
from ..record.handover.manifest import append
from ..record.handover.storage import Storage, masked
from .stored_windows import StoredWindows, remove_old_windows


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
