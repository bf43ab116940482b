"""`FileKeeping`: in the finishing process, what happens to the files of a window after its line is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..run_folder import NAME, files_of
from .manifest import append
from .remote import masked
from .retention import remove_old_windows
from .storage import Storage
from .stored_windows import StoredWindows
from .upload import TOO_LATE, Upload, Uploader, run_lines


class FileKeeping:
    """Uploads windows and removes old ones, and notes both in the manifest.

    Args:
        folder: the folder of the run.
        run: the run, as in its lines.
        storage: what the user wants.
        on_uploaded: called on another thread when there is something to do for `note_uploads`.
    """

    def __init__(self, folder: Path, run: str, storage: Storage, on_uploaded: Callable[[], None]) -> None:
        self._folder = folder
        self._run = run
        self._storage = storage
        self._stored = StoredWindows(folder)
        self._unwritten: list[bytes] = []  # lines, until they are in the manifest
        self._unlogged: list[Mapping[str, Any]] = []  # lines, until they are taken for the log
        self._uploader = Uploader(storage.upload, on_uploaded) if storage.upload else None
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
