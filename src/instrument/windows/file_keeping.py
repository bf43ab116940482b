"""`FileKeeping`: in the finishing process, what happens to the files of a window after its line is written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .manifest import append
from .retention import remove_old_windows
from .storage import Storage
from .stored_windows import StoredWindows


class FileKeeping:
    """Removes old windows, and notes in the manifest what was removed.

    Args:
        folder: the folder of the run.
        storage: what the user wants.
    """

    def __init__(self, folder: Path, storage: Storage) -> None:
        self._folder = folder
        self._storage = storage
        self._stored = StoredWindows(folder)
        self._unwritten: list[bytes] = []  # lines, until they are in the manifest

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take over the files of a window, whose line is in the manifest.

        Raises:
            OSError: the manifest cannot be written; the next call tries again.
        """
        self._remove_old(entry["rank"])

    def _remove_old(self, rank: int) -> None:
        if self._storage.keep is not None:
            self._note(remove_old_windows(self._stored, self._storage.keep, rank, time.time_ns()))

    def _note(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._unwritten += [json.dumps(line).encode() + b"\n" for line in lines]
        if self._unwritten:
            append(self._folder, self._unwritten)
