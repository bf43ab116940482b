"""Hooks on one module, and their removal without a trace."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ..patch import Patch
from .hooks import After, Around, Before, Hook
from .layer import Layer
from .stack import busy

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class State:
    """The ``__getstate__`` of a module while it has our hooks: they are in no copy and no pickle of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> dict[str, Any]:
        """Return the module's state as it is without us."""
        state: dict[str, Any] = nn.Module.__getstate__(self._module())
        state = {name: value for name, value in state.items() if value is not self}
        ours: set[int] = set()
        for name in HOOKS:
            ours |= {key for key, hook in state[name].items() if isinstance(hook, Hook)}
        for name in (*HOOKS, *FLAGS):
            state[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def takes_hooks(module: nn.Module) -> bool:
    """Tell whether hooks can be put on ``module``, and kept out of its copies, which it makes in the usual way."""
    kind: Any = type(module)
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and not hasattr(kind, "__deepcopy__")
        and kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


class Fitting:
    """What is on one module: two hooks, or something that stands for its call.

    Args:
        module: the module.
        layer: the first of its layers.
        shapes: whether to show the shapes of the inputs.
        hooks: whether it may have hooks, as far as others are concerned.
    """

    def __init__(self, module: nn.Module, layer: Layer, shapes: bool, hooks: bool) -> None:
        self.layer = layer
        self._module = weakref.ref(module)
        self._patch: Patch | None = None
        self._handles: list[Any] = []
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or not hooks or not takes_hooks(module):
            self._patch = Patch(module, "_compiled_call_impl", lambda compiled: Around(layer, shapes, compiled))
            return
        self._after = After(layer)
        self._handles = [
            # First, so that what other hooks do before the forward, as the all-gather of FSDP, is inside.
            module.register_forward_pre_hook(Before(layer, shapes), prepend=True, with_kwargs=shapes),
            module.register_forward_hook(self._after, always_call=True),
        ]
        self._state = vars(module)["__getstate__"] = State(module)

    def remove(self, running: set[Layer]) -> None:
        """Take it away; the hooks of a layer that is ``running``, once that is over."""
        if self._patch is not None:
            self._patch.undo()
        elif self.layer in running:
            self._after.then = lambda: self.remove(busy())
        else:
            for handle in self._handles:
                handle.remove()
            module = self._module()
            if module is not None and vars(module).get("__getstate__") is self._state:
                del vars(module)["__getstate__"]
