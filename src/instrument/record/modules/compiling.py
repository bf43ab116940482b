"""Compiled modules, calls replaced without a hook, and what does not happen while torch compiles or captures.

A replaced call is in the attribute that `module.compile()` sets and torch reads. Some callers refuse a module with
hooks, others run it differently; neither notices a replaced call.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...base.compat import compiler
from ...base.compat.compiler import COMPILED_CALL
from ...base.guard import guard
from ...base.patch import TRANSPARENT, Patch, apply, leave_no_frame, undo


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
