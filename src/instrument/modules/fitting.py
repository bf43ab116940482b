"""Hooks on one module, and their removal without a trace."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from typing import Any

from torch import nn

from ..patch import Patch
from .hooks import After, Around, Before, Hook
from .layer import Layer
from .stack import stacks

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class State:
    """The ``__getstate__`` of a module while it has our hooks: they are in no copy and no pickle of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        """Return the module's state as it is without us."""
        module: Any = self._module()
        state = type(module).__getstate__(module)
        return without_hooks(state) if isinstance(state, dict) else state

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a module's ``__dict__`` without our hooks."""
    state = {name: value for name, value in state.items() if not isinstance(value, State)}
    ours: set[int] = set()
    for name in HOOKS:
        hooks = state.get(name, {})
        ours |= {key for key, hook in hooks.items() if isinstance(hook, Hook)}
        state[name] = OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours)
    for name in FLAGS:
        if name in state:
            state[name] = OrderedDict((key, flag) for key, flag in state[name].items() if key not in ours)
    return state


class Fitting:
    """What is on one module: two hooks, or something before its compiled call."""

    def __init__(self, module: nn.Module, layer: Layer, shapes: bool) -> None:
        self.layer = layer
        self.module_id = id(module)
        self._module = weakref.ref(module)
        self._patch: Patch | None = None
        self._handles: list[Any] = []
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._patch = Patch(module, "_compiled_call_impl", lambda compiled: Around(layer, compiled))
            return
        self._after = After(layer)
        self._handles = [
            # First, so that what other hooks do before the forward, as the all-gather of FSDP, is inside.
            module.register_forward_pre_hook(Before(layer, shapes), prepend=True, with_kwargs=shapes),
            module.register_forward_hook(self._after, always_call=True),
        ]
        self._state = State(module)
        kind: Any = type(module)
        own = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        if own and not hasattr(kind, "__deepcopy__"):
            vars(module)["__getstate__"] = self._state

    def remove(self) -> None:
        """Take it away, the hooks of a call that is open once that is over."""
        if self._patch is not None:
            self._patch.undo()
        elif any(call.layer.owner is self.layer for stack in list(stacks) for call in list(stack)):
            self._after.then = self.remove
        else:
            for handle in self._handles:
                handle.remove()
            module = self._module()
            if module is not None and vars(module).get("__getstate__") is self._state:
                del vars(module)["__getstate__"]
