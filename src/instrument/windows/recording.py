"""One window while it is open."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import log
from ..errors import CaptureError
from ..exporters.capture import Capture
from ..regions import dispatch
from .schedule import Window

Saved = tuple[
    list[Path], dict[str, Any], list[str]
]  # the files, the line of the manifest, what is missing and why


class Recording:
    """A window and its capture, opened on this thread: torch's profiler must be stopped where it was started.

    Args:
        window: the window.
        capture: what records it.
        opened: the step that begins now.

    Attributes:
        steps: the first and the last step recorded so far, as the trace marks them; None where it marks none.
        start_ns: when recording began, in ns since the epoch; None in warm-up.
        end_ns: when it ended.
        elsewhere: whether another thread ended a step, at which nothing could be done.
        cut_step: the step that did not run, or was not recorded, to its end; None where there is none.
        saved: what `Profile` saved of it; None before.
        announced: whether on_trace_ready was called.
    """

    def __init__(self, window: Window, capture: Capture, opened: int) -> None:
        self.window = window
        self.capture = capture
        self.opened = opened
        self.steps: tuple[int, int] | None = None
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.cut_step: int | None = None
        self.saved: Saved | None = None
        self.announced = False
        self._thread = threading.get_ident()
        self.other_thread_stepped = False
        self._warming = False
        self._stopped = False

    def on_own_thread(self) -> bool:
        """Tell whether this is the thread that opened the window."""
        return self._thread == threading.get_ident()

    def note_foreign_step(self) -> None:
        """Warn, the first time, that another thread ended a step."""
        if not self.other_thread_stepped:
            self.other_thread_stepped = True
            log.warning(
                "a step ended on another thread than the one that opened the window; the window stays open",
                window=self.window.index,
            )

    @property
    def ended_early(self) -> bool:
        """Whether the capture ended before the window did."""
        return getattr(self.capture, "ended", False)

    @property
    def incomplete(self) -> list[str]:
        """Why the capture is not complete, in words; known once it is saved."""
        return list(getattr(self.capture, "incomplete", ()))

    def warm_up(self) -> None:
        """A step of warm-up begins: its forward may have its backward in a recorded step, and needs hooks."""
        if not self._warming:
            self._warming = True
            dispatch.active.expect(1)

    def _end_warm_up(self) -> None:
        if self._warming:
            self._warming = False
            dispatch.active.expect(-1)

    def step(self, number: int, metadata: Mapping[str, str], mark: bool) -> None:
        """The step ``number``, to be recorded, begins; the first one puts ``metadata`` into the trace.

        Without ``mark`` neither the trace nor `steps` shows it.
        """
        if self.start_ns is None:
            self.capture.start()
            self.start_ns = time.time_ns()
            self._end_warm_up()
            for key, value in metadata.items():
                self.capture.add_metadata(key, value)
        if mark:
            self.capture.step(number)
            self.steps = (self.steps[0] if self.steps else number, number)

    def end_step(self) -> None:
        """The step that is recorded ends, and the next one has not begun."""
        self.capture.step(None)

    def leave_out(self, number: int) -> None:
        """Do not count the last step, ``number``, which never ran."""
        if self.steps is not None:
            self.steps = (self.steps[0], number - 1) if self.steps[0] < number else None

    def ends_with(self, number: int) -> bool:
        """Tell whether the step ``number`` is the last one recorded."""
        return self.steps is not None and self.steps[1] == number

    def cut_short(self) -> None:
        """Take note that the last step did not end; it counts only where no other is recorded."""
        if self.steps is not None and self.cut_step is None:
            first, self.cut_step = self.steps
            self.steps = first, max(first, self.cut_step - 1)

    def stop(self) -> None:
        """Stop recording; the trace gets the steps that ran, and how many of warm-up came before them.

        Raises:
            CaptureError: this is the wrong thread.
        """
        if not self.on_own_thread():
            raise CaptureError("the loop ended on another thread than the one that opened the window")
        self.capture.step(None)
        first, last = self.steps or (1, 0)  # a range without a step
        self.capture.add_metadata("instrument_steps", f"{first}-{last}")
        self.capture.add_metadata("instrument_warmup", str(first - self.opened if self.steps else 0))
        self.capture.stop()
        self.end_ns, self._stopped = time.time_ns(), True

    def abandon(self) -> None:
        """Leave nothing on after a failure, or a warm-up that led to nothing; again after an interrupt."""
        if self._stopped:
            return
        self.end_ns = self.end_ns or time.time_ns()
        try:
            self._end_warm_up()
            with suppress(CaptureError):  # the reason is known by now
                if self.start_ns is None:
                    self.capture.discard()
                else:
                    self.capture.stop()
            self._stopped = True
        finally:
            dispatch.active.check()
