"""`hidden_sigchld`: hides the SIGCHLD of a child process of the library from the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..guard import guard
from ..sigaction import DEFAULT, exchange, handler

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
