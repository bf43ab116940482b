"""Reads signal handlers at the level of the C library.

`signal.getsignal` knows only those that were installed from Python.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

_SIZE = 1024  # bytes, more than a ``struct sigaction`` takes; the handler's address comes first in glibc and musl
_POINTER = 8 if sys.maxsize > 1 << 32 else 4


def c_library() -> Any:
    """Return the C library from `ctypes.CDLL`; None if it lacks ``sigaction``, or Python lacks ctypes."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        return libc if libc.sigaction else None
    except (ImportError, OSError, AttributeError):
        return None


def c_handler(number: int) -> int | None:
    """Return the address of a signal's handler: 0 is the default, 1 ignores the signal; None if unknown."""
    libc = c_library()
    if libc is None:
        return None
    import ctypes

    action = ctypes.create_string_buffer(_SIZE)
    if libc.sigaction(int(number), None, action):
        raise OSError(f"sigaction failed for signal {number}")
    return int.from_bytes(action.raw[:_POINTER], sys.byteorder)


def is_default(number: int) -> bool:
    """Return whether no code handles or ignores signal ``number``, in Python or, where known, in C."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    return not c_handler(number)
