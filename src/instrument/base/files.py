"""Writes files whole or not at all, files of lines, and folders; keeps descriptors that the program may close."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
            if process_id.has_exited(_PART.fullmatch(file.name)):
                with Suppressed(OSError):  # another rank removed it
                    Path(file.path).unlink()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise errors of the system with the folder that cannot be written to, rather than a temporary name."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror or error}") from None


class LineFile:
    """Lines of JSON. The file is open only during a call, so no program can close it, and no fork holds it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken_bytes = 0

    def create(self) -> None:
        """Create the file, which only this user can read and write.

        Raises:
            OSError: it cannot be created, or exists.
        """
        os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def append(self, value: Mapping[str, Any]) -> None:
        """Append an object.

        Raises:
            OSError: it cannot be written, or was removed. A part of the line may be written; readers skip that.
        """
        # One write in append mode: a signal handler may append too. The first newline ends a part.
        line = b"\n" + json.dumps(value).encode() + b"\n"
        descriptor = os.open(self.path, os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were appended since the last call; one is taken when the next is asked for."""
        data = b""
        with Suppressed(OSError):  # it was removed
            if self.path.stat().st_size > self._taken_bytes:
                with self.path.open("rb") as file:
                    file.seek(self._taken_bytes)
                    data = file.read()
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield from parse_lines([line])
                self._taken_bytes += len(line)


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects in lines of JSON; a line of anything else, such as a part of one, is left out."""
    for line in lines:
        with Suppressed(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


_LOWEST_NUMBER = 256  # programs close ranges from 3 up, and new files get the lowest free number


def _move_up(descriptor: int) -> int:
    """Move ``descriptor`` to a high number and return that; return ``descriptor`` itself if that fails."""
    try:
        import fcntl
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = _LOWEST_NUMBER if soft == resource.RLIM_INFINITY else min(_LOWEST_NUMBER, soft // 2)
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    except (ImportError, OSError) as error:  # Windows; none is free
        if is_interrupt(error):
            raise
        return descriptor
    os.close(descriptor)
    return high


class OwnDescriptor:
    """A descriptor with a high number that detects whether the number still belongs to its file.

    Args:
        descriptor: the descriptor to take over.

    Attributes:
        number: the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.number = _move_up(descriptor)
        self._file_identity = _identity_of_file(self.number)

    @property
    def is_valid(self) -> bool:
        """Whether the number still belongs to the file, which the program may have closed; 0.5 us."""
        return self._file_identity is not None and _identity_of_file(self.number) == self._file_identity

    def read(self, size: int) -> bytes:
        """Wait for at most ``size`` bytes; return none at the end of the file, or if the program closed it."""
        if self.is_valid:
            with Suppressed(OSError):
                return os.read(self.number, size)
        return b""

    def close(self) -> None:
        """Close the file, unless somebody else did."""
        if self.is_valid:
            self._file_identity = None
            os.close(self.number)


def _identity_of_file(descriptor: int) -> tuple[int, int] | None:
    with Suppressed(OSError):
        file = os.fstat(descriptor)
        return file.st_dev, file.st_ino
    return None
