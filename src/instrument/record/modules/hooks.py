"""The hooks around a module's forward, and the wrapper that replaces them for compiled modules.

A hook pickles as a function of the standard library that does nothing, so that a model saved with hooks loads
without this library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ...base.compat import autograd, operators
from ...base.guard import guard
from ...base.patch import transparent
from ..regions import dispatch
from ..regions.region import Region
from .backward import hook_backward, tensors
from .compiling import StandIn, called_module
from .module_calls import CallStack, Layer, ModuleCall, next_number, thread_state

FEATURE = "the region of a module"
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_torch_function_mode_active, _without_torch_function = operators.torch_function_controls()


class Hook:
    """A hook on one module; it knows the primary layer of that module."""

    __slots__ = ("layer", "module")

    def __init__(self, layer: Layer, module: Callable[[], Any]) -> None:
        self.layer = layer
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def leave(self, module: Any) -> None:
        """Remove this hook from a module that it was copied to, as quantization does; a replica keeps it."""
        if getattr(module, "_is_replica", False):
            return
        for hooks in (getattr(module, name) for name in HOOKS):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                for flags in FLAGS:
                    getattr(module, flags).pop(key, None)


class ForwardPreHook(Hook):
    """Opens the region of a forward, with the shapes of the inputs if requested."""

    __slots__ = ("_shapes", "disabled")

    def __init__(self, layer: Layer, shapes: bool, module: Callable[[], Any]) -> None:
        super().__init__(layer, module)
        self._shapes = shapes
        self.disabled = False  # another thread may have looked the hook up before it was removed

    def __call__(
        self, module: object, args: object, kwargs: object = None, frame: FrameType | None = None
    ) -> None:
        """Begin a call from ``frame``."""
        try:
            if dispatch.tracing():
                return
            if self.module() is not module:
                self.leave(module)
                return
            if self.disabled:
                return
            stack = thread_state.stack
            layer = self.layer
            frame = frame or sys._getframe(1).f_back
            outer_call = None
            if stack:
                outer_call = stack[-1]
                below = frame
                while below is not outer_call.frame and below is not None:  # usually four steps, 0.2 us
                    below = below.f_back
                if below is None:
                    outer_call = stack.drop_ended()
                if layer.aliases and outer_call is not None and outer_call.layer is not layer.parent:
                    layer = _alias(layer, stack)
            layer.was_called = True
            if outer_call is None and layer.standalone is not None and not autograd.in_backward():
                layer = layer.standalone  # a call outside any other, and not a recomputation
            region = layer.evaluation if getattr(module, "training", True) is False else layer.region
            call = ModuleCall(layer, outer_call, frame, next_number(), dispatch.NO_TOKEN)
            stack.append(call)  # before the region opens, so that the removal of hooks sees this call
            if region is not None:
                if self._shapes:
                    region = _region_with_shapes(layer, region, (args, kwargs))
                emitter = dispatch.current
                try:
                    call.token = emitter.pop, emitter.push(region)
                except Exception as error:
                    call.token = dispatch.drop_failed(emitter, error)
        except Exception as error:
            guard.failed(FEATURE, error)


class ForwardHook(Hook):
    """Closes the region of a forward, also after an error, and registers for its backward."""

    __slots__ = ("after_call",)

    def __init__(self, layer: Layer, module: Callable[[], Any]) -> None:
        super().__init__(layer, module)
        self.after_call: Callable[[], None] | None = None  # called after a call, to remove the hooks

    def __call__(self, module: object, args: object, output: object, frame: FrameType | None = None) -> None:
        """End a call if its pre-hook ran, which it does not if an earlier hook fails."""
        try:
            if dispatch.tracing():
                return
            if self.module() is not module:
                self.leave(module)
                return
            stack = thread_state.stack
            # Without an output, this may be a call that failed early inside another call of the same module.
            if (output is not None and stack and stack[-1].layer.primary is self.layer) or _unwind(
                stack, self.layer, frame or sys._getframe(1)
            ):
                call = stack.pop()
                call.frame = None  # the frame refers to the arguments
                close, handle = call.token
                close(handle)
                if output is not None and call.layer.backward is not None and next_number() != call.first:
                    if type(output) is torch.Tensor and not _torch_function_mode_active():
                        hook_backward(call, output)
                    else:  # hides the access from `__torch_function__`
                        with _without_torch_function():
                            hook_backward(call, output)
        except Exception as error:
            guard.failed(FEATURE, error)
        if self.after_call is not None:
            self.after_call()
        stack = thread_state.stack
        if stack.on_idle is not None and not stack:
            on_idle, stack.on_idle = stack.on_idle, None
            on_idle()


class CallWrapper(StandIn):
    """Wraps the whole call of a module if hooks would run in compiled code or change the code that it runs."""

    __slots__ = ("_after", "_before", "_module")

    def __init__(
        self, layer: Layer, shapes: bool, compiled: Callable[..., Any] | None, module: Callable[[], Any]
    ) -> None:
        super().__init__(compiled)
        self._before = ForwardPreHook(layer, shapes, module)
        self._after = ForwardHook(layer, module)
        self._module = module

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module between the two hooks."""
        call = self.compiled
        if call is None:
            call = called_module(sys._getframe(1), self._module())._call_impl
        if dispatch.tracing() or not dispatch.recording:
            return call(*args, **kwargs)
        module = self._module()  # and no variable for the frame, which would keep itself and the tensors
        self._before(module, args, kwargs, sys._getframe())
        output = None
        try:
            output = call(*args, **kwargs)
            return output
        finally:
            self._after(module, args, output, sys._getframe())


def _region_with_shapes(layer: Layer, region: Region, inputs: object) -> Region:
    with guard.contained("the shapes of inputs"), _without_torch_function():
        shapes = tuple(tuple(tensor.shape) for tensor in tensors(inputs) if not tensor.is_nested)
        # Not symbolic sizes of an export: reading them would specialize them
        if shapes and all(type(size) is int for shape in shapes for size in shape):
            return layer.region_with_shapes(region, shapes)
    return region


def _alias(primary: Layer, stack: CallStack) -> Layer:
    """Return the layer that this call belongs to, for a module with several places."""
    for call in reversed(stack):
        for alias in primary.aliases:
            if alias.parent is call.layer:
                return alias
    return primary


def _unwind(stack: CallStack, primary: Layer, frame: FrameType) -> bool:
    """Close the calls inside the one that returns to ``frame``; return whether there is such a call."""
    frames = (frame, frame.f_back)  # a hook is called by `_call_impl`, or by a function inside it
    if not any(call.layer.primary is primary and call.frame in frames for call in stack):
        return False
    while stack[-1].layer.primary is not primary or stack[-1].frame not in frames:
        stack.close()
    return True
