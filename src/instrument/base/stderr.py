"""Writes to standard error, and keeps that of the start of the process, as programs may replace ``sys.stderr``."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from .interrupts import Suppressed

_stderr_at_start: tuple[Any, os.stat_result] | None = None


def remember() -> None:
    """Store the present ``sys.stderr``; `instrument run` calls this before the program begins."""
    global _stderr_at_start
    with Suppressed(OSError, ValueError, AttributeError):
        _stderr_at_start = sys.stderr, os.fstat(sys.stderr.fileno())


def forget() -> None:
    """Use the present ``sys.stderr`` from now on, as in a notebook, whose cells show it."""
    global _stderr_at_start
    _stderr_at_start = None


def at_start() -> Any:
    """Return the file that `remember` stored; None without one, or if its descriptor was closed or reused."""
    if _stderr_at_start is None:
        return None
    file, before = _stderr_at_start
    with Suppressed(OSError, ValueError):
        return file if os.path.samestat(before, os.fstat(file.fileno())) else None
    return None


def fresh_line(file: Any) -> str:
    """Return what moves the cursor of a terminal to the start of a line, below one that has text on it.

    Nobody can ask where the cursor is: a progress bar of the program may be there. Spaces for all columns
    reach the next line only from within a line. Empty if ``file`` is no terminal.
    """
    with Suppressed(Exception):  # the program may have replaced it by any object
        if _is_own(file) and file.isatty():
            columns = os.get_terminal_size(file.fileno()).columns
            return f"{' ' * columns}\r" if columns else "\n"
    return ""


def write(text: str, file: Any) -> None:
    """Write to ``file``, such as ``sys.stderr``, and leave nothing in its buffer where that fails.

    Python would write the rest at its exit, fail again, and end the program with exit code 120.

    Raises:
        OSError, ValueError, AttributeError: the file is broken, full, closed or None.
    """
    if not _is_own(file):
        file.write(text)
        file.flush()
        return
    file.flush()  # what the program wrote comes first
    rest = memoryview(text.encode(file.encoding, file.errors or "strict"))
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def _is_own(file: Any) -> bool:
    """Return whether ``file`` is one of Python's own, whose descriptor can be written to."""
    return type(file) is io.TextIOWrapper and isinstance(getattr(file.buffer, "raw", None), io.FileIO)
