"""`LineFile`: a file to which one process appends objects, and from which another one takes them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .interrupts import Suppressed
from .run_folder import parse_lines


class LineFile:
    """Lines of JSON. The file is open only during a call, so no program can close it, and no fork holds it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken_bytes = 0

    def create(self) -> None:
        """Create the file, which only this user can read and write.

        Raises:
            OSError: it cannot be created, or exists.
        """
        os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def append(self, value: Mapping[str, Any]) -> None:
        """Append an object.

        Raises:
            OSError: it cannot be written, or was removed. A part of the line may be written; readers skip that.
        """
        # One write in append mode: a signal handler may append too. The first newline ends a part.
        line = b"\n" + json.dumps(value).encode() + b"\n"
        descriptor = os.open(self.path, os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were appended since the last call; one is taken when the next is asked for."""
        data = b""
        with Suppressed(OSError):  # it was removed
            if self.path.stat().st_size > self._taken_bytes:
                with self.path.open("rb") as file:
                    file.seek(self._taken_bytes)
                    data = file.read()
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield from parse_lines([line])
                self._taken_bytes += len(line)
