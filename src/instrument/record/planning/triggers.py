"""What opens a window besides its schedule: a command, a signal, a touched file, or the time."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ...base import log
from ...base.files import make_folder
from ...base.guard import guard
from ...base.interrupts import Suppressed, is_interrupt
from .command_files import CommandFiles
from .requests import WindowRequest

FEATURE = "opening a window on a trigger"
ACCEPTED = '"command", "file", "file=PATH", "signal=NAME", "every=DURATION" (such as 30s, 10m or 2h), "at=HH:MM"'
FILE = "trigger"
"""The file in the folder of a run that is watched by default."""
_CHECK_INTERVAL_S = 0.5  # between checks of the clock, and of the file, which may be on a slow file system
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGRTMIN", "SIGRTMAX")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")

Ask = Callable[[WindowRequest], None]


class Triggers:
    """All triggers of a profile; a failure of one is logged and leaves the others.

    Args:
        given: the triggers, in the form of `ACCEPTED`: several, or one text with commas between them.
        folder: the folder of the run.
        active: the number of recorded steps of a window that does not say it.

    Raises:
        TypeError, ValueError: a trigger is not accepted.
    """

    def __init__(self, given: str | Iterable[str], folder: Path, active: int) -> None:
        self._request = WindowRequest("", active)
        self._begun: list[SignalTrigger | Watch | CommandFiles] = []
        self._commands: CommandFiles | None = None
        self._triggers: list[SignalTrigger | Watch] = []
        self._folder: Path | None = None  # created, so that a person finds it
        files: list[Iterator[str | None]] = []
        times: list[Iterator[str | None]] = []
        for text in _texts(given):
            kind, _, value = text.partition("=")
            if text == "command":
                self._commands = CommandFiles(folder, self._request)
            elif kind == "signal":
                self._triggers.append(SignalTrigger(_signal(text, value)))
            elif text == "file":
                self._folder = folder
                files.append(touches(folder / FILE))
            elif kind == "file" and value:
                files.append(touches(Path(value).absolute()))
            elif kind == "every":
                times.append(periods(_seconds(text, value)))
            elif kind == "at":
                times.append(times_of_day(*_hour(text, value)))
            else:
                raise _refused(text)
        for checks, automatic in ((files, False), (times, True)):
            if checks:
                self._triggers.append(Watch(checks, automatic=automatic))

    def __bool__(self) -> bool:
        return bool(self._triggers or self._commands)

    def begin(
        self,
        ask: Ask,
        answer: Callable[[WindowRequest], dict[str, Any]],
        window_of: Callable[[str], dict[str, Any]],
    ) -> None:
        """Begin to request windows.

        Args:
            ask: called on any thread, and in a signal handler, with each request.
            answer: called in its place with those of `instrument trigger`; returns what that prints.
            window_of: called with the id of such a request; returns the window that serves it.
        """
        if self._folder is not None:
            with guard.contained(FEATURE):
                make_folder(self._folder)
        if self._commands is not None:
            with guard.contained(FEATURE):
                self._begun.append(self._commands)
                try:
                    self._commands.begin(answer, window_of)
                except OSError as error:
                    if is_interrupt(error):
                        raise
                    log.warning(f"instrument trigger does not reach this process: {error}")
        for trigger in self._triggers:
            with guard.contained(FEATURE):
                self._begun.append(trigger)
                trigger.begin(partial(self._ask, ask, trigger.automatic))

    def _ask(self, ask: Ask, automatic: bool, reason: str) -> None:
        ask(replace(self._request, reason=reason, automatic=automatic))

    def end(self) -> None:
        """Stop; may be called again."""
        while self._begun:
            with guard.contained(FEATURE):
                self._begun.pop().end()


class SignalTrigger:
    """Requests a window at each signal from `begin` to `end`; the program's own handler is called too."""

    automatic = False

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._previous: Any = None
        self._ask: Callable[[str], None] | None = None

    def begin(self, ask: Callable[[str], None]) -> None:
        """Handle the signal; only possible on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(f"{self._number.name} opens no window, as the profile did not start on the main thread")
            return
        self._ask = ask
        self._previous = signal.signal(self._number, self._on_signal)

    def end(self) -> None:
        """Put back the program's handler, unless the program has installed another one since."""
        mine = self._ask is not None and signal.getsignal(self._number) == self._on_signal
        if mine and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, signal.SIG_DFL if self._previous is None else self._previous)
        self._ask = None

    def _on_signal(self, number: int, frame: Any) -> None:
        with guard.contained(FEATURE):
            if self._ask is not None:
                self._ask(f"signal {self._number.name}")
        if callable(self._previous):
            self._previous(number, frame)


