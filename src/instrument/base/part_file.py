"""Writes files whole or not at all, through a temporary file beside each, and creates folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import process_id
from .interrupts import Suppressed, is_interrupt

# .tmp: torch's own suffix while it writes
_PART = re.compile(rf"\..+\.{process_id.WRITER}\.part(\.tmp)?")


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, unless it is there.

    `Path.mkdir` with ``exist_ok`` drops an `OSError` that a signal handler raises, such as `TimeoutError`.

    Raises:
        OSError: it cannot be created, or is a file.
    """
    try:
        _make(folder)
    except FileNotFoundError as error:
        if is_interrupt(error) or folder == folder.parent:
            raise
        make_folder(folder.parent)
        _make(folder)


def _make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:  # of an existing folder also that its file system is read-only, for example
        if is_interrupt(error) or not folder.is_dir():
            raise


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """Yield a path for a temporary file in the same folder, which is removed at the end if it is still there.

    `publish` gives the file its name when it is whole. The hidden name tells which process writes it, for
    `remove_stale_parts`.
    """
    part = path.with_name(f".{path.name}.{process_id.writer()}.part")
    try:
        yield part
    finally:
        with Suppressed(OSError):
            part.unlink(missing_ok=True)


def publish(part: Path, path: Path) -> None:
    """Give a whole file its name, so that it is there, and whole, even after the machine loses power.

    Raises:
        OSError: the file cannot be written to the disk, or not renamed.
    """
    sync(part)
    part.replace(path)
    with Suppressed(OSError):  # a system that cannot sync folders
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk: milliseconds.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_stale_parts(folder: Path) -> None:
    """Remove the temporary files in ``folder`` of processes of this host that have exited."""
    with Suppressed(OSError), os.scandir(folder) as files:
        for file in files:
            found = _PART.fullmatch(file.name)
            if found is not None and process_id.has_exited(found):
                with Suppressed(OSError):  # another rank removed it
                    Path(file.path).unlink()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the system with the folder that cannot be written to, rather than a temporary name."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}") from None
