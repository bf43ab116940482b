"""No error of ours reaches the user's code: it is logged once, counted, and the feature steps aside."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from . import log
from .config import settings


class Guard:
    """Counts what failed, by feature, and logs each kind of failure once."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def failed(self, feature: str, error: Exception) -> None:
        """Take note of ``error`` in ``feature``; raise it again only under ``INSTRUMENT_STRICT=1``."""
        self.failures[feature] += 1
        if settings.strict:
            raise error
        kind = (feature, repr(error))
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(f"{feature} failed and steps aside", error=kind[1], exc_info=error)

    @contextmanager
    def contained(self, feature: str) -> Iterator[None]:
        """Run the body; an ``Exception`` ends it and goes to `failed` (``KeyboardInterrupt`` passes through)."""
        try:
            yield
        except Exception as error:
            self.failed(feature, error)


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
