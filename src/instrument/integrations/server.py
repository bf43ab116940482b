"""Inference servers: windows of an engine's iterations, opened on demand by a call, a signal or a touched file.

    server = Server("runs/x", active=20, file="runs/x/trigger", signal=signal.SIGUSR2)
    server.attach(model)
    while True:
        engine.iterate()
        server.step()

Nothing is recorded until a window is requested, any number of times. A request is only queued: the thread that
calls `Server.step` opens and closes the windows, as torch.profiler must be stopped on the thread that started it.
"""

from __future__ import annotations

import os
import queue
import signal as signals
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from ..base import log
from ..base.guard import guard
from ..base.interrupts import Suppressed
from ..base.units import integer
from ..record.planning.schedule import Schedule, StepAction, Window
from .adapter import Adapter, Removal, leave_inert
from .loop import Loop

FEATURE = "recording a window on demand"
Action = Literal["start", "stop", "toggle"]
CHECK_INTERVAL_S = 0.2  # between checks of the file, which may be on a slow file system


class OnDemandSchedule(Schedule):
    """A schedule of windows that are requested while the loop runs; `request` may be called on any thread."""

    plans_ahead = False

    def __init__(self, warmup: int, active: int) -> None:
        self.count: int = 0  # windows so far
        self._warmup = integer("warmup", warmup)
        self._active = integer("active", active, least=1)
        self._last: Window | None = None  # the last window that was requested
        # A `SimpleQueue`, as a signal may interrupt a `put` and call it.
        self._requests: queue.SimpleQueue[tuple[Action, int]] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return "OnDemandSchedule()"

    def request(self, action: Action, active: int | None = None) -> None:
        """Have the next step "start" a window of ``active`` steps, "stop" the open one, or "toggle"."""
        self._requests.put((action, active or self._active))

    def at(self, step: int) -> tuple[StepAction, Window | None]:
        """Return what the profiler does in ``step``, which begins, and its window."""
        while not self._requests.empty():
            self._handle(step, *self._requests.get())
        window = self._window_at(step)
        if window is None:
            return StepAction.WAIT, None
        return (StepAction.WARMUP if step < window.active else StepAction.ACTIVE), window

    def next_window(self, step: int) -> Window | None:
        """Return the window that ``step`` is in or, outside one, the earliest that may still be requested."""
        return self._window_at(step) or Window(self.count + 1, step + 1, step + 1, step + 2)

    def _window_at(self, step: int) -> Window | None:
        return self._last if self._last is not None and step < self._last.stop else None

    def _handle(self, step: int, action: Action, active: int) -> None:
        window = self._window_at(step)
        if window is not None:
            if action == "start":
                log.warning("a window is open already", window=window.index)
            else:
                self._last = replace(window, stop=step)
        elif action != "stop":
            self.count += 1
            first = step + self._warmup
            self._last = Window(self.count, step, first, first + active)

    def _window(self, index: int) -> Window:
        return cast("Window", self._last)  # the only one that can be ahead

    def _index(self, step: int) -> int:
        return self.count + (self._window_at(step) is None)


class Server(Adapter):
    """Records windows of a server's iterations on demand.

    Args:
        out: the folder for the recorded windows.
        active: the number of iterations in a window, unless the request gives a number.
        warmup: the iterations before each window that run with the profiler on and are discarded.
        file: a path; whenever it is written or touched, a window opens, or the open one ends.
        signal: a signal that does the same, such as ``signal.SIGUSR2``; handled from `attach` on, which must then
            be called on the main thread.
        options: the arguments of `instrument.integrations.loop.Loop` except the schedule:
            ``modules``, ``syncs``, ...

    Raises:
        TypeError, ValueError: wrong arguments.
    """

    feature = FEATURE
    _file: str | os.PathLike[str] | None = None

    @guard.prepared(FEATURE, otherwise=leave_inert)
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
        self._schedule = OnDemandSchedule(warmup, active)
        super().__init__(Loop(out, schedule=self._schedule, **options))
        self._file = file
        self._touched_ns: int | None = None
        self._checked_s = 0.0
        self._signal = None if signal is None else signals.Signals(signal)
        self._previous_handler: Any = None
        self._models: tuple[Any, ...] = ()

    @guard.prepared(FEATURE, otherwise=lambda server, *_: server)
    def attach(self, *models: Any) -> Server:
        """Prepare for windows, which takes a second; the modules of ``models`` are regions of each window."""
        self._models = models
        return super().attach()

    def install_hooks(self) -> None:
        """Start the loop, and handle the signal."""
        self._process = os.getpid()
        self._touched_ns = self._modified_ns()
        self.loop.start(*self._models)
        if self._signal is None:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning(f"{self._signal.name} is not handled: attach() was not called on the main thread")
            return
        self.apply(Removal(self._restore_handler))
        self._previous_handler = signals.signal(self._signal, self._on_signal)

    def _restore_handler(self) -> None:
        if self._signal is not None and signals.getsignal(self._signal) == self._on_signal:
            signals.signal(self._signal, self._previous_handler)

    @guard.prepared(FEATURE, otherwise=lambda *_, **__: None)
    def start_profile(self, active: int | None = None) -> None:
        """Request a window of ``active`` iterations that opens with the next one, on any thread.

        Raises:
            TypeError, ValueError: ``active`` is not an integer >= 1.
        """
        self._schedule.request("start", None if active is None else integer("active", active, least=1))

    @guard.contained(FEATURE)
    def stop_profile(self) -> None:
        """Request that the open window ends with the current iteration, on any thread."""
        self._schedule.request("stop")

    @guard.contained(FEATURE)
    def step(self) -> None:
        """End an iteration and begin the next; must always be called on the same thread."""
        if self._file is not None and self.loop.running:
            now = time.monotonic()
            if now - self._checked_s > CHECK_INTERVAL_S:
                self._checked_s = now
                touched_ns = self._modified_ns()
                if touched_ns not in (None, self._touched_ns):
                    self._schedule.request("toggle")
                self._touched_ns = touched_ns
        self.loop.step()

    @guard.contained(FEATURE)
    def detach(self) -> None:
        """Close an open window and wait for its files, on the thread of `step`; also called at exit."""
        recording = self.loop.running and self.loop.record
        super().detach()
        if recording and not self.loop.windows:
            ways = ["call start_profile()"]
            ways += [f"send {self._signal.name}"] if self._signal is not None else []
            ways += [f"touch {os.fspath(self._file)}"] if self._file is not None else []
            how = " or ".join(ways)
            log.warning(f"no window was recorded, because none was requested: {how} while the server runs")

    def _detach_at_exit(self) -> None:
        if self._process == os.getpid():  # not a forked child
            super()._detach_at_exit()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._schedule.request("toggle")
        except Exception as error:
            guard.failed(FEATURE, error)
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _modified_ns(self) -> int | None:
        if self._file is None:
            return None
        with Suppressed(OSError):
            return Path(self._file).stat().st_mtime_ns
        return None
