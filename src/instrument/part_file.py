"""`part_file`: a temporary file beside the file to write, so that an interrupt leaves the old one whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """Yield a path for a temporary file in the same folder, which is removed at the end if it is still there.

    The file takes the place of ``path`` when it is whole: ``part.replace(path)``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        yield part
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the system with the folder that cannot be written to, rather than a temporary name."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}") from None
