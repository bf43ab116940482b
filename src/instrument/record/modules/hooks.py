"""The hooks around a module's forward, the wrapper that replaces them for compiled modules, its backward region.

A hook pickles as a function of the standard library that does nothing, so that a model saved with hooks loads
without this library.

The backward region goes from the first of its call's autograd nodes, found by its tensors, to the last. Each
thread numbers the nodes of its forward as it makes them, and backward runs them in reverse order. The nodes of a
call are therefore contiguous in backward, with the nodes of calls inside it nested among them. The region opens
before the node of an output, which runs first, and closes after the node that was made first, which usually has
the first number of the call; otherwise it is found by walking from the outputs. Where that node does not run, as
in ``torch.autograd.grad`` for some inputs, the region ends with the next node of an earlier call, or with the
pass.

The nodes that activation checkpointing recomputes on the device's thread lead into the graph of the forward, which
another thread numbered. A walk stays below the number that its own thread has reached, so it does not go there.

Hooks on nodes go away with the graph. They change no gradient and, unlike full backward hooks, add no node to the
graph, which would make in-place activations fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from types import FrameType
from typing import Any

import torch

from ...base.compat import autograd, operators
from ...base.guard import guard
from ...base.patch import transparent
from ..regions import dispatch
from ..regions.region import Region
from .compiling import ReplacedCall, called_module
from .module_calls import BackwardPass, CallStack, Layer, ModuleCall, current_pass, next_number, thread_state

MAX_TENSOR_VALUES = 1000  # values to inspect: outputs may be graphs of objects or lists of millions


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, dictionaries and dataclasses, nested or not, in their order."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < MAX_TENSOR_VALUES:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        if id(item) not in seen:
            seen.add(id(item))
            pending += reversed(_children(item))


def _children(value: object) -> list[object]:
    # Calls no method of the value: a method may compute.
    if isinstance(value, dict):
        return list(dict.values(value))[:MAX_TENSOR_VALUES]
    if isinstance(value, UserDict):
        return _children(vars(value).get("data"))
    if isinstance(value, tuple):
        return list(tuple.__getitem__(value, slice(MAX_TENSOR_VALUES)))
    if isinstance(value, list):
        return list.__getitem__(value, slice(MAX_TENSOR_VALUES))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_field_value(value, field.name) for field in dataclasses.fields(value)]
    return []


def _field_value(value: object, name: str) -> object:
    try:
        return object.__getattribute__(value, name)  # bypasses `__getattr__`, and finds attributes in slots
    except AttributeError:
        return None


before_node = autograd.before_node()
MAX_WALK_NODES = 1000  # maximum number of nodes to inspect for one call
FIRST_LEAF_NUMBER = 1 << 63  # nodes that accumulate the gradient of a leaf are numbered from here on


def hook_backward(call: ModuleCall, output: object) -> None:
    """Register hooks for the backward region of ``call``, whose forward made autograd nodes."""
    first, outer_call = call.first, call.outer_call
    if isinstance(output, torch.Tensor) and output._base is None:
        node = output.grad_fn
        number = -1 if node is None else node._sequence_nr()
        end = next_number()
        nodes = [(number, node)] if first <= number < end else []
    else:
        sources = _sources(tensors(output))
        end = next_number()  # only now: a view that was changed in place makes its node on access
        nodes = [item for item in sources if first <= item[0] < end]
    if not nodes:
        return
    for number, node in nodes:
        if call.inner_starts is None or number not in call.inner_starts:  # otherwise a call inside begins there
            before_node(node, call)
        if outer_call is None:
            continue
        outer_call.last_inner_start = number
        if outer_call.inner_starts is None:
            outer_call.inner_starts = {number}
        else:
            outer_call.inner_starts.add(number)
    last = None
    if call.first_inner_node != first and not call.adjoins_other_call:
        last, leads_on = _first_made_node(call.exits, first, end)
        if last is None or last._sequence_nr() != first:
            last, leads_on = _first_made_node([node for _, node in nodes], first, end)
        last.register_hook(CloseRegionHook(call, () if leads_on else _leaves(last)))
    if outer_call is not None and outer_call.first_inner_node < 0:
        outer_call.first_inner_node = first
        outer_call.exits = call.exits if last is None else [node for node, _ in last.next_functions]
    call.exits = ()


def _sources(outputs: Iterable[torch.Tensor]) -> list[tuple[int, Any]]:
    """Return the nodes that ``outputs`` come from, with their numbers, in that order."""
    nodes: dict[int, Any] = {}
    for tensor in outputs:
        node, base = tensor.grad_fn, tensor._base
        if node is not None:
            nodes[node._sequence_nr()] = node
        if base is not None and base.grad_fn is not None:
            # A change of a view in place, as by an activation, makes another node for it: the first one never
            # runs, but the node of the base does.
            nodes[base.grad_fn._sequence_nr()] = base.grad_fn
    return sorted(nodes.items(), key=itemgetter(0))


def _first_made_node(nodes: Sequence[Any], first: int, end: int) -> tuple[Any, bool]:
    """Return the node made first in a call, among those behind ``nodes``, and whether any leads out of it.

    The nodes of the call are numbered from ``first`` to before ``end``.
    """
    made_first, lowest, leads_on, pending = None, FIRST_LEAF_NUMBER, False, list(nodes)
    seen: set[int] = set()
    while pending and len(seen) < MAX_WALK_NODES:
        node = pending.pop()
        number = node._sequence_nr() if node is not None else FIRST_LEAF_NUMBER
        if first <= number < end:
            if number not in seen:
                seen.add(number)
                if number < lowest:
                    made_first, lowest = node, number
                pending += [following for following, _ in node.next_functions]
        elif number < FIRST_LEAF_NUMBER:
            leads_on = True
    return made_first, leads_on


def _leaves(node: Any) -> list[Any]:
    """Return the nodes directly behind ``node`` that accumulate the gradients of leaves."""
    following = [node for node, _ in node.next_functions if node is not None]
    return [node for node in following if node._sequence_nr() >= FIRST_LEAF_NUMBER]


class CloseRegionHook:
    """The hook after the first node of ``call``: closes the region, or registers for after ``leaves``."""

    __slots__ = ("call", "leaves")

    def __init__(self, call: ModuleCall, leaves: Sequence[Any]) -> None:
        self.call = call
        self.leaves = leaves

    def __call__(self, *gradients: object) -> None:
        """Close the region."""
        try:
            if dispatch.tracing():
                return
            running = current_pass()
            if running is not None and running is self.call.running:
                if self.leaves:
                    CloseAfterLeavesHook(self.call, self.leaves, running)
                else:
                    running.end(self.call)
        except Exception as error:
            guard.failed("closing a backward region", error)


class CloseAfterLeavesHook:
    """Closes the region of ``call`` after the nodes that accumulate the gradients of leaves, which run next.

    Such nodes may outlive the graph, so that their hooks are there for one pass only.
    """

    def __init__(self, call: ModuleCall, leaves: Sequence[Any], running: BackwardPass) -> None:
        self._call = call
        self._running = running
        self._missing = len(leaves)
        self._hooks = [leaf.register_hook(self) for leaf in leaves]
        running.hooks += self._hooks

    @guard.contained("closing a backward region")
    def __call__(self, *gradients: object) -> None:
        """Note that one of the leaves ran."""
        self._missing -= 1
        if not self._missing and self._running is self._call.running:
            self._running.end(self._call)


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


class CallWrapper(ReplacedCall):
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
