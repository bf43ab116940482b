"""Identifies processes by more than their number, which the system reuses, and names the machine."""

from __future__ import annotations

import os
import re
import socket
import zlib
from pathlib import Path

from .interrupts import Suppressed

# The name of a file's writer, as `writer` returns it
WRITER = r"(?P<place>[0-9a-f]{8})-(?P<process>\d+)-(?P<start>\d*)-[0-9a-f]{8}"


def place() -> str:
    """Return eight digits for the host and, as in a container, the namespace in which process numbers count."""
    namespace = 0
    with Suppressed(OSError):  # not Linux
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{zlib.crc32(f'{socket.gethostname()} {namespace}'.encode()):08x}"


def machine() -> str:
    """Return eight digits that all processes of this machine have until it starts again, also in containers."""
    with Suppressed(OSError):  # not Linux
        return f"{zlib.crc32(Path('/proc/sys/kernel/random/boot_id').read_bytes()):08x}"
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_time(process: int) -> str | None:
    """Return a value that differs if the number is reused; None if the process has exited, even as a zombie.

    Without ``/proc`` it is empty for each number that is in use and, on Windows, for all.
    """
    if Path("/proc/self/stat").exists():
        with Suppressed(OSError):
            fields = Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else fields[19]
        return None
    if os.name == "posix":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:  # of another user
            pass
    return ""


def writer() -> str:
    """Return a name, another one at each call, that tells which process writes a file."""
    process = os.getpid()
    return f"{place()}-{process}-{start_time(process)}-{os.urandom(4).hex()}"


def has_exited(writer: re.Match[str] | None) -> bool:
    """Return whether the process that a match of `WRITER` names, if any, was one of this host and has exited."""
    if writer is None:
        return False
    return writer["place"] == place() and start_time(int(writer["process"])) != writer["start"]
