"""One window while it is open."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from .. import log
from ..errors import CaptureError
from ..exporters.capture import Capture
from ..interrupts import complete
from ..regions import live
from .schedule import Window


class Recording:
    """A window and its capture, opened on this thread: torch's profiler must be stopped where it was started.

    Attributes:
        steps: the first and the last step recorded so far; None in warm-up.
        start_ns: when recording began, in ns since the epoch; None in warm-up.
        end_ns: when it ended.
    """

    def __init__(self, window: Window, capture: Capture) -> None:
        self.window = window
        self.capture = capture
        self.steps: tuple[int, int] | None = None
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self._thread = threading.get_ident()
        self._warned = False
        self._warming = False

    def here(self) -> bool:
        """Tell whether this is the thread that opened the window; warn the first time it is not."""
        if self._thread == threading.get_ident():
            return True
        if not self._warned:
            self._warned = True
            log.warning(
                "step() was called on another thread than the one that opened the window; the window stays open",
                window=self.window.index,
            )
        return False

    @property
    def cut(self) -> str:
        """Why the recording ended before the window did; empty where it did not."""
        return getattr(self.capture, "cut", "")

    def warm_up(self) -> None:
        """A step of warm-up begins: its forward may have its backward in a recorded step, and needs hooks."""
        if not self._warming:
            self._warming = True
            live.live.expect(1)

    def _warm(self) -> None:
        if self._warming:
            self._warming = False
            live.live.expect(-1)

    def step(self, number: int, metadata: Mapping[str, str], mark: bool) -> None:
        """The step ``number``, to be recorded, begins; the first one puts ``metadata`` into the trace.

        Without ``mark`` the trace shows no step.
        """
        if self.start_ns is None:
            self.capture.start()
            self.start_ns = time.time_ns()
            self._warm()
            for key, value in metadata.items():
                self.capture.add_metadata(key, value)
        if mark:
            self.capture.step(number)
        self.steps = (self.steps[0] if self.steps else number, number)

    def stop(self, metadata: Mapping[str, str]) -> None:
        """Stop recording, with ``metadata`` in the trace.

        Raises:
            CaptureError: this is the wrong thread.
        """
        if not self.here():
            raise CaptureError("the loop ended on another thread than the one that opened the window")
        self.capture.step(None)
        for key, value in metadata.items():
            self.capture.add_metadata(key, value)
        self.capture.stop()
        self.end_ns = time.time_ns()

    def abandon(self) -> None:
        """Leave nothing on after a failure, or after a warm-up that led to nothing."""
        if self.end_ns is not None:
            return
        self.end_ns = time.time_ns()
        try:
            complete(self._warm, self._discard)
        finally:
            live.live.check()

    def _discard(self) -> None:
        with suppress(CaptureError):  # the reason is known by now
            if self.start_ns is None:
                self.capture.discard()
            else:
                self.capture.stop()
