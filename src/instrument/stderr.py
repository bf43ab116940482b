"""Standard error as the process had it at its start, for programs that capture or replace ``sys.stderr``."""

from __future__ import annotations

import os
import sys
from typing import Any

from .interrupts import Suppressed

_kept: tuple[Any, os.stat_result] | None = None


def keep() -> None:
    """Keep ``sys.stderr`` as it is now; `instrument run` does so before the program begins."""
    global _kept
    with Suppressed(OSError, ValueError, AttributeError):
        _kept = sys.stderr, os.fstat(sys.stderr.fileno())


def at_start() -> Any:
    """Return what `keep` kept; None without it, or where its file is closed or is another one by now."""
    if _kept is None:
        return None
    file, before = _kept
    with Suppressed(OSError, ValueError):
        return file if os.path.samestat(before, os.fstat(file.fileno())) else None
    return None
