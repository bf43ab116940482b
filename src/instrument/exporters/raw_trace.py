"""The files of a trace: as torch.profiler wrote it, while it is compressed, and compressed."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from ..interrupts import Suppressed


def packed(raw: Path) -> Path:
    """Return where the trace lies once it is compressed."""
    return raw.with_name(f"{raw.name}.gz")


def part(raw: Path) -> Path:
    """Return where it lies while it is compressed."""
    return raw.with_name(f"{raw.name}.part")


def compress(raw: Path) -> Path:
    """Write the trace compressed, and return where; ``raw`` stays.

    Raises:
        OSError: it cannot be read, or the copy cannot be written; nothing of the copy is left then.
    """
    try:
        # Level 1: 3 ms a MB; the default level of torch's own .gz takes 45-120 ms.
        with raw.open("rb") as source, gzip.open(part(raw), "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part(raw).replace(packed(raw))
    except BaseException:  # a full disk: the trace stays as it is, which viewers read as well
        with Suppressed(OSError):
            part(raw).unlink(missing_ok=True)
        raise
    return packed(raw)
