"""`WaitingLine`: says at a terminal what the end of a run waits for."""

from __future__ import annotations

import time
from typing import Any

from .. import stderr
from ..interrupts import Suppressed

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
