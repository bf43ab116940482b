"""What torch calls around a module's forward: its hooks, and what stands before a compiled call.

Hooks pickle as a function of the standard library that does nothing: what was saved while they were there loads
where this library is not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from .. import compat
from ..guard import guard
from ..patch import transparent
from ..regions import dispatch
from ..regions.region import Region
from .backward import follow
from .module_calls import Call, Layer, Stack, here, next_number
from .stand_in import StandIn, called_module
from .tensors import tensors

FEATURE = "the region of a module"


class Hook:
    """A hook on one module, which knows the first of the module's layers."""

    __slots__ = ("layer", "module")

    def __init__(self, layer: Layer, module: Callable[[], Any]) -> None:
        self.layer = layer
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def leave(self, module: Any) -> None:
        """Go from a module that others moved this hook to, as quantization does; a replica keeps it."""
        if getattr(module, "_is_replica", False):
            return
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]
                for flags in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs,
                              module._forward_hooks_always_called):  # fmt: skip
                    flags.pop(key, None)


class Before(Hook):
    """The forward pre-hook: opens the region, with the shapes of the inputs if they are asked for."""

    __slots__ = ("_shapes", "off")

    def __init__(self, layer: Layer, shapes: bool, module: Callable[[], Any]) -> None:
        super().__init__(layer, module)
        self._shapes = shapes
        self.off = False  # taken off: torch may have looked the hook up before that, on another thread

    def __call__(
        self, module: object, args: object, kwargs: object = None, frame: FrameType | None = None
    ) -> None:
        """Begin a call, whose caller is ``frame``."""
        try:
            if dispatch.tracing():
                return
            if self.module() is not module:
                self.leave(module)
                return
            if self.off:
                return
            stack = here.stack
            layer = self.layer
            frame = frame or sys._getframe(1).f_back
            around = None
            if stack:
                around = stack[-1]
                below = frame
                while below is not around.frame and below is not None:  # four steps as a rule, 0.2 us
                    below = below.f_back
                if below is None:
                    around = stack.shed()
                if layer.twins and around is not None and around.layer is not layer.parent:
                    layer = _twin(layer, stack)
            layer.seen = True
            if around is None and layer.alone is not None and not compat.in_backward():
                layer = layer.alone  # as where an agent calls its actor: not recomputed for a backward
            region = layer.evaluation if getattr(module, "training", True) is False else layer.region
            call = Call(layer, around, frame, next_number(), dispatch.NOTHING)
            stack.append(call)  # first: whoever takes hooks off must know of it
            if region is not None:
                if self._shapes:
                    region = _shaped(layer, region, (args, kwargs))
                emitter = dispatch.current
                try:
                    call.token = emitter.pop, emitter.push(region)
                except Exception as error:
                    call.token = dispatch.failed(emitter, error)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise


class After(Hook):
    """The forward hook, which is always called: closes the region, and arranges that of the backward."""

    __slots__ = ("then",)

    def __init__(self, layer: Layer, module: Callable[[], Any]) -> None:
        super().__init__(layer, module)
        self.then: Callable[[], None] | None = None  # what waits for the end of open calls

    def __call__(self, module: object, args: object, output: object, frame: FrameType | None = None) -> None:
        """End a call, if `Before` saw it begin: an earlier hook may have failed before that."""
        try:
            if dispatch.tracing():
                return
            if self.module() is not module:
                self.leave(module)
                return
            stack = here.stack
            # Without an output it may be a call that failed early, inside another one of the same module.
            if (output is not None and stack and stack[-1].layer.owner is self.layer) or _unwind(
                stack, self.layer, frame or sys._getframe(1)
            ):
                call = stack.pop()
                call.frame = None  # it refers to the arguments
                close, handle = call.token
                close(handle)
                if output is not None and call.layer.backward is not None and next_number() != call.first:
                    if type(output) is torch.Tensor and not torch._C._is_torch_function_mode_enabled():
                        follow(call, output)
                    else:  # nobody is told that we look at it
                        with torch._C.DisableTorchFunction():
                            follow(call, output)
        except Exception as error:
            try:
                guard.failed(FEATURE, error)
            except Exception as raised:
                if raised is error:
                    raise
        if self.then is not None:
            self.then()
        stack = here.stack
        if stack.then is not None and not stack:
            then, stack.then = stack.then, None
            then()


class Around(StandIn):
    """Stands for a module's call as a whole, where hooks would be inside compiled code or change its course."""

    __slots__ = ("_after", "_before", "_module")

    def __init__(
        self, layer: Layer, shapes: bool, compiled: Callable[..., Any] | None, module: Callable[[], Any]
    ) -> None:
        super().__init__(compiled)
        self._before = Before(layer, shapes, module)
        self._after = After(layer, module)
        self._module = module

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what it stands for."""
        call = self.compiled
        if call is None:
            call = called_module(sys._getframe(1), self._module())._call_impl
        if dispatch.tracing() or not dispatch.recording:
            return call(*args, **kwargs)
        frame, module = sys._getframe(), self._module()
        self._before(module, args, kwargs, frame)
        output = None
        try:
            output = call(*args, **kwargs)
            return output
        finally:
            self._after(module, args, output, frame)


def _shaped(layer: Layer, region: Region, inputs: object) -> Region:
    try:
        with torch._C.DisableTorchFunction():
            shapes = tuple(tuple(tensor.shape) for tensor in tensors(inputs) if not tensor.is_nested)
            if any(type(size) is not int for shape in shapes for size in shape):
                return region  # symbols of an export, which to look at would fix
            return layer.shaped(region, shapes) if shapes else region
    except Exception as error:
        try:
            guard.failed("the shapes of inputs", error)
        except Exception as raised:
            if raised is error:
                raise
        return region


def _twin(owner: Layer, stack: Stack) -> Layer:
    """Return the layer at the place that a call of a module with several places comes from."""
    for call in reversed(stack):
        for twin in owner.twins:
            if twin.parent is call.layer:
                return twin
    return owner


def _unwind(stack: Stack, owner: Layer, frame: FrameType) -> bool:
    """Make the call that returns to ``frame`` the innermost one; False if there is none."""
    frames = (frame, frame.f_back)  # a hook is called by `_call_impl`, or by a function inside it
    if not any(call.layer.owner is owner and call.frame in frames for call in stack):
        return False
    while stack[-1].layer.owner is not owner or stack[-1].frame not in frames:
        stack.close()
    return True
