"""Contains errors of this library: each is counted and logged once, and the feature that failed is skipped.

Every entry point that the program or a framework calls contains errors once, in its outermost frame.
`Guard.contained` and `Guard.prepared` decorate functions; `Guard.around` makes functions that replace others. Hot
paths, where one more call counts, contain errors by a ``try`` of their own, whose handler reads::

    except Exception as error:
        guard.failed(feature, error)

At the recursion limit the call of `Guard.failed` itself fails; on purpose it raises only ``error``.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, TypeVar, cast

from . import log
from .config import settings
from .errors import InstrumentError, SyncError
from .interrupts import is_interrupt
from .patch import transparent

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type)
WRONG_ARGUMENTS = (TypeError, ValueError, ImportError, InstrumentError)


class Guard:
    """Counts failures by feature, and logs each kind of failure once."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._logged: set[tuple[str, str, str]] = set()

    def failed(self, feature: str, error: Exception, **about: object) -> None:
        """Count and log ``error`` in ``feature``.

        Args:
            feature: what failed, in words.
            error: how.
            about: further fields of the event, such as the window; each kind of failure is logged once for them.

        Raises:
            Exception: only ``error`` itself: if it is a `SyncError`, which the user requested, if
                ``INSTRUMENT_STRICT=1`` is set, or if a signal handler of the program raised it.
        """
        if is_interrupt(error):
            raise error
        strict = settings.strict
        try:
            if isinstance(error, SyncError):
                strict = True
            elif strict:
                self.failures[feature] += 1
            else:
                self.note(feature, error, **about)
        except Exception as another:
            log.last_resort(f"{feature} failed and was skipped; training continues", error, another)
        if strict:
            raise error

    def note(self, feature: str, error: Exception, **about: object) -> None:
        """Count ``error`` in ``feature``, and log it as `failed` does; raise nothing."""
        try:
            self.failures[feature] += 1
            kind = (feature, repr(error), repr(about))
            if kind not in self._logged:
                self._logged.add(kind)
                text = f"{feature} failed and was skipped; training continues"
                log.warning(text, **about, error=kind[1], exc_info=error)
        except Exception as another:
            log.last_resort(f"{feature} failed and was skipped; training continues", error, another)

    def contained(self, feature: str) -> Contained:
        """Return a context manager, also a decorator, that contains the errors of its body.

        A decorated function returns None if it fails. ``KeyboardInterrupt``, ``SystemExit`` and errors that signal
        handlers of the program raise propagate.
        """
        return Contained(self, feature)

    def prepared(self, feature: str, otherwise: Callable[..., Any]) -> Callable[[F], F]:
        """Return a decorator for functions that a program calls before its loop and that check their arguments.

        Errors for wrong arguments propagate. After any other error the function returns ``otherwise(*arguments)``.
        """

        def decorate(function: F) -> F:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except WRONG_ARGUMENTS:
                    raise
                except Exception as error:
                    self.failed(feature, error)
                return otherwise(*args, **kwargs)

            return cast(F, call)

        return decorate

    def around(
        self,
        feature: str,
        original: Callable[..., Any],
        around: Callable[..., Any],
        when: Callable[[], bool] = lambda: True,
    ) -> Callable[..., Any]:
        """Return a function that calls ``around(original, *arguments)``, which calls ``original`` once.

        If ``around`` fails, the function returns the result of ``original``, which it calls unless ``around`` did.
        Errors of ``original`` propagate. Unless ``when()`` is true, only ``original`` is called, which is all that
        a compiler then traces.
        """
        transparent(around)

        @transparent
        def call(*args: Any, **kwargs: Any) -> Any:
            alone, once = True, None
            try:
                alone = not when()
            except Exception as error:
                self.failed(feature, error)
            if alone:
                return original(*args, **kwargs)
            try:
                once = _SingleCall(original)
                return around(once, *args, **kwargs)
            except Exception as error:
                if once is not None and once.error is error:
                    once.error = None  # breaks a reference cycle, which would keep the frames alive
                    raise
                self.failed(feature, error)
            if once is None or not once.called:
                return original(*args, **kwargs)
            if once.error is not None:
                raise once.error
            return once.result

        return call


class Contained:
    """A context manager and decorator that contains errors; see `Guard.contained`."""

    __slots__ = ("_feature", "_guard")

    def __init__(self, guard: Guard, feature: str) -> None:
        self._guard = guard
        self._feature = feature

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            return False
        try:
            passes = not isinstance(error, Exception)
        except RecursionError:  # `isinstance` itself is over the limit
            passes = kind is KeyboardInterrupt or kind is SystemExit
        if passes:
            return False
        try:
            self._guard.failed(self._feature, cast(Exception, error))
        except Exception as raised:
            return raised is not error
        return True

    def __call__(self, function: F) -> F:
        """Return ``function`` with its errors contained."""
        guard, feature = self._guard, self._feature

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                guard.failed(feature, error)
            return None

        return cast(F, call)


class _SingleCall:
    """A function with the outcome of its call."""

    __slots__ = ("_function", "called", "error", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called = False
        self.error: BaseException | None = None
        self.result: Any = None

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result


def contained_events(feature: str) -> Callable[[K], K]:
    """Return a class decorator: every public method that the class itself defines contains its errors."""

    def decorate(kind: K) -> K:
        for name, method in list(vars(kind).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(kind, name, guard.contained(feature)(method))
        return kind

    return decorate


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C while the body runs, which must be short, until right after it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled on the main thread alone
        return
    held: list[tuple[Any, ...]] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *given: held.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])


def uncaught_error() -> BaseException | None:
    """Return the error that ends the program, or None; an interpreter at a prompt outlives its errors."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


@contextmanager
def exiting() -> Iterator[None]:
    """Run the body at exit without changing the exit code of a program that Ctrl-C ended.

    CPython uses that exit code if the last code that it ran from a string raised KeyboardInterrupt. The body may
    run other strings, as the import of a dataclass does. One more string therefore raises it again; nothing else
    sets that flag. A Ctrl-C in the body ends only the body: Python would print it and go on.
    """
    with suppress(KeyboardInterrupt):
        yield
    if issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


guard = Guard()
