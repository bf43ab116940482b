"""Whether the disk can take the files of a window: may the folder be written to, and is there room?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from .errors import CaptureError
from .interrupts import Suppressed, is_interrupt
from .units import size


def unwritable(folder: Path) -> str | None:
    """Return why ``folder``, which need not exist, cannot be written to, as a sentence; None if it can be.

    The test leaves no file behind.
    """
    place = nearest_folder(folder)
    try:
        tempfile.TemporaryFile(dir=place).close()  # os.access says yes to root, also in /proc
    except OSError as error:
        if is_interrupt(error):
            raise
        where = "" if place == folder else f"nothing can be created in {place}: "
        return f"cannot write to {folder}: {where}{error.strerror}"
    return None


def nearest_folder(folder: Path) -> Path:
    """Return ``folder``, or the closest folder above it that is there."""
    while folder != folder.parent:
        with Suppressed(OSError, ValueError):  # `os.path.lexists` would drop errors of a signal handler too
            folder.lstat()
            break
        folder = folder.parent
    return folder


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
        place = nearest_folder(folder)
        disk = shutil.disk_usage(place)
        needed = min(_FREE_BYTES, int(disk.total * _FREE_SHARE)) + 2 * window_bytes
        if disk.total and disk.free < needed:
            raise CaptureError(
                f"only {size(disk.free)} are free in {place}, and a window starts with {size(needed)}"
            )
