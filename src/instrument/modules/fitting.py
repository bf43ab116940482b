"""Hooks on one module, and their removal without a trace."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..compat import COMPILED_CALL
from ..guard import guard
from ..patch import Patch
from .hooks import After, Around, Before, Hook
from .layer import Layer
from .stack import busy
from .stand_in import StandIn, compiled_call

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def copied(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for ``original``, a class's ``__getstate__``, and leaves out what is on its modules."""

    @functools.wraps(original)
    def getstate(module: nn.Module) -> Any:
        state = original(module)
        try:
            return without_hooks(state)
        except Exception as error:
            try:
                guard.failed("leaving hooks out of a copy", error)
            except Exception as raised:
                if raised is error:
                    raise
        return state

    return getstate


def copier(module: nn.Module) -> type:
    """Return the class whose ``__getstate__`` copies ``module``: torch's own, or that of a recurrent module."""
    return next((kind for kind in type(module).__mro__ if "__getstate__" in vars(kind)), nn.Module)


def without_hooks(state: Any) -> Any:
    """Return the state of a module, as copies and pickles have it, without our hooks."""
    if isinstance(state, dict) and isinstance(state.get(COMPILED_CALL), StandIn):
        state = {name: value for name, value in state.items() if name != COMPILED_CALL}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in HOOKS):
        return state
    ours = {key for name in HOOKS for key, hook in state[name].items() if isinstance(hook, Hook)}
    if ours:
        state = dict(state)  # it may be the module's own dictionary
        for name in (*HOOKS, *FLAGS):
            state[name] = OrderedDict((key, value) for key, value in state[name].items() if key not in ours)
    return state


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
    """What is to be on one module: two hooks, or something that stands for its call.

    Args:
        module: the module.
        layer: the first of its layers.
        shapes: whether to show the shapes of the inputs.
        hooks: whether it may have hooks, as far as others are concerned.
    """

    def __init__(self, module: nn.Module, layer: Layer, shapes: bool, hooks: bool) -> None:
        self.layer = layer
        self._shapes = shapes
        self._hooks = hooks
        self._module = weakref.ref(module)
        self._patch: Patch | None = None
        self._handles: list[Any] = []
        self._before: Before | None = None
        self._after: After | None = None

    def put_on(self) -> None:
        """Put it on the module."""
        module = self._module()
        if module is None:
            return
        compiled = compiled_call(module) is not None
        if compiled or not self._hooks or not takes_hooks(module):
            layer, shapes, held = self.layer, self._shapes, self._module
            self._patch = Patch(module, COMPILED_CALL, lambda call: Around(layer, shapes, call, held))
            self._patch.apply()
            return
        before = self._before = Before(self.layer, self._shapes, self._module)
        self._after = After(self.layer, self._module)
        # Torch's own methods, whatever a class made of them. Ours comes first, so that what other hooks do before
        # the forward, as the all-gather of FSDP, is inside.
        register = nn.Module.register_forward_pre_hook
        self._handles.append(register(module, before, prepend=True, with_kwargs=self._shapes))
        self._handles.append(nn.Module.register_forward_hook(module, self._after, always_call=True))

    @property
    def copier(self) -> type | None:
        """The class whose ``__getstate__`` has to be patched by `copied`, where that is not torch's own."""
        module = self._module()
        return copier(module) if self._patch is not None and module is not None else None

    def begin_no_more(self) -> None:
        """Let no call begin from now on; those that run know of each other by then."""
        if self._before is not None:
            self._before.off = True

    def take_off(self, running: set[Layer]) -> bool:
        """Take it away; False while a call of the layer is ``running``, after which it goes by itself."""
        if self._patch is not None:
            self._patch.undo()
        elif self._after is not None and self.layer in running:
            self._after.then = self._later
            return False
        for handle in self._handles:
            handle.remove()
        return True

    @guard.contained("taking hooks off")
    def _later(self) -> None:
        self.take_off(busy())
