"""Compiled modules, and the suspension of module hooks while torch compiles, scripts or captures."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..compat import compiler
from ..guard import guard
from ..patch import Patch, apply, leave_no_frame, undo
from .stand_in import compiled_call

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


FEATURE = "suspending module hooks"
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

    @guard.contained(FEATURE)
    def _clear(self) -> contextlib.ExitStack | None:
        with contextlib.ExitStack() as stack:
            for suspend in list(self._suspends):
                stack.enter_context(suspend())
            return stack.pop_all()

    @guard.contained(FEATURE)
    def _restore(self, cleared: contextlib.ExitStack | None) -> None:
        if cleared is not None:
            cleared.close()


compiling = HookSuspension(compiler.compilers)
"""Dynamo guards on the hooks that it sees: one present only in a window would cause a recompilation after it."""

scripting = HookSuspension(compiler.scripters)
"""TorchScript compiles hooks into its result, and fails on other attributes."""

graphing = HookSuspension(compiler.graph_makers)
"""`make_graphed_callables` refuses modules with hooks."""
