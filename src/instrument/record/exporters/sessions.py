"""`Sessions`: follows which torch profiler records. In a process, torch records for one profiler at a time.

A profiler that prepares ends the recording of the previous one, inside any open ranges. If such a range is closed
or freed during the next recording, torch (2.13 and before) writes to freed memory and crashes. Stopping,
discarding or exporting the ended recording also crashes. A capture therefore stops before another profiler
prepares, and its open ranges are ended in between.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from ...base.compat import kineto, profilers
from ...base.errors import CaptureError
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.patch import Patch, apply, undo

FEATURE = "following torch's profilers"
OTHER_WINDOW = "another profile of this process has a window"
_MAX_REFERENCES = 1000  # ranges that are followed before freed ones are dropped


class Sessions:
    """Follows all torch profilers of the process."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Any] | None = None
        self._thread = 0  # the thread on which the owner prepared
        self.capture: Any = None  # the `TorchProfilerCapture` that torch records for
        self._preparing = threading.RLock()  # held while a capture prepares
        self._preparing_thread = 0  # the thread on which it does
        self.saw_cpu_only: bool | None = None  # whether the first recording that was seen was of the CPU only
        self._foreign_recording_ended = True  # another profiler's recording ended; its ranges may still be open
        self._following_profilers = False
        self._patches: list[Patch] = []  # stay until the process ends: they call the original
        self.stop_failure = ""  # why the stop of a window's recording, which is still on, failed

    @property
    def owner(self) -> Any:
        """The `torch.autograd.profiler.profile` that prepared or recorded last; None after its end."""
        return self._owner and self._owner()

    @property
    def owner_on_another_thread(self) -> bool:
        """Whether the owner prepared on another thread; also True without an owner."""
        return self.owner is None or self._thread != get_ident()

    def follow_profilers(self) -> None:
        """Follow the profilers from now on."""
        if not self._following_profilers:
            self._following_profilers = True
            kineto.end_forks_without_destructors()
            for prepared in kineto.prepared_profilers():
                self.before_prepare(prepared)
            apply(kineto.session_patches(self), self._patches)
            self._end_ranges()

    @contextmanager
    def take_over(self, capture: Any) -> Iterator[None]:
        """Let torch record for ``capture``, whose profiler prepares in the body.

        Raises:
            CaptureError: another thread was faster.
        """
        try:
            if not self._preparing.acquire(blocking=False) or self.owner is not None:
                raise CaptureError(OTHER_WINDOW)
            self._end_ranges()
            self._preparing_thread = get_ident()
            try:
                yield
            except BaseException:
                self.on_ended()  # only this: torch crashes if a half-prepared profiler is started and stopped
                raise
            finally:
                self._preparing_thread = 0
            self.capture = capture
        finally:
            with Suppressed(RuntimeError):  # not held, or no longer; after an interrupt, held twice
                while True:
                    self._preparing.release()

    @guard.contained(FEATURE)
    def before_start(self) -> None:
        """Stop a capture that records on this thread, as another profiler is about to."""
        if profilers.running():
            self.stop_capture()

    @guard.contained(FEATURE)
    def before_prepare(self, profiler: Any) -> bool:
        """Note that torch records for ``profiler``, which is about to prepare.

        Returns:
            Whether a session that is still on may be ended: it belongs to this library, or is unused.
        """
        may_end = self.capture is not None or (self.owner is None and not profilers.running_anywhere())
        if self._preparing_thread != get_ident():
            self.stop_capture()
        if self.saw_cpu_only is None:
            self.saw_cpu_only = getattr(profiler, "use_device", True) is None
        self._owner, self._thread = profiler and weakref.ref(profiler), get_ident()
        return may_end

    @guard.contained(FEATURE)
    def before_disable(self) -> Any:
        """Stop a capture before the profiler of this thread is disabled; return torch's results."""
        return self.stop_capture() if profilers.running() else None

    def recover(self) -> None:
        """End a recording of this library whose stop failed, if it is still on."""
        if self.stop_failure and self.owner is None:
            with Suppressed(Exception):
                kineto.leave_recording()
                if not profilers.running():
                    kineto.discard_trace()
        if not profilers.running():
            self.stop_failure = ""

    def note_stop(self, capture: Any) -> None:
        """Make torch's state say that the profiler of ``capture`` is off, unless another one has begun since."""
        if self.capture is capture or self.owner is None:
            profilers.note_stop()

    @guard.contained(FEATURE)
    def on_ended(self) -> None:
        """Note that the recording is over."""
        self._foreign_recording_ended = self._foreign_recording_ended or self.capture is None
        self._owner = self.capture = None

    def release(self, capture: Any) -> None:
        """End the recording of ``capture``, if torch did not call `on_ended` when it stopped."""
        if self.capture is capture:
            self.on_ended()

    def stop_capture(self) -> Any:
        """End the recording of this library's capture, if any, and return torch's results."""
        result = None
        with guard.contained("stepping aside for another profiler"):
            capture, self.capture = self.capture, None
            if capture is not None:
                try:
                    result = capture.step_aside()
                finally:
                    self._owner = None
        return result

    def _end_ranges(self) -> None:
        if self._foreign_recording_ended and not profilers.running_anywhere():
            self._foreign_recording_ended = False
            kineto.end_record_functions(kineto.record_functions())


sessions = Sessions()


class OpenRanges:
    """The ranges (`torch.profiler.record_function`) that this thread opens between `follow` and `end`."""

    def __init__(self) -> None:
        # Not a WeakSet: an error that a signal handler raises in a weak reference's callback is lost.
        self._opened: list[weakref.ref[Any]] = []
        self._max_references = _MAX_REFERENCES
        self._thread = get_ident()
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Begin; after an interrupt at any point, `end` undoes it."""
        from torch.autograd.profiler import record_function

        apply([Patch(record_function, "__enter__", self._make_enter)], self._patches)

    def _make_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # TorchScript compiles the source of the original
        def enter(context: Any) -> Any:
            try:
                if get_ident() == self._thread:
                    self._opened.append(weakref.ref(context))
                    if len(self._opened) > self._max_references:
                        self._opened = [ref for ref in self._opened if ref() is not None]
                        self._max_references = max(_MAX_REFERENCES, 2 * len(self._opened))
            except Exception as error:
                guard.failed(FEATURE, error)
            return original(context)

        return enter

    def end(self) -> None:
        """End the ranges that are still open, after the recording and before another one on this thread."""
        undo(self._patches)
        kineto.end_record_functions([context for ref in self._opened if (context := ref()) is not None])
        self._opened.clear()
