"""`OpenWindow`: the line of the manifest for a window that is open while its process is killed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import process_id
from .interrupts import Suppressed
from .part_file import make_folder

_NAME = re.compile(rf"\.{process_id.WRITER}\.open\.json")
_REASON = "the program was killed while the window was open, by SIGKILL for example, or because memory ran out"


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
            self._path.write_text(json.dumps({**entry, "status": "failed", "reason": _REASON}))

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
            found = _NAME.fullmatch(path.name)
            if found is not None and process_id.has_exited(found):
                with Suppressed(OSError, ValueError):
                    entry = json.loads(path.read_bytes())
                    if isinstance(entry, dict):
                        yield path, entry
