"""Reads and sets signal handlers at the level of the C library.

`signal.getsignal` knows only those that were installed from Python.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

_SIZE = 1024  # bytes, more than a ``struct sigaction`` takes; the handler's address comes first in glibc and musl
_POINTER = 8 if sys.maxsize > 1 << 32 else 4
DEFAULT = bytes(_SIZE)
"""The ``struct sigaction`` of a signal that nothing handles or ignores, without flags."""


def c_library() -> Any:
    """Return the C library from `ctypes.CDLL`; None if it lacks ``sigaction``, or Python lacks ctypes."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        return libc if libc.sigaction else None
    except (ImportError, OSError, AttributeError):
        return None


def exchange(libc: Any, number: int, new: bytes | None = None) -> bytes:
    """Return the ``struct sigaction`` of signal ``number``, and replace it by ``new`` if given.

    Raises:
        OSError: the system rejects the call.
    """
    import ctypes

    old = ctypes.create_string_buffer(_SIZE)
    if libc.sigaction(int(number), new, old):
        raise OSError(f"sigaction failed for signal {number}")
    return old.raw


def handler(action: bytes) -> int:
    """Return the address of the handler in a ``struct sigaction``: 0 is the default, 1 ignores the signal."""
    return int.from_bytes(action[:_POINTER], sys.byteorder)


def c_handler(number: int) -> int | None:
    """Return the address of a signal's handler: 0 is the default, 1 ignores the signal; None if unknown."""
    libc = c_library()
    return None if libc is None else handler(exchange(libc, number))


def is_default(number: int) -> bool:
    """Return whether no code handles or ignores signal ``number``, in Python or, where known, in C."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    return not c_handler(number)
