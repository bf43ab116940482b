"""`at_thread_end`: calls a function on the current thread when that thread ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from threading import get_ident

_threads: dict[int, threading.Thread] = getattr(threading, "_active", {})  # by identifier


class _Calls(list[Callable[[], None]]):
    """Makes the calls when it is freed, if that happens on the thread that made it.

    CPython frees the values of a `threading.local` on the thread that ends, before `Thread.join` returns. At exit
    the main thread frees those of daemon threads, and a forked child those of its parent's threads: the calls are
    not made.
    """

    def __init__(self) -> None:
        self._thread = get_ident(), os.getpid()

    def __del__(self, get_ident: Callable[[], int] = get_ident, getpid: Callable[[], int] = os.getpid) -> None:
        if not self or self._thread != (get_ident(), getpid()):
            return
        try:
            for call in self:
                call()
        finally:
            _threads.pop(get_ident(), None)  # logging a line lists the thread again, as a dummy and for good


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.calls = _Calls()  # nothing else may refer to it


_state = _ThreadState()


def at_thread_end(call: Callable[[], None]) -> None:
    """Call ``call()``, which contains its errors, when the current thread ends, if `threading.Thread` started it.

    Python knows a thread of C code only while that calls Python, and up to 3.12.3 crashes if torch is called then.
    """
    thread = _threads.get(get_ident())
    if thread not in (None, threading.main_thread()) and not isinstance(thread, threading._DummyThread):
        _state.calls.append(call)


def cancel_at_thread_end(call: Callable[[], None]) -> None:
    """Undo `at_thread_end` on the same thread; on another thread, do nothing."""
    if call in _state.calls:
        _state.calls.remove(call)
