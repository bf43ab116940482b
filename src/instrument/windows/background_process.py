"""`BackgroundProcess`: starts a process that is not a child of the program, if the system allows it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..interrupts import Suppressed
from ..sigaction import c_library
from .sigchld import hidden_sigchld

_SHELL = "/bin/sh"
# The first shell tells the number of the second one and exits at once. The second one waits for the command: only
# its parent learns how a process ends.
_AS_ORPHAN = r"""exec 3>&1 >&0; { "$@" <&1; printf '\n{"exit_code": %d}\n' "$?"; } 3>&- & echo $! >&3"""
# Linux divides the CPU between sessions (sched(7), autogroup), where it does not between control groups; `nice`
# matters only within one of them. Both at 19 would leave a process in a control group almost nothing.
_LOW = 19, 10
_USUAL = 0, 0
_PR_GET_CHILD_SUBREAPER = 37


class BackgroundProcess:
    """Runs a command in a session of its own, with a socket as its standard input and output.

    On Linux the command is not a child of this process: `os.wait` does not return it, and its end raises no
    SIGCHLD. A shell starts it and exits; the constructor waits for that, about a millisecond. The line
    ``{"exit_code": N}`` follows the command's own output, and the caller stores it in `exit_code`.

    The command is a child on other systems, without a shell, without `ctypes`, and where orphans become children
    of this process, as in process 1 of a container.

    Args:
        command: the absolute path of the program, and its arguments.
        connection: the socket.
        environment: the environment variables.

    Attributes:
        exit_code: the exit code of the command, 128 + N after signal N; None until it is known.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.exit_code: int | None = None
        Path(command[0]).stat()  # raises now if the file is missing: the shell's error would be lost
        self._libc = _libc()
        options: dict[str, Any] = {
            "stdin": connection.fileno(),
            "stderr": subprocess.DEVNULL,
            "start_new_session": True,
            "env": environment,
        }
        if self._libc is None:
            self._started = subprocess.Popen(command, stdout=connection.fileno(), **options)
            self._member = str(self._started.pid)
        else:
            shell = [_SHELL, "-c", _AS_ORPHAN, "sh"]
            with hidden_sigchld(self._libc):
                self._started = subprocess.Popen([*shell, *command], stdout=subprocess.PIPE, **options)
                code = self._started.wait()
            self._member = _read_available(self._started.stdout).strip()
            if code:  # the shell cannot fork
                raise OSError(f"{_SHELL} ended with exit code {code}")

    @property
    def session(self) -> int:
        """The number of the command's session and process group."""
        return self._started.pid

    def yield_cpu(self) -> None:
        """Give the command only the CPU time that nothing else uses; call this only while the socket is open.

        The program does this and not the command, which would be too slow to undo it: where all cores are busy,
        its imports alone can take minutes. Linux refuses it within 0.1 s of another such change on the machine,
        unless the program is privileged.
        """
        self._set_priority(*_LOW)

    def take_share(self) -> None:
        """Give the command the program's share of the CPU again; call this only while the socket is open."""
        self._set_priority(*_USUAL)

    def _set_priority(self, autogroup: int, nice: int) -> None:
        path = Path(f"/proc/{self._member}/autogroup")
        with Suppressed(OSError):  # a kernel without autogroups, or the command has exited
            if not path.read_text().endswith(f" nice {autogroup}\n"):
                path.write_text(str(autogroup))
        with Suppressed(OSError, AttributeError):  # only a privileged process gets back what it gave away
            os.setpriority(os.PRIO_PGRP, self.session, nice)

    def kill(self) -> None:
        """Kill the command; call this only while the socket is open, as the number may be reused afterwards."""
        with Suppressed(ProcessLookupError, PermissionError):
            os.killpg(self.session, signal.SIGKILL)

    def wait(self) -> str:
        """Wait until the command, which has closed the socket, exits; return how, in words."""
        if self._libc is None:
            return _describe_exit(self._started.wait())
        return _describe_exit(self.exit_code) if self.exit_code is not None else "ended without an exit code"

    def detach(self) -> None:
        """Forget the command in a forked child, which cannot wait for it and must not warn that it runs."""
        self._started.returncode = 0


def _read_available(pipe: IO[bytes] | None) -> str:
    """Return what is in a pipe, without waiting for more: a process forked meanwhile may hold it open."""
    if pipe is None:
        return ""
    with pipe:
        os.set_blocking(pipe.fileno(), False)
        return (pipe.read() or b"").decode()


def _has_shell() -> bool:
    return sys.platform == "linux" and os.access(_SHELL, os.X_OK)


def _libc() -> Any:
    """Return the C library if a process can be started that is not a child of this one, else None."""
    if os.getpid() == 1 or not _has_shell():
        return None
    libc = c_library()
    if libc is None:
        return None
    import ctypes

    subreaper = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0)
    return None if subreaper.value else libc


def _describe_exit(code: int) -> str:
    number = -code if code < 0 else code - 128  # as a child, as reported by the shell
    if number <= 0 or 0 <= code <= 128:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"was ended by signal {number}"
