"""`Recording`: one window while it is open."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import log
from ..allocator_history.window_memory import WindowMemory
from ..errors import CaptureError
from ..exporters.capture import Capture
from ..regions import dispatch
from ..trace_marks import STEPS
from .schedule import Window
from .thread_end import at_thread_end, cancel_at_thread_end
from .window_compile_log import WindowCompileLog
from .window_cost import WindowCost

SaveResult = tuple[
    list[Path], dict[str, Any], list[str]
]  # the files, the line of the manifest, and why parts are missing


class Recording:
    """A window and its capture. Once it records, it belongs to its thread: torch's profiler must stop there.

    Args:
        window: the window.
        capture: its capture.
        opened_at_step: the number of the step that begins now.
        cost: measures what the window costs.
        on_thread_end: called with this object when its thread ends, before `stop` or `abandon` has ended it.
        compile_log: writes what torch compiles in the window, if the user wants that.
        memory: records the history of GPU memory in it, likewise.

    Attributes:
        steps: the first and the last step that the trace marks so far; None if it marks none.
        start_ns: when recording began, in ns since the epoch; None in warm-up.
        end_ns: when it ended. Measured from ``start_ns`` on, so that a clock that is set back does not show.
        other_thread_stepped: whether another thread ended a step, when nothing could be started or stopped.
        cut_step: the step whose end did not run or was not recorded; None if all steps are complete.
        thread: the thread that records, by `threading.get_ident`; None in warm-up.
        save_result: the result of saving it; None before.
        on_trace_ready_called: whether on_trace_ready was called.
    """

    def __init__(
        self,
        window: Window,
        capture: Capture,
        opened_at_step: int,
        cost: WindowCost,
        on_thread_end: Callable[[Recording], None],
        compile_log: WindowCompileLog | None = None,
        memory: WindowMemory | None = None,
    ) -> None:
        self.window = window
        self.capture = capture
        self.opened_at_step = opened_at_step
        self.cost = cost
        self.compile_log = compile_log
        self.memory = memory
        self.steps: tuple[int, int] | None = None
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.cut_step: int | None = None
        self.thread: int | None = None
        self.save_result: SaveResult | None = None
        self.on_trace_ready_called = False
        self._began_ns = 0  # when recording began, of the clock that nobody sets
        self.other_thread_stepped = False
        self._stopped = False
        self._on_thread_end = functools.partial(on_thread_end, self)

    def on_own_thread(self) -> bool:
        """Return whether this thread can end the window: any thread in warm-up, then the one that records."""
        return self.thread in (None, threading.get_ident())

    def note_foreign_step(self, window: int | str) -> None:
        """Warn, the first time, that another thread ended a step."""
        if not self.other_thread_stepped:
            self.other_thread_stepped = True
            log.warning(
                "a step ended on another thread than the one that opened the window; the window stays open",
                window=window,
            )

    @property
    def ended_early(self) -> bool:
        """Whether the capture ended before the window did."""
        return getattr(self.capture, "ended", False)

    @property
    def incomplete(self) -> list[str]:
        """Why the capture is incomplete, in words; known once it is saved."""
        return list(getattr(self.capture, "incomplete", ()))

    @property
    def seconds(self) -> float | None:
        """How long it was recorded; None before its end and if it ended in warm-up."""
        return (self.end_ns - self.start_ns) / 1e9 if self.end_ns and self.start_ns else None

    def _now_ns(self) -> int:
        if self.start_ns is None:
            return time.time_ns()
        return self.start_ns + time.perf_counter_ns() - self._began_ns

    def warm_up(self) -> None:
        """Begin a warm-up step. Modules get hooks now: the backward of its forward may run in a recorded step."""
        dispatch.active.begin_warm_up(self)

    def step(self, number: int, metadata: Mapping[str, str], mark: bool) -> None:
        """Begin to record step ``number``; the first one puts ``metadata`` into the trace.

        Without ``mark``, neither the trace nor `steps` shows the step.
        """
        if self.start_ns is None:
            with self.cost.stall():
                if self.memory is not None:
                    self.memory.start()  # first: what it needs is not in the trace
                self.thread = threading.get_ident()
                at_thread_end(self._on_thread_end)
                self.capture.start()
                self._began_ns, self.start_ns = time.perf_counter_ns(), time.time_ns()  # at once: for an interrupt
            dispatch.active.end_warm_up(self)
            for key, value in metadata.items():
                self.capture.add_metadata(key, value)
        if mark:
            self.capture.step(number)
            if self.memory is not None:
                self.memory.step(number)
            self.steps = (self.steps[0] if self.steps else number, number)

    def end_step(self) -> None:
        """End the recorded step before the next one begins."""
        if self.memory is not None:
            self.memory.step(None)
        self.capture.step(None)

    def leave_out(self, number: int) -> None:
        """Remove the last step, ``number``, from `steps`, as it never ran."""
        if self.steps is not None:
            self.steps = (self.steps[0], number - 1) if self.steps[0] < number else None

    def ends_with(self, number: int) -> bool:
        """Return whether step ``number`` is the last recorded one."""
        return self.steps is not None and self.steps[1] == number

    def mark_last_step_cut(self) -> None:
        """Note that the last step did not end; it counts only if no other step is recorded."""
        if self.steps is not None and self.cut_step is None:
            first, self.cut_step = self.steps
            self.steps = first, max(first, self.cut_step - 1)

    def stop(self) -> None:
        """Stop recording; put the steps, and the number of warm-up steps before them, into the trace.

        Raises:
            CaptureError: another thread opened the window.
        """
        if not self.on_own_thread():
            raise CaptureError("the loop ended on another thread than the one that opened the window")
        self.end_step()
        first, last = self.steps or (1, 0)  # an empty range
        self.capture.add_metadata(STEPS, f"{first}-{last}")
        self.capture.add_metadata("instrument_warmup", str(first - self.opened_at_step if self.steps else 0))
        if self.compile_log is not None:
            self.compile_log.stop()
        with self.cost.stall():
            self.capture.stop()
            self.end_ns, self._stopped = self._now_ns(), True
            if self.memory is not None:
                self.memory.stop()
        cancel_at_thread_end(self._on_thread_end)

    def abandon(self) -> None:
        """End the capture after a failure or an unused warm-up; may be called again after an interrupt."""
        try:
            if self.compile_log is not None:
                self.compile_log.discard()
            if self.memory is not None:
                self.memory.discard()
            dispatch.active.end_warm_up(self)
            if self._stopped:
                return
            self.end_ns = self.end_ns or self._now_ns()
            with suppress(CaptureError):  # the caller knows the reason
                if self.start_ns is None:
                    self.capture.discard()
                else:
                    self.capture.stop()
            self._stopped = True
            cancel_at_thread_end(self._on_thread_end)
        finally:
            dispatch.active.end_warm_up(self)  # again, as an interrupt may have come in the first call
            dispatch.active.check()
