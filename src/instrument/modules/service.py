"""What is done for those who asked for it, while somebody listens and nothing is being compiled."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

from .. import compat
from ..config import settings
from ..guard import guard
from ..regions import dispatch
from .compiling import compiling, graphing, scripting

FEATURE = "annotating modules and steps"
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Service(ABC, Generic[T]):
    """Changes modules or torch for requests of type ``T``; `settle` brings what is changed up to date."""

    early = False  # whether changes are there in the warm-up of a recording already

    def __init__(self) -> None:
        self.requests: list[T] = []
        self._on = False
        self._warmed = 0  # recordings in warm-up, when changes were last brought up to date
        self._suspended = 0
        self._stale = False
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    @abstractmethod
    def apply(self, on: bool) -> None:
        """Change what is to be changed now, and undo what was changed before; with ``on`` False, only undo."""

    def add(self, request: T) -> Handle[T]:
        """Serve ``request`` from now on, unless everything is off."""
        handle = Handle(self, request)
        if settings.enabled:
            self._serve(request)
        return handle

    @guard.contained(FEATURE)
    def _serve(self, request: T) -> None:
        with self._lock:
            self.requests.append(request)
            if self.observe not in dispatch.active.observers:
                dispatch.active.observers.append(self.observe)
                atexit.register(self.clear)
                compat.when_imported("torch._dynamo", self._compiler_imported)
            self.settle()

    @guard.contained(FEATURE)
    def discard(self, request: T) -> None:
        """Serve ``request`` no more."""
        with self._lock:
            if request in self.requests:
                self.requests.remove(request)
                self.settle()

    @guard.contained(FEATURE)
    def clear(self) -> None:
        """Serve nobody."""
        with self._lock:
            self.requests.clear()
            self.settle()

    @property
    def _wanted(self) -> bool:
        return (dispatch.recording or (self.early and dispatch.active.expected > 0)) and bool(self.requests)

    @guard.contained(FEATURE)
    def observe(self) -> None:
        """A recording warms up, starts or stops: what was changed for its warm-up stays for its steps."""
        with self._lock:
            warmed = self.early and 0 < dispatch.active.expected == self._warmed
            if not (warmed and self._on and self._wanted):
                self.settle()

    def settle(self) -> None:
        """Bring what is changed up to date; inside of itself, as in a signal handler, once what runs is done."""
        with self._lock:
            self._stale = True
            while self._stale and not self._settles():
                self._stale = False
                self._settle()

    def _settles(self) -> bool:
        """Tell whether this thread is in `_settle`, by its frames: an interrupt might leave a flag set."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is Service._settle.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    def _settle(self) -> None:
        on = self._on = self._wanted
        self._warmed = dispatch.active.expected
        for suspension in (compiling, scripting, graphing):
            suspension.set_suspended(self.suspended, on)
        self.apply(on and not self._suspended)

    @guard.contained(FEATURE)
    def _compiler_imported(self, _: object) -> None:
        self.settle()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is changed inside: torch compiles or scripts, and would make the changes part of that."""
        self._suspend(1)
        try:
            yield
        finally:
            self._suspend(-1)

    @guard.contained(FEATURE)
    def _suspend(self, more: int) -> None:
        with self._lock:
            self._suspended += more
            self.settle()

    @guard.contained(FEATURE)
    def _forked(self) -> None:
        self._lock = threading.RLock()  # a thread that is not in this process may hold the old one


class Handle(Generic[T]):
    """What was asked for; as a context manager it removes itself at the end of the block."""

    def __init__(self, service: Service[T] | None, request: T) -> None:
        self._service = service
        self._request = request

    def __repr__(self) -> str:
        return f"<regions of {self._request}>"

    @guard.contained(FEATURE)
    def remove(self) -> None:
        """Undo it, now and for good; once more does nothing."""
        if self._service is not None:
            self._service.discard(self._request)

    def __enter__(self) -> Handle[T]:
        return self

    @guard.contained(FEATURE)
    def __exit__(self, *_: object) -> None:
        self.remove()


_EMPTY: Handle[Any] = Handle(None, "nothing")


def served(function: F) -> F:
    """Contain what returns a `Handle`: one of nothing where it fails, but for wrong arguments."""
    return guard.prepared(FEATURE, otherwise=lambda *_, **__: _EMPTY)(function)
