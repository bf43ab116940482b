"""Whose recording it is: torch records for one profiler at a time in a process, on whichever thread.

A profiler that prepares ends the recording of the one before, in whatever ranges that is. A range which was open
then and is closed, or freed, in the next recording is written to memory that is gone: torch (2.13 and before)
crashes. To stop, discard or export what was ended so is a crash as well. So a capture stops by itself before
another profiler prepares, and what it leaves open is ended in between.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

from .. import compat
from ..guard import guard
from ..interrupts import Suppressed
from ..patch import Patch, apply, undo

FEATURE = "following torch's profilers"
_ROOM = 1000  # ranges that are followed before those that are gone are dropped


class SessionCapture(Protocol):
    """A capture for which torch's profiler records."""

    def step_aside(self) -> Any:
        """Stop, as another profiler is about to begin on this thread; return what torch recorded, if anything."""


class Sessions:
    """Follows all torch profilers of the process."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Any] | None = None
        self._thread = 0  # that the owner prepared on
        self.capture: SessionCapture | None = None  # the one of this library for which torch records
        self._claiming = 0  # the thread on which it prepares now
        self._records_gpu: bool | None = None  # of this process; None until a trace was looked at
        self._ended = True  # a recording of somebody else's, whose ranges may still be open
        self._watches = False
        self._patches: list[Patch] = []  # stay until the process ends: they call the original
        self.stuck = ""  # why the recording of a window is still on, as its stop failed

    @property
    def owner(self) -> Any:
        """The `torch.autograd.profiler.profile` that prepared or records last; None once it stopped or is gone."""
        return self._owner and self._owner()

    @property
    def elsewhere(self) -> bool:
        """Whether the owner, if there is one, prepared on another thread."""
        return self.owner is None or self._thread != get_ident()

    def watch(self) -> None:
        """Follow them from now on."""
        if not self._watches:
            self._watches = True
            for prepared in compat.prepared_profilers():
                self.prepared(prepared)
            apply(compat.session_patches(self), self._patches)
            self._end_ranges()

    @contextmanager
    def claim(self, capture: SessionCapture) -> Iterator[None]:
        """Let torch record for ``capture``, whose profiler prepares in the body."""
        self._end_ranges()
        self._claiming = get_ident()
        try:
            yield
        except BaseException:
            self.left()  # no more: to start and stop what is half prepared crashes torch
            raise
        finally:
            self._claiming = 0
        self.capture = capture

    @guard.contained(FEATURE)
    def coming(self) -> None:
        """Stop a capture that records on this thread, as another profiler is about to."""
        if compat.profiler_running():
            self.drop()

    @guard.contained(FEATURE)
    def prepared(self, profiler: Any) -> bool:
        """Take note that torch records for ``profiler``, which is about to prepare.

        Returns:
            Whether a session that is still on may be ended: it is of this library, or nobody uses it any more.
        """
        may_end = self.capture is not None or (self.owner is None and not compat.profiler_enabled_somewhere())
        if self._claiming != get_ident():
            self.drop()
        self._owner, self._thread = profiler and weakref.ref(profiler), get_ident()
        return may_end

    @guard.contained(FEATURE)
    def disabled(self) -> Any:
        """Stop a capture before somebody disables the profiler of this thread; return what it recorded."""
        return self.drop() if compat.profiler_running() else None

    def recover(self) -> None:
        """Take off a recording of this library whose stop failed, if that is what is on."""
        if self.stuck and self.owner is None:
            with Suppressed(Exception):
                compat.leave_recording()
        if not compat.profiler_running():
            self.stuck = ""

    def note_stop(self, capture: SessionCapture) -> None:
        """Have torch note that the profiler of ``capture`` is off, if it is and no other one has begun since."""
        if self.capture is capture or self.owner is None:
            compat.note_stop()

    def records_gpu(self, trace: Path) -> bool:
        """Tell whether torch records the GPU in this process, from its first ``trace`` that was to have it.

        From torch 2.13 on the first recording of a process decides that, which may have been anybody's.
        """
        if self._records_gpu is None:
            self._records_gpu = compat.is_set_up_for_gpu(trace)
        return self._records_gpu

    @guard.contained(FEATURE)
    def left(self) -> None:
        """Take note that the recording is over."""
        self._ended = self._ended or self.capture is None
        self._owner = self.capture = None

    def release(self, capture: SessionCapture) -> None:
        """End the recording of ``capture``, if torch did not call `left` when it stopped."""
        if self.capture is capture:
            self.left()

    def drop(self) -> Any:
        """End the recording of this library's own capture, if there is one, and return what torch recorded."""
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
        if self._ended and not compat.profiler_enabled_somewhere():
            self._ended = False
            compat.end_record_functions(compat.record_functions())


sessions = Sessions()


class OpenRanges:
    """Each `torch.profiler.record_function` that this thread opens, from `follow` to `end`."""

    def __init__(self) -> None:
        # Not a WeakSet: where a signal handler raises in a callback of a weak reference, the error is lost.
        self._opened: list[weakref.ref[Any]] = []
        self._room = _ROOM
        self._thread = get_ident()
        self._patches: list[Patch] = []

    def follow(self) -> None:
        """Begin; whoever holds this can `end` it, wherever an interrupt comes."""
        from torch.autograd.profiler import record_function

        apply([Patch(record_function, "__enter__", self._entering)], self._patches)

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # TorchScript compiles the source of what is wrapped
        def enter(context: Any) -> Any:
            try:
                if get_ident() == self._thread:
                    self._opened.append(weakref.ref(context))
                    if len(self._opened) > self._room:
                        self._opened = [ref for ref in self._opened if ref() is not None]
                        self._room = max(_ROOM, 2 * len(self._opened))
            except Exception as error:
                try:
                    guard.failed(FEATURE, error)
                except Exception as raised:
                    if raised is error:
                        raise
            return original(context)

        return enter

    def end(self) -> None:
        """End those that are still open; the recording stopped, and no profiler records on this thread."""
        undo(self._patches)
        compat.end_record_functions([context for ref in self._opened if (context := ref()) is not None])
        self._opened.clear()
