"""What torch.compile and TorchScript made of modules: no hook of a module inside runs there."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .. import compat
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
