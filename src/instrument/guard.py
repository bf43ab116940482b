"""The containment: an error of the library's own is logged once and counted, and the feature is skipped.

Every entry from the program or a framework passes through it once, in its outermost frame. `Guard.contained` and
`Guard.prepared` put it around functions, and `Guard.around` around functions that stand for others. On hot paths,
where the call of one more function counts, the entry begins with ``try`` itself and its handler reads::

    except Exception as error:
        try:
            guard.failed(feature, error)
        except Exception as raised:
            if raised is error:
                raise

At the recursion limit even the call of `Guard.failed` fails; what it raises on purpose is ``error`` itself.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from . import log
from .config import settings
from .errors import InstrumentError, SyncError
from .interrupts import is_interrupt
from .patch import transparent

F = TypeVar("F", bound=Callable[..., Any])
WRONG_ARGUMENTS = (TypeError, ValueError, ImportError, InstrumentError)


class Guard:
    """Counts what failed, by feature, and logs each kind of failure once."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def failed(self, feature: str, error: Exception) -> None:
        """Take note of ``error`` in ``feature``.

        Raises:
            Exception: ``error`` itself, where it is a `SyncError` that was asked for, or under
                ``INSTRUMENT_STRICT=1``, or where a signal handler of the program raised it; no other.
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
                self.note(feature, error)
        except Exception as another:
            log.last_resort(f"{feature} failed and was skipped; training goes on", error, another)
        if strict:
            raise error

    def note(self, feature: str, error: Exception) -> None:
        """Count ``error`` in ``feature``, and log it unless it was; raise nothing."""
        try:
            self.failures[feature] += 1
            kind = (feature, repr(error))
            if kind not in self._logged:
                self._logged.add(kind)
                log.warning(f"{feature} failed and was skipped; training goes on", error=kind[1], exc_info=error)
        except Exception as another:
            log.last_resort(f"{feature} failed and was skipped; training goes on", error, another)

    def contained(self, feature: str) -> Contained:
        """Return what contains the errors of a ``with`` block, or of the function that it decorates.

        A function that fails returns None. ``KeyboardInterrupt`` and ``SystemExit`` pass, and so do errors that
        signal handlers of the program raise.
        """
        return Contained(self, feature)

    def prepared(self, feature: str, otherwise: Callable[..., Any]) -> Callable[[F], F]:
        """Return a decorator for what a program calls before its loop, which checks its arguments.

        Errors of wrong arguments pass. For any other, ``otherwise(*arguments)`` makes what the call returns.
        """

        def decorate(function: F) -> F:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except WRONG_ARGUMENTS:
                    raise
                except Exception as error:
                    try:
                        self.failed(feature, error)
                    except Exception as raised:
                        if raised is error:
                            raise
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
        """Return a function that calls ``around(original, *arguments)``, in which ``original`` is called once.

        Where ``around`` fails, the result is that of ``original``, called by then or now. What ``original`` raises
        passes. Unless ``when()`` holds, ``original`` is called alone, and a compiler that traces it sees no more.
        """
        transparent(around)

        @transparent
        def call(*args: Any, **kwargs: Any) -> Any:
            alone, once = True, None
            try:
                alone = not when()
            except Exception as error:
                try:
                    self.failed(feature, error)
                except Exception as raised:
                    if raised is error:
                        raise
            if alone:
                return original(*args, **kwargs)
            try:
                once = _Once(original)
                return around(once, *args, **kwargs)
            except Exception as error:
                if once is not None and once.error is error:
                    once.error = None  # or the two would keep each other, and what the frames hold
                    raise
                try:
                    self.failed(feature, error)
                except Exception as raised:
                    if raised is error:
                        raise
            if once is None or not once.called:
                return original(*args, **kwargs)
            if once.error is not None:
                raise once.error
            return once.result

        return call


class Contained:
    """What `Guard.contained` returns."""

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
        except RecursionError:  # the limit is reached, also for this call
            passes = kind is KeyboardInterrupt or kind is SystemExit
        if passes:
            return False
        try:
            self._guard.failed(self._feature, cast(Exception, error))
        except Exception as raised:
            return raised is not error
        return True

    def __call__(self, function: F) -> F:
        """Return ``function``, contained."""
        guard, feature = self._guard, self._feature

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                try:
                    guard.failed(feature, error)
                except Exception as raised:
                    if raised is error:
                        raise
            return None

        return cast(F, call)


class _Once:
    """A function, and what its call led to."""

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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while the body runs, which must be short; it comes right after it."""
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


@contextmanager
def exiting() -> Iterator[None]:
    """Keep Python's exit code while the body runs at exit: after Ctrl-C it is that of the signal.

    Python forgets the interrupt where the body compiles a string, as modules do that it imports; here it is raised
    once more, in a string.
    """
    yield
    if issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


guard = Guard()
