"""`held_back`: a child process of the library's own raises no SIGCHLD that the program sees."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_SIZE = 1024  # bytes; `struct sigaction` has 152 on Linux
_DEFAULT = bytes(_SIZE)  # SIG_DFL, no flags: the kernel discards the signal
_POINTER = 8 if sys.maxsize > 1 << 32 else 4

_lock = threading.Lock()
_saved: Callable[[], None] | None = None  # puts the handler back


@contextmanager
def held_back(libc: Any) -> Iterator[None]:
    """Discard SIGCHLD inside of the block, without a change that Python code can see.

    The block starts a child process and waits for it. If another child of the program is dead afterwards, one
    SIGCHLD is sent, so that the program misses none. A program whose handler is not called for a dead child that
    it does not wait for may have one call too many that way.

    Args:
        libc: the C library, as `ctypes.CDLL` loads it.
    """
    with _lock:
        action = _sigaction(libc, None)
        blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        handler = int.from_bytes(action[:_POINTER], sys.byteorder)
        if handler == signal.SIG_IGN or (handler == signal.SIG_DFL and not blocked):
            yield
            return
        pending = signal.SIGCHLD in signal.sigpending()
        try:
            with _default(libc, action), _unblocked(blocked):
                yield
        finally:
            if pending or _dead_child():
                os.kill(os.getpid(), signal.SIGCHLD)


@contextmanager
def _default(libc: Any, action: bytes) -> Iterator[None]:
    global _saved

    def put_back() -> None:
        if _sigaction(libc, None)[:_POINTER] == _DEFAULT[:_POINTER]:  # else the program set a handler meanwhile
            _sigaction(libc, action)

    _saved = put_back
    try:
        _sigaction(libc, _DEFAULT)
        yield
    finally:
        put_back()
        _saved = None


@contextmanager
def _unblocked(blocked: bool) -> Iterator[None]:
    """Let this thread discard SIGCHLD at once; while blocked it would stay pending."""
    if not blocked:
        yield
        return
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})


def _sigaction(libc: Any, new: bytes | None) -> bytes:
    """Return the disposition of SIGCHLD, and set another one."""
    import ctypes

    old = ctypes.create_string_buffer(_SIZE)
    if libc.sigaction(int(signal.SIGCHLD), new, old):
        raise OSError("sigaction failed for SIGCHLD")
    return old.raw


def _dead_child() -> bool:
    with suppress(ChildProcessError):  # there is no child
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _forked() -> None:
    """In a fork that another thread made inside of the block: the thread that would leave it is not there."""
    global _lock, _saved
    _lock = threading.Lock()
    if _saved is not None:
        _saved()
        _saved = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
