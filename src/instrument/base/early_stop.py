"""Ends a run early: on a signal, at a limit of steps or at a time limit."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from .interrupts import handling, is_default

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_RETRY_INTERVAL_S = 1.0  # seconds between checks, after the time limit, that the program is ending
_LONGEST_S = 1e9  # 31 years; timers take no more
_MAX_MESSAGE_LENGTH = 500  # characters of an error's message


class EarlyStop(SystemExit):
    """Ends a program from inside, as `sys.exit` does: ``finally`` blocks and exit handlers run.

    Attributes:
        reason: what ended the program, in a few words.
        code: the exit status; 0 if the user requested this end.
    """

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class ProgramStopper:
    """Ends a program from inside, and notices if the program catches that and goes on.

    Args:
        exit_process: called with the `EarlyStop` if the program caught an earlier one and goes on; must end the
            process. Without this function, `EarlyStop` is raised each time.
    """

    def __init__(self, exit_process: Callable[[EarlyStop], None] | None = None) -> None:
        self._exit_process = exit_process
        self._raised_stop: EarlyStop | None = None
        self._signals: set[int] = set()

    def stop(self, reason: str) -> None:
        """Raise `EarlyStop`; if the program has caught one and goes on, end the process.

        Raises:
            EarlyStop: always, unless the process ends.
        """
        if self._raised_stop is not None and not self.unwinding():
            self._force_exit(self._raised_stop)
        self._raised_stop = EarlyStop(reason)
        raise self._raised_stop

    def unwinding(self) -> bool:
        """Return whether an ``except``, ``finally`` or ``with`` block runs because of the `EarlyStop` raised."""
        error: BaseException | None = sys.exc_info()[1]
        while error is not None and error is not self._raised_stop:
            error = error.__context__
        return error is not None

    def on_signal(self, number: int, error: BaseException, stop: EarlyStop) -> None:
        """Raise ``error`` at a signal; at the second signal of its kind, end the process."""
        if number in self._signals:
            self._force_exit(stop)
        self._signals.add(number)
        raise error

    def _force_exit(self, stop: EarlyStop) -> None:
        if self._exit_process is not None:
            reason = f"{stop}; the script did not end, so its process was ended"
            self._exit_process(EarlyStop(reason, int(stop.code or 0)))


@contextlib.contextmanager
def stop_on_signals(stopper: ProgramStopper, seconds: float | None = None) -> Iterator[None]:
    """End the body at SIGTERM and after ``seconds``; Ctrl-C ends it as usual, a second Ctrl-C at once.

    A handler that the program installs stays in force; the handlers from before are restored. Signals reach the
    main thread only, so on another thread nothing is installed.

    Raises:
        ValueError: a time limit is given, but this is not the main thread, or the system is Windows.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is not None and not (main and hasattr(signal, "setitimer")):
        raise ValueError("a time limit needs the main thread of a system with interval timers")
    if not main:
        yield
        return
    terminated = EarlyStop("terminated by SIGTERM", TERMINATED)

    def on_term(number: int, _: object) -> None:
        stopper.on_signal(number, terminated, terminated)

    def on_ctrl_c(number: int, _: object) -> None:
        stopper.on_signal(number, KeyboardInterrupt(), ctrl_c_stop())

    def on_alarm(*_: object) -> None:
        if not stopper.unwinding():
            stopper.stop(f"stopped after {seconds:g} s, the time limit")

    with contextlib.ExitStack() as undo:
        if is_default(signal.SIGTERM):
            undo.enter_context(handling(signal.SIGTERM, on_term))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            undo.enter_context(handling(signal.SIGINT, on_ctrl_c))
        if seconds is not None:
            undo.enter_context(handling(signal.SIGALRM, on_alarm))
            before = signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST_S), _RETRY_INTERVAL_S)
            undo.callback(signal.setitimer, signal.ITIMER_REAL, *before)
        yield


def ctrl_c_stop() -> EarlyStop:
    """Return the `EarlyStop` for Ctrl-C."""
    return EarlyStop("interrupted by Ctrl-C", INTERRUPTED)


def describe_error(error: BaseException) -> str:
    """Return the class and message of ``error`` in one line; for an `EarlyStop`, its reason."""
    if isinstance(error, EarlyStop):
        return error.reason
    try:
        message = " ".join(str(error).split())
    except Exception:  # __str__ is the program's own code
        message = "(no message)"
    cut = message if len(message) <= _MAX_MESSAGE_LENGTH else f"{message[:_MAX_MESSAGE_LENGTH]}..."
    return f"{type(error).__name__}: {cut}".strip(": ")
