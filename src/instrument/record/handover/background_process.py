"""`BackgroundProcess`: starts a process that is no child of the program; hides SIGCHLD meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.sigaction import DEFAULT, c_library, exchange, handler

_SHELL = "/bin/sh"
# The first shell tells the number of the second one and exits at once. The second one waits for the command: only
# its parent learns how a process ends.
_AS_ORPHAN = r"""{ "$@" <&1; printf '\n{"exit_code": %d}\n' "$?"; } & printf '{"member": %d}\n' $!"""
# Outside control groups, Linux divides the CPU between sessions (sched(7), autogroup), and `nice` counts only
# within one. In a control group `nice` alone counts, and 19 would leave almost nothing.
_LOWEST_AUTOGROUP = 19
_NICER_BY = 10
_PR_GET_CHILD_SUBREAPER = 37


class BackgroundProcess:
    """Runs a command in a session of its own, with a socket as its standard input and output.

    On Linux the command is not a child of this process: `os.wait` does not return it, and its end raises no
    SIGCHLD. A shell starts it and exits; the constructor waits for that, about a millisecond. The line
    ``{"exit_code": N}`` follows the command's own output, and ``{"member": N}`` comes at its start; the caller
    passes both to `note`.

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
        self._member: int | None = None  # the second shell or, as a child, the command
        Path(command[0]).stat()  # raises now if the file is missing: the shell's error would be lost
        self._libc = _libc()
        self._numbers_agree = False  # with /proc, which may be that of another namespace
        options: dict[str, Any] = {
            "stdin": connection.fileno(),
            "stdout": connection.fileno(),
            "stderr": subprocess.DEVNULL,
            "start_new_session": True,
            "env": environment,
        }
        if self._libc is None:
            self._started = subprocess.Popen(command, **options)
            self._member = self._started.pid
        else:
            with hidden_sigchld(self._libc):
                self._started = subprocess.Popen([_SHELL, "-c", _AS_ORPHAN, "sh", *command], **options)
                code = self._started.wait()
            if code:  # the shell cannot fork
                raise OSError(f"{_SHELL} ended with exit code {code}")
        with Suppressed(OSError):  # without /proc
            self._numbers_agree = Path("/proc/self").readlink().name == str(os.getpid())

    @property
    def session(self) -> int:
        """The number of the command's session and process group."""
        return self._started.pid

    def note(self, line: Mapping[str, Any]) -> None:
        """Take what a line of the shell says."""
        self.exit_code = line.get("exit_code", self.exit_code)
        self._member = line.get("member", self._member)

    def yield_cpu(self) -> None:
        """Give the command little of the CPU where others want it; call this only while the socket is open.

        The program does this and not the command, which would be too slow to undo it: where all cores are busy,
        its imports alone can take minutes.
        """
        self._set_priority(_LOWEST_AUTOGROUP, _NICER_BY)

    def take_share(self) -> None:
        """Give the command the CPU share of the program, but no more than the normal one.

        Call this only while the socket is open. Without privileges, the command gets back what its autogroup gave
        away, but not its `nice`.
        """
        own = _autogroup(Path("/proc/self/autogroup")) or 0
        self._set_priority(max(own, 0), 0)  # below 0 is a raised share, which needs a privilege

    def _set_priority(self, autogroup: int, nicer_by: int) -> None:
        """Set it once; Linux refuses it within 0.1 s of another change on the machine, so callers repeat it."""
        known = self._numbers_agree and self._member is not None
        if known and _autogroup(path := Path(f"/proc/{self._member}/autogroup")) != autogroup:
            with Suppressed(OSError):  # refused, or the command has exited
                path.write_text(str(autogroup), encoding="ascii")
        with Suppressed(OSError, AttributeError):  # not on Windows
            nice = min(os.getpriority(os.PRIO_PROCESS, 0) + nicer_by, 19)
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


def _autogroup(file: Path) -> int | None:
    """Return the priority of a scheduling group from its file, as "/autogroup-7 nice 19"; None without one."""
    with Suppressed(OSError, ValueError):  # a kernel without autogroups
        return int(file.read_text(encoding="ascii").rpartition(" ")[2])
    return None


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


_lock = threading.RLock()  # a handler of the program may start another process
_restore_handler: Callable[[], None] | None = None  # puts the handler back


@contextmanager
def hidden_sigchld(libc: Any) -> Iterator[None]:
    """Discard SIGCHLD inside the block; Python code sees no change of its handlers.

    The block starts a child process and waits for it. If another child of the program is dead afterwards, one
    SIGCHLD is sent, so that the program misses none. The handler may therefore be called once too often for a dead
    child that the program never waits for.

    Args:
        libc: the C library, as `c_library` returns it.
    """
    with _lock:
        action = exchange(libc, signal.SIGCHLD)
        blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if handler(action) == signal.SIG_IGN or (handler(action) == signal.SIG_DFL and not blocked):
            yield
            return
        pending = signal.SIGCHLD in signal.sigpending()
        try:
            with _default_handler(libc, action), _unblocked_sigchld(blocked):
                yield
        finally:
            if pending or _has_dead_child():
                os.kill(os.getpid(), signal.SIGCHLD)


@contextmanager
def _default_handler(libc: Any, action: bytes) -> Iterator[None]:
    global _restore_handler

    def put_back() -> None:
        if handler(exchange(libc, signal.SIGCHLD)) == signal.SIG_DFL:  # else the program has set one
            exchange(libc, signal.SIGCHLD, action)

    _restore_handler = put_back
    try:
        exchange(libc, signal.SIGCHLD, DEFAULT)  # the kernel discards the signal
        yield
    finally:
        put_back()
        _restore_handler = None


@contextmanager
def _unblocked_sigchld(blocked: bool) -> Iterator[None]:
    """Let this thread discard SIGCHLD at once; while blocked it would stay pending."""
    if not blocked:
        yield
        return
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})


def _has_dead_child() -> bool:
    with suppress(ChildProcessError):  # it has none
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


@guard.contained("holding SIGCHLD back")
def _restore_after_fork() -> None:
    """Restore the handler in a child forked by another thread: the child never leaves the block."""
    global _lock, _restore_handler
    _lock = threading.RLock()
    if _restore_handler is not None:
        _restore_handler()
        _restore_handler = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_after_fork)
