"""Compiled modules, and the suspension of hooks while torch.compile or TorchScript inspects a module."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .. import compat
from ..guard import guard
from ..patch import Patch, apply, leave_no_frame, undo
from .stand_in import compiled_call

# Modules that were called through what `torch.compile(module)` returned, by their id.
wrapped: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def opaque(module: nn.Module) -> bool:
    """Tell whether a call of ``module`` runs code in which the hooks of modules inside are not called."""
    compiled = compat.compiled_module()
    return (
        compiled_call(module) is not None
        or (compiled is not None and isinstance(module, compiled))
        or isinstance(module, torch.jit.ScriptModule)
        or wrapped.get(id(module)) is module
    )


def compiled_from(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or ``module`` if it did not come from there."""
    compiled = compat.compiled_module()
    return module._orig_mod if compiled is not None and isinstance(module, compiled) else module


FEATURE = "making way for the compiler"
Suspend = Callable[[], AbstractContextManager[None]]


class HookSuspension:
    """Suspends module hooks while given functions run.

    Args:
        functions: returns those, as owners and names of attributes.
    """

    def __init__(self, functions: Callable[[], list[tuple[Any, str]]]) -> None:
        self._functions = functions
        self._away: list[Suspend] = []
        self._patches: list[Patch] = []

    def set_suspended(self, suspend: Suspend, on: bool) -> None:
        """Enter ``suspend()`` around each of their calls from now on, or no more."""
        if suspend in self._away:
            self._away.remove(suspend)
        if on:
            self._away.append(suspend)
        undo(self._patches)
        if self._away:
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
            for away in list(self._away):
                stack.enter_context(away())
            return stack.pop_all()

    @guard.contained(FEATURE)
    def _restore(self, cleared: contextlib.ExitStack | None) -> None:
        if cleared is not None:
            cleared.close()


compiling = HookSuspension(compat.compilers)
"""Dynamo guards on the hooks that it sees: one present only in a window would cause a recompilation after it."""

scripting = HookSuspension(compat.scripters)
"""TorchScript compiles hooks into its result, and fails on other attributes."""

graphing = HookSuspension(compat.graph_makers)
"""`make_graphed_callables` refuses modules with hooks."""
