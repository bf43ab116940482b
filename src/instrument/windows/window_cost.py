"""`WindowCost`: measures what a window costs its loop in time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..interrupts import Suppressed


class WindowCost:
    """Measures the time in which the profiler of a window holds the loop, and the memory of the process.

    The first measurement of memory is made with the object.
    """

    def __init__(self) -> None:
        self._stall_ns = 0
        self._rss_before_bytes = resident_bytes()

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Count the time of the body, in which the profiler is made, starts, stops or writes its trace."""
        began_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._stall_ns += time.perf_counter_ns() - began_ns

    def entry(self) -> dict[str, Any]:
        """Return the keys of the manifest: ``stall_s``, ``rss_before_bytes`` and ``rss_after_bytes``."""
        return {
            "stall_s": self._stall_ns / 1e9,
            "rss_before_bytes": self._rss_before_bytes,
            "rss_after_bytes": resident_bytes(),
        }


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None where the system has no ``/proc``."""
    with Suppressed(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
