"""How a run ends before its own end: by a signal, at a limit of steps or at a limit of time."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..sigaction import is_default

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_AGAIN = 1.0  # seconds after a time limit until it is looked whether the program left


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


class Ending:
    """Ends a program from inside, and knows whether the program caught that and goes on.

    Args:
        caught: called with what should have ended the program, where the program caught it and is to end again;
            it ends the process. None raises `Stopped` each time.
    """

    def __init__(self, caught: Callable[[Stopped], None] | None = None) -> None:
        self._caught = caught
        self._raised: Stopped | None = None
        self._signals: set[int] = set()

    def end(self, why: str) -> None:
        """Raise `Stopped`; where the program has caught one and goes on, end the process."""
        if self._raised is not None and not self.leaving():
            self.insist(self._raised)
        self._raised = Stopped(why)
        raise self._raised

    def leaving(self) -> bool:
        """Tell whether an ``except``, ``finally`` or ``with`` block runs because of what was raised."""
        error: BaseException | None = sys.exc_info()[1]
        while error is not None and error is not self._raised:
            error = error.__context__
        return error is not None

    def insist(self, stopped: Stopped) -> None:
        """End the process, where `caught` does."""
        if self._caught is not None:
            self._caught(
                Stopped(f"{stopped}; the script did not end, so its process was ended", int(stopped.code or 0))
            )

    def signalled(self, number: int, error: BaseException, stopped: Stopped) -> None:
        """Raise ``error`` at a signal; the second one of a kind ends the process."""
        if number in self._signals:
            self.insist(stopped)
        self._signals.add(number)
        raise error


@contextlib.contextmanager
def stopping(ending: Ending, seconds: float | None = None) -> Iterator[None]:
    """End the body at SIGTERM, and after ``seconds``; at Ctrl-C it ends as without, and at a second one at once.

    A handler that the program installs itself stays in force; those that were there come back. Signals reach the
    main thread only: on another one nothing is installed.

    Raises:
        ValueError: there is a time limit, and no timer: not on the main thread, or on Windows.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is not None and not (main and hasattr(signal, "setitimer")):
        raise ValueError("a time limit needs the main thread of a system with interval timers")
    if not main:
        yield
        return
    terminated = Stopped("terminated by SIGTERM", TERMINATED)
    undo = contextlib.ExitStack()
    with undo:
        if is_default(signal.SIGTERM):
            _handle(undo, signal.SIGTERM, lambda: ending.signalled(signal.SIGTERM, terminated, terminated))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _handle(
                undo, signal.SIGINT, lambda: ending.signalled(signal.SIGINT, KeyboardInterrupt(), interrupted())
            )
        if seconds is not None:
            why = f"stopped after {seconds:g} s, the time limit"
            _handle(undo, signal.SIGALRM, lambda: None if ending.leaving() else ending.end(why))
            before = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            undo.callback(signal.setitimer, signal.ITIMER_REAL, *before)
        yield


def interrupted() -> Stopped:
    """Return what Ctrl-C ends a program with."""
    return Stopped("interrupted by Ctrl-C", INTERRUPTED)


def _handle(undo: contextlib.ExitStack, number: signal.Signals, act: Callable[[], None]) -> None:
    def handler(*_: Any) -> None:
        act()

    before = signal.signal(number, handler)

    def restore() -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)

    undo.callback(restore)
