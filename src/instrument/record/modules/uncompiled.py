"""Keeps torch.compile from compiling functions of this library, which it does between two graphs.

Functions that inspect frames must run uncompiled, and compiling the others would cost seconds. A function that is
inlined into a graph works as before.

Also defers calls to the end of compiled code: torch opens a range around it, in C++, and if a recording stops
inside it and another one starts there, torch crashes. So the end of a step is reported once the compiled function
has ended.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from ...base.compat import compiler
from ...base.guard import guard
from ...base.patch import Patch, apply, renamed, undo

_PACKAGE = __package__.partition(".")[0]


def skip_package() -> None:
    """Make torch.compile skip the functions of this package imported so far: 70 ms, then 1 ms at each call.

    Wrappers around functions of the program stay a part of the compiled code.
    """
    skip = compiler.skip_code()
    if skip is not None:
        wrapping_modules = [f"{_PACKAGE}.record.regions.{name}" for name in ("annotation", "wrap")]
        names = [name for name in sys.modules if name.split(".")[0] == _PACKAGE and name not in wrapping_modules]
        for name in names:
            for code in _codes_in(name, len(vars(sys.modules[name]))):
                skip(code)


@functools.cache
def _codes_in(name: str, _: int) -> list[types.CodeType]:
    """Return the codes of the functions of a module, whose number of attributes grows while it is imported."""
    values = [
        value for value in list(vars(sys.modules[name]).values()) if getattr(value, "__module__", None) == name
    ]
    codes = [code for value in values for code in _codes(value)]
    in_patches = [renamed(code) for code in codes if code.co_flags & inspect.CO_NESTED]
    return codes + in_patches


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code objects of a function or class, also those defined inside."""
    if isinstance(value, types.CodeType):
        yield value
        for inner in value.co_consts:
            if isinstance(inner, types.CodeType):
                yield from _codes(inner)
    elif isinstance(value, type):
        for part in vars(value).values():
            yield from _codes(part)
    elif isinstance(value, property):
        yield from _codes(value.fget)
    elif hasattr(value, "__wrapped__"):
        yield from _codes(value.__wrapped__)
    elif isinstance(value, types.FunctionType):
        yield from _codes(value.__code__)


F = TypeVar("F", bound=Callable[..., Any])
COMPILED_FEATURE = "following compiled functions"


def without_compiler(function: F) -> F:
    """Return ``function`` with torch.compile off during its calls; it must not become a part of a graph."""
    set_eval_frame = compiler.frame_evaluation()
    if set_eval_frame is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return cast(F, call)


class _ThreadState(threading.local):
    """The calls due on the thread at the end of the outermost compiled function."""

    due: tuple[Callable[[], None], ...] = ()


class DeferredCalls:
    """Defers calls to the end of the compiled function that runs on the thread, from `follow` to `remove`."""

    def __init__(self) -> None:
        self._thread = _ThreadState()
        self._patches: list[Patch] = []
        self._removed = False
        self._compiled = False  # whether any graph exists: before that no frames are inspected

    def follow(self) -> None:
        """Start; nothing is patched before the first deferred call."""

    def remove(self) -> None:
        """Stop, and drop the calls that are due."""
        self._removed = True
        undo(self._patches)

    def call_after_compiled_code(self, call: Callable[[], None]) -> None:
        """Call ``call()`` now, or inside a compiled function, once the outermost one has ended."""
        self._compiled = self._compiled or compiler.graphs_compiled()
        end = compiler.compiled_call_end() if self._compiled else None
        if end is None or not compiler.in_compiled_call(sys._getframe(1)):  # 3 us for 20 frames
            call()
            return
        self._thread.due += (call,)
        if not self._patches and not self._removed:
            apply([Patch(*end, self._make_set_eval_frame)], self._patches)

    def _make_set_eval_frame(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        call_due = without_compiler(self._call_due)  # torch 2.6 still compiles the functions that are called here

        def set_eval_frame(callback: Any) -> Any:
            try:
                if self._thread.due and not compiler.in_compiled_call(sys._getframe(1).f_back):
                    call_due()
            except BaseException:
                original(callback)
                raise
            return original(callback)

        return set_eval_frame

    @guard.contained(COMPILED_FEATURE)
    def _call_due(self) -> None:
        due, self._thread.due = self._thread.due, ()
        for call in due:
            if not self._removed:
                call()