class Watch:
    """Checks the clock and files on a thread, twice a second.

    Args:
        checks: each yields the reason to open a window now, or None.
        automatic: whether they look at the clock.
    """

    def __init__(self, checks: Sequence[Iterator[str | None]], *, automatic: bool) -> None:
        self._checks = checks
        self.automatic = automatic
        self._ended: threading.Event | None = None

    def begin(self, ask: Callable[[str], None]) -> None:
        """Start the thread."""
        for check in self._checks:
            next(check)  # sets the first state, on this thread: a later touch counts
        ended = self._ended = threading.Event()
        watch = guard.contained(FEATURE)(self._watch)
        threading.Thread(target=watch, args=(ask, ended), name="instrument triggers", daemon=True).start()

    def end(self) -> None:
        """Let the thread end."""
        if self._ended is not None:
            self._ended.set()

    def _watch(self, ask: Callable[[str], None], ended: threading.Event) -> None:
        while not ended.wait(_CHECK_INTERVAL_S):
            for check in self._checks:
                reason = next(check)
                if reason is not None:
                    ask(reason)


# What `Watch` looks at: each yields at every check the reason to open a window now, or None.


def touches(path: Path) -> Iterator[str | None]:
    """Check whether a file appeared, or was written or touched, since the last check."""
    reason, before = None, _modified_ns(path)
    while True:
        yield reason
        now = _modified_ns(path)
        reason = f"file {path} touched" if now not in (None, before) else None
        before = now


def periods(seconds: float) -> Iterator[str | None]:
    """Check whether a period of wall time is over, which a change of the clock does not affect."""
    reason, due = None, time.monotonic() + seconds
    while True:
        yield reason
        now = time.monotonic()
        reason = f"every {seconds:g} s" if now >= due else None
        if now >= due:
            due += seconds * (1 + (now - due) // seconds)  # periods that a sleep left out


def times_of_day(hour: int, minute: int) -> Iterator[str | None]:
    """Check whether a time of day has come, in local time."""
    reason, due = None, _next_time(hour, minute)
    while True:
        yield reason
        over = datetime.now() >= due
        reason = f"at {hour:02}:{minute:02}" if over else None
        due = _next_time(hour, minute) if over else due


def _modified_ns(path: Path) -> int | None:
    with Suppressed(OSError):
        return path.stat().st_mtime_ns
    return None


def _next_time(hour: int, minute: int) -> datetime:
    now = datetime.now()
    due = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return due if due > now else due + timedelta(days=1)


def _texts(given: str | Iterable[str]) -> list[str]:
    texts = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f'"triggers" must hold texts such as {ACCEPTED}: {text!r}')
    return [text.strip() for text in texts if text.strip()]


def _refused(text: str) -> ValueError:
    return ValueError(f'"triggers" must hold {ACCEPTED}: {text!r}')


def _signal(text: str, value: str) -> signal.Signals:
    if value not in _SIGNALS:  # others end programs, or are the system's
        raise ValueError(f'"triggers" must name one of the signals {", ".join(_SIGNALS)}: {text!r}')
    return signal.Signals[value]


def _seconds(text: str, value: str) -> float:
    duration = _DURATION.fullmatch(value)
    if not duration or not (seconds := float(duration[1]) * _SECONDS[duration[2]]):
        raise _refused(text)
    return seconds


def _hour(text: str, value: str) -> tuple[int, int]:
    time_of_day = _TIME.fullmatch(value)
    if not time_of_day:
        raise _refused(text)
    return int(time_of_day[1]), int(time_of_day[2])
