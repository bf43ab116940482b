"""Refuses a window when the disk is nearly full."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import CaptureError
from ..interrupts import Suppressed
from ..units import size
from .manifest import existing

_FREE_BYTES = 1_000_000_000  # that a window leaves to the program, such as for its checkpoint ...
_FREE_SHARE = 0.05  # ... or this share of a small disk


def refuse_full_disk(folder: Path, window_bytes: int) -> None:
    """Raise if a window might fill the disk; costs microseconds.

    Args:
        folder: where its files go; it need not exist.
        window_bytes: the size of the trace of the last window, of which there is a compressed copy for a moment.

    Raises:
        CaptureError: less than 1 GB is free, or 5 % of a disk below 20 GB, beside the files of the window.
    """
    with Suppressed(OSError):  # the folder cannot be read: saving says why
        place = existing(folder)
        disk = shutil.disk_usage(place)
        needed = min(_FREE_BYTES, int(disk.total * _FREE_SHARE)) + 2 * window_bytes
        if disk.total and disk.free < needed:
            raise CaptureError(
                f"only {size(disk.free)} are free in {place}, and a window starts with {size(needed)}"
            )
