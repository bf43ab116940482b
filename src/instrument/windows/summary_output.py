"""`SummaryOutput`: writes the summary and the waiting line to a standard error that may block or be broken."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import stderr
from ..guard import guard
from ..interrupts import Suppressed
from .waiting_line import WaitingLine

_ROOM_S = 5.0  # how long the text waits for room in the stream, such as a pipe
_CHUNK = 1024  # characters, which a pipe that is ready for any takes at once


class SummaryOutput:
    """Standard error, for what the end of a run prints.

    Attributes:
        stream: the stream; None means ``sys.stderr`` at that time.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self._waiting: WaitingLine | None = None

    def print(self, text: str) -> None:
        """Write to `stream` or, if it is closed or broken, to ``sys.stderr``."""
        if self.stream is None or not _write_while_read(text, self.stream):
            _write_while_read(text, sys.stderr)

    @contextmanager
    def waiting_line(self, text: str) -> Iterator[Callable[[], None]]:
        """Yield the function that shows ``text`` once the wait is long; without a line, as it failed, nothing."""
        self._waiting = None
        with guard.contained("the waiting line"):
            self._waiting = WaitingLine(text, self._current())
        waiting = self._waiting
        try:
            yield waiting.update if waiting is not None else lambda: None
        finally:
            if waiting is not None:
                waiting.erase()

    def erase_waiting_line(self) -> None:
        """Erase the line, which appears no more in this wait."""
        if self._waiting is not None:
            self._waiting.erase()

    def terminal(self) -> dict[str, Any]:
        """Return the properties of the stream that rich would detect in this process."""
        columns = None
        if "COLUMNS" not in os.environ:
            for file in (0, 1, 2):
                with Suppressed(OSError):
                    columns = os.get_terminal_size(file).columns or None
                    break
        stream, colors = self._current(), None
        with Suppressed(Exception):  # the program may have replaced it by any object
            colors = stream.isatty() or None
        encoding = getattr(stream, "encoding", None)
        return {
            "columns": columns,
            "colors": colors,
            "encoding": encoding if isinstance(encoding, str) else "utf-8",
        }

    def _current(self) -> Any:
        return sys.stderr if self.stream is None else self.stream


def _write_while_read(text: str, file: Any) -> bool:
    """Write to ``file`` while its reader keeps up; return False if it is closed, broken or missing."""
    with Suppressed(OSError, ValueError, AttributeError):
        text = stderr.fresh_line(file) + text
        for start in range(0, len(text), _CHUNK):
            if not _wait_until_writable(file):
                break
            stderr.write(text[start : start + _CHUNK], file)
        return True
    return False


def _wait_until_writable(file: Any) -> bool:
    """Return whether ``file`` accepts more within a time limit: a thread that hangs in a write aborts the exit."""
    with Suppressed(OSError, ValueError):  # without a file descriptor, as in a notebook
        return bool(select.select([], [file.fileno()], [], _ROOM_S)[1])
    return True
