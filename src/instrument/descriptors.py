"""File descriptors that stay open while the program runs, kept out of its way.

A program may close descriptors that it did not open, as daemons do, and then open files under these numbers.
"""

from __future__ import annotations

import os
import socket

from .interrupts import Suppressed, is_interrupt

_HIGH = 256  # programs close ranges from 3 up; the lowest free number goes to what they open next


def raised(descriptor: int) -> int:
    """Move ``descriptor`` to a high number and return that; return ``descriptor`` itself if that fails."""
    try:
        import fcntl
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = _HIGH if soft == resource.RLIM_INFINITY else min(_HIGH, soft // 2)
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    except (ImportError, OSError) as error:  # Windows; none is free
        if is_interrupt(error):
            raise
        return descriptor
    os.close(descriptor)
    return high


class OwnDescriptor:
    """A descriptor with a high number, which knows whether the number is still that of its file.

    Args:
        descriptor: what it takes over.

    Attributes:
        number: the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.number = raised(descriptor)
        self._file = _file(self.number)

    @property
    def own(self) -> bool:
        """Whether the number is that of the file, which the program may have closed; 0.5 us."""
        return self._file is not None and _file(self.number) == self._file

    def read(self, size: int) -> bytes:
        """Wait for bytes, at most ``size``; return none at the end, and where the program closed the file."""
        if self.own:
            with Suppressed(OSError):
                return os.read(self.number, size)
        return b""

    def close(self) -> None:
        """Close the file, unless somebody else did."""
        if self.own:
            self._file = None
            os.close(self.number)


class OwnSocket(socket.socket):
    """A connected socket with a high number, which is closed only while that is the number of its file."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected.family, connected.type, connected.proto, fileno=raised(connected.detach()))
        self._file = _file(self.fileno())

    @property
    def own(self) -> bool:
        """Whether the number is that of the file, which the program may have closed; else it is left alone."""
        if self.fileno() >= 0 and _file(self.fileno()) != self._file:
            self.detach()
        return self.fileno() >= 0

    def close(self) -> None:
        """Close the file, unless somebody else did."""
        if self.own:
            super().close()


def _file(descriptor: int) -> tuple[int, int] | None:
    with Suppressed(OSError):
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    return None
