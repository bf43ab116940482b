"""The log of Kineto: its lines about the start and the stop of a recording, which torch 2.13 and later print."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

from ..interrupts import Suppressed

_ERROR, _USDT = 4, 5  # Kineto's severities: what torch lets it print, and that of these lines


@contextlib.contextmanager
def without_start_and_stop() -> Iterator[None]:
    """Keep Kineto from printing "USDT: ... profiler_start" and "profiler_stop" while the body runs.

    These lines have the highest severity, so that an error that Kineto logs meanwhile is not printed either. They
    stay where the program chose what Kineto prints, by ``KINETO_LOG_LEVEL``, and where this variable of Kineto
    cannot be found.
    """
    severity = None if "KINETO_LOG_LEVEL" in os.environ else _least_severity()
    if severity is None or severity.value != _ERROR:
        yield
        return
    severity.value = _USDT + 1
    try:
        yield
    finally:
        severity.value = _ERROR


@functools.cache
def _least_severity() -> ctypes.c_int | None:
    """Return the least severity that Kineto prints; None in a version of torch without these lines."""
    import torch

    with Suppressed(OSError, ValueError, AttributeError):
        library = ctypes.CDLL(torch._C.__file__)  # finds the symbols of the libraries that it is linked to
        name = library._ZN9libkineto8toStringENS_16LoggerOutputTypeE
        name.restype = ctypes.c_char_p
        if (name(_ERROR), name(_USDT)) == (b"ERROR", b"USDT"):
            return ctypes.c_int.in_dll(library, "_ZN9libkineto6Logger14severityLevel_E")
    return None
