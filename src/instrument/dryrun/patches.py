"""The replacements outside torch.cuda for the time of a dry run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _device

from ..patch import Patch
from . import callbacks, fake_patches, storages
from .dispatch_mode import register_higher_order_operators
from .state import RunState
from .storages import Replacement

_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def patched(state: RunState) -> Iterator[None]:
    """Replace functions that must know the pretended devices; restore all at the end, even after an error."""
    with ExitStack() as stack:
        for owner, name, make in _changes(state):
            if hasattr(owner, name):
                Patch(owner, name, make).apply_in(stack)
        if state.fake is not None:
            # This logger writes 40 lines for each operator with unsupported arguments
            log = logging.getLogger("torch._subclasses.fake_tensor")
            stack.callback(log.removeFilter, _drop_record)
            log.addFilter(_drop_record)
        register_higher_order_operators(stack)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_reset_default_device, _device.CURRENT_DEVICE)
        yield


def _changes(state: RunState) -> Iterator[Replacement]:
    yield from _python_bodies()
    yield from storages.changes(state)
    yield from callbacks.changes(state)
    if state.fake is not None:
        yield from fake_patches.changes(state.fake, state)


def _drop_record(record: logging.LogRecord) -> bool:
    return False


def _reset_default_device(before: Any) -> None:
    if before != _device.CURRENT_DEVICE:
        torch.set_default_device(before)
    context = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(context, "device_context", context) is None:  # with which `get_default_device` fails in torch 2.6
        del context.device_context


def _python_bodies() -> Iterator[Replacement]:
    """Run those of torch's functions that are written in Python as if they were user code.

    Otherwise a function mode sees each as one call, and nothing inside it, such as user code in backward hooks.
    """
    for owner in (torch.nn.functional, torch.nn.init, torch.autograd, torch._lowrank, torch._lobpcg):
        for name in _OVERRIDE_CHECKS:
            yield owner, name, lambda original: _is_overridden


def _is_overridden(*args: Any) -> bool:
    """Return whether a tensor subclass overrides the function; modes do not count."""
    values = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    kinds = {type(value) for value in values if hasattr(type(value), "__torch_function__")}
    functions = [kind.__torch_function__ for kind in kinds]
    return any(getattr(function, "__func__", function) not in _DEFAULT_FUNCTIONS for function in functions)


_KIND: Any = torch.Tensor
_DEFAULT_FUNCTIONS = (_KIND.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def _scripted_as_builtin(function: Any) -> None:
    """Make TorchScript accept ``function`` as the builtins that it replaces."""
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if register is not None:
        register(function, "aten::has_torch_function")


_scripted_as_builtin(_is_overridden)
