"""`PatchService`: decides when requested patches and hooks are in place: while recording, not while compiling."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ...base.config import settings
from ...base.guard import guard
from ...base.imports import ImportHook
from ..regions import dispatch
from .compiling import compiling, graphing, scripting

FEATURE = "annotating modules and steps"
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class PatchService(ABC, Generic[T]):
    """Changes modules or torch for requests of type ``T``; `refresh` brings the changes up to date."""

    during_phases = False  # whether the changes are made while only the phases of a step are shown
    during_warm_up = False  # whether the changes are made as early as the warm-up of a recording

    def __init__(self) -> None:
        self.requests: list[T] = []
        self._is_on = False
        self._recordings_in_warm_up = 0  # the number of recordings in warm-up at the last refresh
        self._suspended = 0
        self._stale = False
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock_after_fork)

    @abstractmethod
    def apply(self, on: bool) -> None:
        """Undo the earlier changes, and if ``on``, make those that the requests need now."""

    def add(self, request: T) -> Handle:
        """Serve ``request`` from now on, unless the library is switched off."""
        handle = Handle(self, request)
        if settings.enabled:
            self._add(request)
        return handle

    @guard.contained(FEATURE)
    def _add(self, request: T) -> None:
        with self._lock:
            self.requests.append(request)
            if self.observe not in dispatch.active.observers:
                dispatch.active.observers.append(self.observe)
                atexit.register(self.clear)
                ImportHook("torch._dynamo", self._compiler_imported).apply()
            self.refresh()

    @guard.contained(FEATURE)
    def discard(self, request: T) -> None:
        """Stop serving ``request``."""
        with self._lock:
            if request in self.requests:
                self.requests.remove(request)
                self.refresh()

    @guard.contained(FEATURE)
    def clear(self) -> None:
        """Stop serving every request."""
        with self._lock:
            self.requests.clear()
            self.refresh()

    @property
    def _should_be_on(self) -> bool:
        shown = dispatch.recording if self.during_phases else dispatch.detailed
        return (shown or (self.during_warm_up and dispatch.active.warm_up_count > 0)) and bool(self.requests)

    @guard.contained(FEATURE)
    def observe(self) -> None:
        """Refresh when a recording warms up, starts or stops; changes made for a warm-up stay for its steps."""
        with self._lock:
            warmed = self.during_warm_up and 0 < dispatch.active.warm_up_count == self._recordings_in_warm_up
            if not (warmed and self._is_on and self._should_be_on):
                self.refresh()

    def refresh(self) -> None:
        """Bring the changes up to date; a call during a refresh, as in a signal handler, takes effect after it."""
        with self._lock:
            self._stale = True
            while self._stale and not self._is_refreshing():
                self._stale = False
                self._refresh()

    def _is_refreshing(self) -> bool:
        """Return whether this thread is in `_refresh`, by its frames: an interrupt could leave a flag set."""
        code = PatchService._refresh.__code__
        frames = traceback.walk_stack(sys._getframe(2))
        return any(frame.f_code is code and frame.f_locals["self"] is self for frame, _ in frames)

    def _refresh(self) -> None:
        on = self._is_on = self._should_be_on
        self._recordings_in_warm_up = dispatch.active.warm_up_count
        for suspension in (compiling, scripting, graphing):
            suspension.set_suspended(self.suspended, on)
        self.apply(on and not self._suspended)

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: object) -> None:
        self.refresh()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo the changes during the body, in which torch compiles or scripts and would include them."""
        self._suspend(1)
        try:
            yield
        finally:
            self._suspend(-1)

    @guard.contained(FEATURE)
    def _suspend(self, more: int) -> None:
        with self._lock:
            self._suspended += more
            self.refresh()

    def _renew_lock_after_fork(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent process may hold the old lock


class Handle:
    """Undoes an annotation: `remove`, or the end of a ``with`` block."""

    def __init__(self, service: PatchService[Any] | None, request: object) -> None:
        self._service = service
        self._request = request

    def __repr__(self) -> str:
        return f"<regions of {self._request}>"

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Undo the annotation; a second call does nothing."""
        if self._service is not None:
            self._service.discard(self._request)

    def __enter__(self) -> Handle:
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.remove()


_EMPTY = Handle(None, "nothing")


def contain_request(function: F) -> F:
    """Contain a function that returns a `Handle`: after an error of this library, the handle is empty."""
    return guard.prepared(FEATURE, otherwise=lambda *_, **__: _EMPTY)(function)
