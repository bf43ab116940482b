"""Signals: recognizes Ctrl-C, exit and errors of the program's signal handlers; reads which handlers there are.

CPython calls a signal handler between any two instructions of the main thread, which may run code of this library.
An exception of the handler, such as the end of a time limit, must reach the program.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parent.parent) + os.sep


def is_interrupt(error: BaseException) -> bool:
    """Return whether ``error`` must reach the program: it is not an `Exception`, or a signal handler raised it.

    Two kinds are not recognized: errors of a handler without a Python frame, such as a built-in function, and
    exceptions set by ``PyThreadState_SetAsyncExc``. Any function that is called like a handler, with a signal
    number and its caller's frame, counts as one.
    """
    if not isinstance(error, Exception):
        return True
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):  # handlers of this library do not count
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    if any(map(_handles_signal, frames)):
        return True
    codes = {frame.f_code for frame in frames}  # of a handler that changed or deleted its arguments
    return any(_code_of_handler(signal.getsignal(number)) in codes for number in signal.valid_signals())


def _handles_signal(frame: FrameType) -> bool:
    """Return whether ``frame`` was called with a signal number and its caller's frame, as CPython calls handlers.

    Other positional arguments may come first: the object of a method, or those of a `functools.partial`.
    """
    code, caller = frame.f_code, frame.f_back
    values = frame.f_locals
    given: list[Any] = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()
    return caller is not None and any(
        second is caller and type(first) is int and first in signal.valid_signals()
        for first, second in pairwise(given)
    )


def _code_of_handler(handler: Any) -> CodeType | None:
    """Return the code of a signal handler; None if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        # Not `type(handler).__call__`: SIG_DFL is an Enum member, whose metaclass defines `__call__` in Python.
        classes = type(handler).__mro__
        handler = next((vars(kind)["__call__"] for kind in classes if "__call__" in vars(kind)), None)
    code = getattr(handler, "__code__", None)  # also of a method
    return code if isinstance(code, CodeType) else None


class Suppressed:
    """Suppresses an error of ``kinds`` in a ``with`` block, unless a signal handler of the program raised it."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, self._kinds) and not is_interrupt(error)


@contextmanager
def handling(number: int, handler: Callable[..., object]) -> Iterator[None]:
    """Handle signal ``number`` in the body; a handler that the body installs stays."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)


_SIZE = 1024  # bytes, more than a ``struct sigaction`` takes; the handler's address comes first in glibc and musl
_POINTER = 8 if sys.maxsize > 1 << 32 else 4


def c_library() -> Any:
    """Return the C library from `ctypes.CDLL`; None without ctypes or ``sigaction``."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        return libc if libc.sigaction else None
    except (ImportError, OSError, AttributeError):
        return None


def c_handler(number: int) -> int | None:
    """Return the address of a signal's handler: 0 is the default, 1 ignores the signal; None if unknown."""
    libc = c_library()
    if libc is None:
        return None
    import ctypes

    action = ctypes.create_string_buffer(_SIZE)
    if libc.sigaction(int(number), None, action):
        raise OSError(f"sigaction failed for signal {number}")
    return int.from_bytes(action.raw[:_POINTER], sys.byteorder)


def is_default(number: int) -> bool:
    """Return whether no code handles or ignores signal ``number``, in Python or, where known, in C."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    return not c_handler(number)
