"""Keeps the standard error of the start of the process, as programs may capture or replace ``sys.stderr``."""

from __future__ import annotations

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


def at_start() -> Any:
    """Return the file that `remember` stored; None without one, or if its descriptor was closed or reused."""
    if _stderr_at_start is None:
        return None
    file, before = _stderr_at_start
    with Suppressed(OSError, ValueError):
        return file if os.path.samestat(before, os.fstat(file.fileno())) else None
    return None
