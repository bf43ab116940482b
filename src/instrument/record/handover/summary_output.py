"""`SummaryOutput`: writes the summary and the waiting line to a standard error that may block or be broken."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...base import stderr
from ...base.guard import guard
from ...base.interrupts import Suppressed

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


_AFTER_S = 2.0  # shorter waits show nothing
_ERASE = "\r\x1b[K"


class WaitingLine:
    """One line of a terminal, which appears once the wait is long and is erased at its end.

    rich would draw a bar, but its import changes the state of the program.

    Args:
        text: the line.
        stream: the file to write to; nothing is written if it is not a terminal.
    """

    def __init__(self, text: str, stream: Any) -> None:
        self._text = text
        self._stream = stream
        self._due = time.monotonic() + _AFTER_S
        self._shown = False
        self._over = False

    def update(self) -> None:
        """Show the line if it is time."""
        if not (self._shown or self._over) and time.monotonic() >= self._due:
            self._shown = True
            self._write(f"{stderr.fresh_line(self._stream)}{self._text} ...")

    def erase(self) -> None:
        """Erase the line, which does not appear again."""
        self._over = True
        if self._shown:
            self._shown = False
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        with Suppressed(Exception):  # the program may have replaced the stream by any object
            if self._stream.isatty():
                stderr.write(text, self._stream)
