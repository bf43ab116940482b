"""The handlers of signals as the system knows them: `signal.getsignal` knows those alone that Python set."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from typing import Any

_ROOM = 256  # bytes, more than a ``struct sigaction`` takes; the handler's address comes first in glibc and musl


def c_handler(number: int) -> int | None:
    """Return the address of a signal's handler: 0 is the default, 1 ignores it; None if it is not known."""
    try:
        libc: Any = ctypes.CDLL(None)
        found = ctypes.create_string_buffer(_ROOM)
        if libc.sigaction(number, None, found) != 0:
            return None
        return ctypes.c_void_p.from_buffer(found).value or 0
    except (OSError, AttributeError):
        return None


def is_default(number: int) -> bool:
    """Tell whether nothing handles or ignores signal ``number``, be it in C; as Python says where C cannot."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    handler = c_handler(number)
    if handler is not None:
        return handler == 0
    caught = _caught()
    return caught is None or not caught >> (number - 1) & 1


def _caught() -> int | None:
    """Return the mask of the signals that have a handler, as Linux says; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return None
