"""Servers: windows of a running engine's iterations, opened by a call, a signal or a file that is touched.

    server = Server("runs/x", active=20, file="runs/x/trigger", signal=signal.SIGUSR2)
    server.start(model)
    while True:
        engine.iterate()
        server.step()

Nothing is recorded until it is asked for, and then as often as it is. Whoever asks only leaves a note: the thread
that calls `Server.step` opens and closes the windows, as torch.profiler must be stopped where it was started.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal as signals
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from .. import log
from ..config import settings
from ..guard import exiting, guard
from ..interrupts import Suppressed
from ..windows.schedule import Phase, Schedule, Window
from .loop import Loop

FEATURE = "triggering a window"
LOOK_S = 0.2  # between looks at the file, which may be on a slow file system


class OnDemandSchedule(Schedule):
    """A plan that is made while the loop runs, on the loop's thread; `ask` may be called from anywhere."""

    foreseen = False

    def __init__(self, warmup: int, active: int) -> None:
        # The base is frozen, and a `SimpleQueue` may be filled by a signal that interrupts its own `put`.
        for name, number, least in (("warmup", warmup, 0), ("active", active, 1)):
            if type(number) is not int or number < least:
                raise ValueError(f'"{name}" must be an integer >= {least}: {number!r}')
        fields = {"_warmup": warmup, "_active": active, "_asked": queue.SimpleQueue(), "_last": None}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return "Triggered()"

    @property
    def count(self) -> int:
        """How many windows there are so far."""
        return 0 if self._last is None else self._last.index

    def ask(self, what: str, active: int | None = None) -> None:
        """Have the next step "start" a window of ``active`` steps, "stop" the one that is open, or "toggle"."""
        self._asked.put((what, active or self._active))

    def at(self, step: int) -> tuple[Phase, Window | None]:
        """The phase that ``step``, which begins, is in."""
        while not self._asked.empty():
            self._answer(step, *self._asked.get())
        if not self._open(step):
            return Phase.WAIT, None
        return (Phase.WARMUP if step < self._last.active else Phase.ACTIVE), self._last

    def next_window(self, step: int) -> Window | None:
        """The window that ``step`` is in or, outside of one, the next to come: it may be asked for any time."""
        return self._last if self._open(step) else Window(self.count + 1, step + 1, step + 1, step + 2)

    def _open(self, step: int) -> bool:
        return self._last is not None and step < self._last.stop

    def _answer(self, step: int, what: str, active: int) -> None:
        if self._open(step):
            if what == "start":
                log.warning("a window is open already", window=self._last.index)
            else:
                object.__setattr__(self, "_last", replace(self._last, stop=step))
        elif what != "stop":
            first = step + self._warmup
            object.__setattr__(self, "_last", Window(self.count + 1, step, first, first + active))

    def _window(self, index: int) -> Window:
        window: Window = self._last  # the only one that can be ahead
        return window

    def _index(self, step: int) -> int:
        return self.count + (not self._open(step))

    _warmup: int
    _active: int
    _asked: queue.SimpleQueue[tuple[str, int]]
    _last: Any  # the last Window asked for, None before the first


def _without(server: Server, *_: Any, **__: Any) -> None:
    server.loop = Loop.__new__(Loop)


class Server:
    """Windows of a server's iterations, on demand.

    Args:
        out: the folder that windows land in.
        active: the iterations of a window that was asked for without saying how many.
        warmup: the iterations before each with the profiler on, discarded.
        file: a path; each time it is written or touched, a window opens, or the one that is open ends.
        signal: a signal, such as ``signal.SIGUSR2``, that does the same; handled from `start` on, which must then
            be called on the main thread.
        options: those of `instrument.integrations.loop.Loop` but for the plan: ``modules``, ``syncs``, ...

    Raises:
        TypeError, ValueError: arguments that are not accepted.
    """

    _signal: signals.Signals | None = None
    _before: Any = None
    _file: str | os.PathLike[str] | None = None

    @guard.prepared(FEATURE, otherwise=_without)
    def __init__(
        self,
        out: str | os.PathLike[str] = "runs/instrument",
        *,
        active: int = 20,
        warmup: int = 1,
        file: str | os.PathLike[str] | None = None,
        signal: int | None = None,
        **options: Any,
    ) -> None:
        self._plan = OnDemandSchedule(warmup, active)
        self.loop = Loop(out, schedule=self._plan, **options)
        self._file = file
        self._touched: int | None = None  # when, in ns
        self._looked = 0.0
        self._signal = None if signal is None else signals.Signals(signal)

    @guard.contained(FEATURE)
    def start(self, *models: Any) -> None:
        """Get ready, which takes a second; the modules of ``models`` are regions of every window."""
        if not settings.enabled or self.loop.running:
            return
        self._touched = self._look()
        self.loop.start(*models)
        self._process = os.getpid()
        atexit.register(self._exit)
        if self._signal is not None:
            with guard.contained(FEATURE):
                if threading.current_thread() is threading.main_thread():
                    self._before = signals.signal(self._signal, self._signalled)
                else:
                    log.warning(f"{self._signal.name} is not handled: start() was not called on the main thread")

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def start_profile(self, active: int | None = None) -> None:
        """Open a window of ``active`` iterations with the next one, from any thread.

        Raises:
            ValueError: ``active`` is no integer >= 1.
        """
        if active is not None and (type(active) is not int or active < 1):
            raise ValueError(f'"active" must be an integer >= 1: {active!r}')
        self._plan.ask("start", active)

    @guard.contained(FEATURE)
    def stop_profile(self) -> None:
        """End the window that is open with the current iteration, from any thread."""
        self._plan.ask("stop")

    @guard.contained(FEATURE)
    def step(self) -> None:
        """Tell that an iteration ended and the next begins; always on the same thread."""
        if self._file is not None and self.loop.running:
            now = time.monotonic()
            if now - self._looked > LOOK_S:
                self._looked = now
                touched = self._look()
                if touched not in (None, self._touched):
                    self._plan.ask("toggle")
                self._touched = touched
        self.loop.step()

    @guard.contained(FEATURE)
    def close(self) -> None:
        """End, on the thread of `step`: close an open window and wait for the files; also called at exit."""
        if self._before is not None and self._signal is not None:
            with guard.contained(FEATURE):
                if signals.getsignal(self._signal) == self._signalled:
                    signals.signal(self._signal, self._before)
            self._before = None
        atexit.unregister(self._exit)
        recording = self.loop.running and self.loop.record
        self.loop.stop()
        if recording and not self.loop.windows:
            ways = ["call start_profile()"]
            ways += [f"send {self._signal.name}"] if self._signal is not None else []
            ways += [f"touch {os.fspath(self._file)}"] if self._file is not None else []
            how = " or ".join(ways)
            log.warning(f"no window was recorded, because none was requested: {how} while the server runs")

    def _exit(self) -> None:
        if self._process == os.getpid():  # not a forked child
            with exiting():
                self.close()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        try:
            self._plan.ask("toggle")
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        if callable(self._before):
            self._before(number, frame)

    def _look(self) -> int | None:
        if self._file is None:
            return None
        with Suppressed(OSError):
            return Path(self._file).stat().st_mtime_ns
        return None
