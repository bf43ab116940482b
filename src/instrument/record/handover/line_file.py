"""`LineFile`: a file to which one process appends objects, and from which another one takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.interrupts import Suppressed
from ...base.run_folder import parse_lines


class LineFile:
    """Lines of JSON. The file is open only during a call, so no program can close it, and no fork holds it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken_bytes = 0

    def append(self, value: Mapping[str, Any]) -> None:
        """Append an object.

        Raises:
            OSError: it cannot be written. A part of it may be; readers skip that.
        """
        # One write in append mode: a signal handler may append too. The first newline ends a part.
        with self.path.open("ab", buffering=0) as file:
            file.write(b"\n" + json.dumps(value).encode() + b"\n")

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were appended since the last call; one is taken when the next is asked for."""
        data = b""
        with Suppressed(OSError), self.path.open("rb") as file:  # not there yet, or removed
            file.seek(self._taken_bytes)
            data = file.read()
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield from parse_lines([line])
                self._taken_bytes += len(line)
