"""Keeps file descriptors open while the program runs, at numbers that programs rarely use.

A program may close descriptors that it did not open, as daemons do, and open its own files under these numbers.
"""

from __future__ import annotations

import os

from .interrupts import Suppressed, is_interrupt

_LOWEST_NUMBER = 256  # programs close ranges from 3 up, and new files get the lowest free number


def move_up(descriptor: int) -> int:
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
        self.number = move_up(descriptor)
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
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    return None
