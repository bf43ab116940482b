"""How a run ends before its own end: by a signal, at a limit of steps or at a limit of time."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Stopped(SystemExit):
    """Ends a program from inside, as `sys.exit` does: ``finally`` blocks and exit handlers run.

    Attributes:
        why: what ended the program, in a few words.
        code: its exit status; 0 where the user asked for this end.
    """

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


@contextlib.contextmanager
def stopping(seconds: float | None = None) -> Iterator[None]:
    """Raise `Stopped` in the body at SIGTERM, and after ``seconds``; the handlers that were there come back.

    A handler that the program installs itself for SIGTERM stays in force. Signals reach the main thread only: on
    another one nothing is installed.

    Raises:
        ValueError: there is a time limit, and no timer: not on the main thread, or on Windows.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is not None and not (main and hasattr(signal, "setitimer")):
        raise ValueError("a time limit needs the main thread of a system with interval timers")
    if not main:
        yield
        return
    undo = contextlib.ExitStack()
    with undo:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            _handle(undo, signal.SIGTERM, "terminated by SIGTERM", TERMINATED)
        if seconds is not None:
            _handle(undo, signal.SIGALRM, f"stopped after {seconds:g} s, the time limit")
            before = signal.setitimer(signal.ITIMER_REAL, seconds)
            undo.callback(signal.setitimer, signal.ITIMER_REAL, *before)
        yield


def _handle(undo: contextlib.ExitStack, number: signal.Signals, why: str, code: int = 0) -> None:
    def handler(*_: Any) -> None:
        raise Stopped(why, code)

    before = signal.signal(number, handler)

    def restore() -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)

    undo.callback(restore)
