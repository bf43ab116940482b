"""Compiled modules, calls replaced without a hook, and what does not happen while torch compiles or captures.

A replaced call is in the attribute that `module.compile()` sets and torch reads. Some callers refuse a module with
hooks, others run it differently; neither notices a replaced call.

torch.compile would compile functions of this library between two graphs. Those that inspect frames must run
uncompiled, and compiling the others would cost seconds. A function that is inlined into a graph works as before.

torch opens a range around compiled code, in C++: if a recording stops inside it and another one starts there,
torch crashes. So the end of a step is reported once the compiled function has ended.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ...base.compat import compiler
from ...base.compat.compiler import COMPILED_CALL
from ...base.guard import guard
from ...base.patch import TRANSPARENT, Patch, apply, leave_no_frame, renamed, undo


class ReplacedCall:
    """Replaces a module's call, or ``compiled``; copies and pickles of the module leave it out.

    It is not bound to the module, as replicas of the module share it: the called module is found in the frames of
    the callers. The first frames may belong to other wrappers of the call.
    """

    __slots__ = ("compiled",)

    def __init__(self, compiled: Callable[..., Any] | None) -> None:
        self.compiled = compiled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def called_module(caller: FrameType | None, expected: Any) -> Any:
    """Return the module that torch calls in ``caller`` or, past wrappers of this package, in a caller of that.

    If something else called the replacement, return ``expected``, the module that it was put on; or, inside the
    call of a replica that shares the replacement, that replica.
    """
    while caller is not None and caller.f_code.co_filename == TRANSPARENT:
        caller = caller.f_back
    if caller is not None and caller.f_code.co_name == "_wrapped_call_impl":
        return caller.f_locals.get("self", expected)
    while caller is not None and caller.f_code.co_name != "_wrapped_call_impl":
        caller = caller.f_back
    around = caller.f_locals.get("self") if caller is not None else None
    call = _own_call(expected)
    return around if call is not None and _own_call(around) is call else expected


def _own_call(module: Any) -> Any:
    return getattr(module, "__dict__", {}).get(COMPILED_CALL)


def compiled_call(module: Any) -> Any:
    """Return the compiled call that `module.compile()` made, or None."""
    call = vars(module).get(COMPILED_CALL)
    while isinstance(call, ReplacedCall):
        call = call.compiled
    return call


# Modules that were called through what `torch.compile(module)` returned, by their id.
called_through_compiled: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def bypasses_inner_hooks(module: nn.Module) -> bool:
    """Return whether a call of ``module`` runs code that does not call the hooks of the modules inside."""
    compiled = compiler.compiled_module()
    return (
        compiled_call(module) is not None
        or (compiled is not None and isinstance(module, compiled))
        or isinstance(module, torch.jit.ScriptModule)
        or called_through_compiled.get(id(module)) is module
    )


def compiled_from(module: nn.Module) -> nn.Module:
    """Return the module that was given to ``torch.compile``, or ``module`` itself if it is not compiled."""
    compiled = compiler.compiled_module()
    return module._orig_mod if compiled is not None and isinstance(module, compiled) else module


SUSPENDING = "suspending module hooks"
Suspend = Callable[[], AbstractContextManager[None]]


class HookSuspension:
    """Suspends module hooks while given functions run.

    Args:
        functions: returns the functions as pairs of owner and attribute name.
    """

    def __init__(self, functions: Callable[[], list[tuple[Any, str]]]) -> None:
        self._functions = functions
        self._suspends: list[Suspend] = []
        self._patches: list[Patch] = []

    def set_suspended(self, suspend: Suspend, on: bool) -> None:
        """Enter ``suspend()`` around each call of the functions if ``on``; else stop doing so."""
        if suspend in self._suspends:
            self._suspends.remove(suspend)
        if on:
            self._suspends.append(suspend)
        undo(self._patches)
        if self._suspends:
            apply((Patch(owner, name, self._around) for owner, name in self._functions()), self._patches)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            cleared = self._clear()
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                self._restore(cleared)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            cleared = self._clear()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._restore(cleared)

        return install_callbacks if original.__name__ == "install_callbacks" else call

    @guard.contained(SUSPENDING)
    def _clear(self) -> contextlib.ExitStack | None:
        with contextlib.ExitStack() as stack:
            for suspend in list(self._suspends):
                stack.enter_context(suspend())
            return stack.pop_all()

    @guard.contained(SUSPENDING)
    def _restore(self, cleared: contextlib.ExitStack | None) -> None:
        if cleared is not None:
            cleared.close()


compiling = HookSuspension(compiler.compilers)
"""Dynamo guards on the hooks that it sees: one present only in a window would cause a recompilation after it."""

scripting = HookSuspension(compiler.scripters)
"""TorchScript compiles hooks into its result, and fails on other attributes."""

graphing = HookSuspension(compiler.graph_makers)
"""`make_graphed_callables` refuses modules with hooks."""


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
