"""The errors that this library raises."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .printable import printable
from .units import duration


class InstrumentError(Exception):
    """Base class of the errors of this library."""


class TraceError(InstrumentError, ValueError):
    """A trace or a memory snapshot that cannot be read.

    Attributes:
        path: the file.
        reason: why it cannot be read, in words.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # both, so that the error pickles
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return printable(f"cannot read {self.path}: {self.reason}")


class TimeSum(NamedTuple):
    """The calls of a kernel or a layer, and the time that the GPU took for all of them."""

    name: str
    calls: int
    time_ns: int


class TimeSumsError(TraceError):
    """A profile without a timeline, which is not a trace: it has sums of GPU time by name.

    Attributes:
        sums: the sums, the largest first.
    """

    def __init__(self, path: Path, reason: str, sums: tuple[TimeSum, ...] = ()) -> None:
        super().__init__(path, reason)
        self.sums = sums

    def __str__(self) -> str:
        most = ", ".join(f"{each.name[:80]} {duration(each.time_ns)}" for each in self.sums[:3])
        return printable(f"{super().__str__()}. GPU time by name: {most}")


class CaptureError(InstrumentError):
    """A window that cannot be recorded; the message is the reason that the manifest gives."""


class SyncError(InstrumentError, RuntimeError):
    """A synchronization that is not allowed: in `no_syncs`, at level "error", or beyond a budget."""


class LaunchError(InstrumentError, RuntimeError):
    """A vendor's profiler that cannot be run; the message says how to get it."""
