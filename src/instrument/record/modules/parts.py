"""`annotate_step`: the parts of a training step outside the model, and the patches that make each a region.

Also patches of `torch.autograd.backward`, which `torch.Tensor.backward` calls as well, and `torch.autograd.grad`.

At every call of compiled code, Dynamo checks that the functions which it traced are unchanged. No function that
may be traced is therefore replaced: the patches are on context managers and methods that Dynamo handles specially.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ...base.compat import autograd, gpu, operators, training
from ...base.guard import guard
from ...base.interrupts import Suppressed
from ...base.patch import Patch, apply, leave_no_frame, undo
from ..regions import dispatch, region
from ..regions.region import Region
from .labels import Instances, loaders, optimizers
from .service import Handle, PatchService, contain_request
from .uncompiled import skip_package

PASSES = "following backward passes"
_CREATE_GRAPH = 4  # the place of ``create_graph`` in the arguments of `torch.autograd.grad`
T = TypeVar("T")


class _ThreadState(threading.local):
    """Per thread: the number of running wrappers, and the callbacks after the outermost one."""

    depth = 0
    callbacks: tuple[Callable[[], None], ...] = ()


_thread_state = _ThreadState()


def _nothing(*_: Any) -> None:
    pass


def wrap_backward(
    begin: Callable[[], T | None], end: Callable[[T], None] = _nothing, then: Callable[[], None] | None = None
) -> Patch:
    """Return a patch that calls functions around `torch.autograd.backward`, unless torch.compile traces it.

    Args:
        begin: called before; its errors are contained.
        end: called with what ``begin`` returned, unless that is None, after any call; must not raise.
        then: called after a successful call outside any backward pass, once no other wrapper of these functions
            runs on the thread; its errors are contained.
    """
    return _wrap("backward", begin, end, then)


def wrap_grad(begin: Callable[[], None], then: Callable[[], None]) -> Patch:
    """Return a patch that calls functions around `torch.autograd.grad` as `wrap_backward` does.

    ``then`` is not called where a graph of the gradients is created, as another pass goes through that.
    """
    return _wrap("grad", begin, _nothing, then)


def _wrap(
    name: str,
    begin: Callable[[], T | None],
    end: Callable[[T], None],
    then: Callable[[], None] | None,
) -> Patch:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            begun, outermost = None, False
            try:
                if not dispatch.tracing():
                    outermost = not autograd.in_backward()
                    begun = begin()
            except Exception as error:
                guard.failed(PASSES, error)
            _thread_state.depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                _thread_state.callbacks = ()
                raise
            finally:
                _thread_state.depth -= 1
                if begun is not None:
                    end(begun)
            if outermost:
                _end_call(then, name == "grad", args, kwargs)
            return result

        return backward

    return Patch(torch.autograd, name, make)


@guard.contained(PASSES)
def _end_call(
    then: Callable[[], None] | None, is_grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add ``then`` to the callbacks if the call ended a pass; after the outermost wrapper, call all of them."""
    try:
        creates_graph = is_grad and (kwargs.get("create_graph") or any(args[_CREATE_GRAPH : _CREATE_GRAPH + 1]))
        if then is not None and not creates_graph:
            _thread_state.callbacks = (*_thread_state.callbacks, then)
    finally:
        if not _thread_state.depth:
            calls, _thread_state.callbacks = _thread_state.callbacks, ()
            for call in calls:
                call()


FEATURE = "the regions of a step"
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
DATA = "enumerate(DataLoader)#"
_, _without_torch_function = operators.torch_function_controls()
_NUMBERS = itertools.count()
Begin = Callable[[Any], dispatch.Token | None]


class Switch:
    """Switches off the patches of one recording: other code may keep references to them."""

    def __init__(self) -> None:
        self.on = True


def contexts(kind: type, begin: Begin, switch: Switch) -> Iterator[Patch]:
    """Yield patches by which ``begin`` opens a region around each block with a context manager of class ``kind``.

    A with statement looks both methods up before it calls one, so an open region is closed even if the patches are
    undone in between.
    """
    token_key = f"_instrument_{next(_NUMBERS)}"  # other code may have patched the same class

    def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # TorchScript compiles the source of the wrapped function
        def leave(context: Any, *exception: Any) -> Any:
            token = None
            try:
                token = vars(context).pop(token_key, None)
            except Exception as error:
                guard.failed(FEATURE, error)
            try:
                return original(context, *exception)
            finally:
                if token is not None:
                    dispatch.leave(token)

        return leave

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(context: Any) -> Any:
            token = None
            try:
                token = None if dispatch.tracing() or not switch.on else begin(context)
                if token is not None:
                    vars(context)[token_key] = token
            except Exception as error:
                opened, token = token, None
                if opened is not None:
                    dispatch.leave(opened)
                guard.failed(FEATURE, error)
            if token is None:
                return original(context)
            try:
                return original(context)
            except BaseException as error:
                leave_no_frame(error)
                vars(context).pop(token_key, None)
                dispatch.leave(token)
                raise

        return enter

    yield Patch(kind, "__exit__", leaving)
    yield Patch(kind, "__enter__", entering)


def _range(part: str, name: str, instances: Instances, switch: Switch) -> Iterator[Patch]:
    """Show the ranges of optimizers or data loaders under names that differ for each, also in torch's own ranges.

    torch's ranges appear however the method is reached, as through a method that a learning rate scheduler bound
    to an optimizer, which no patch of the class would cover. Unlike a pair of hooks, they are closed on
    exceptions.
    """
    if dispatch.detailed:
        with guard.contained(f"telling {name} apart"):
            instances.find_existing()
    return contexts(torch.autograd.profiler.record_function, RANGES[part], switch)


def _begin_range(names: tuple[str, ...], instances: Instances, module: str, context: Any) -> dispatch.Token | None:
    if not context.name.startswith(names):
        return None
    if dispatch.detailed:
        with guard.contained(FEATURE):
            context.name += instances.suffix(training.caller_in(sys._getframe(2), module))
    return dispatch.enter_without_torch(region.make(context.name, None, None, None, None))


RANGES: Mapping[str, Begin] = {
    "optimizer": functools.partial(_begin_range, OPTIMIZER, optimizers, "torch.optim.optimizer"),
    "data": functools.partial(_begin_range, (DATA,), loaders, "torch.utils.data.dataloader"),
}
"""How the region of a range that torch opens itself begins, by part."""


def _clipping(switch: Switch) -> Iterator[Patch]:
    """Recognize the functions by their ``torch.no_grad``, even if a program imported them by name."""
    clipping = training.clipping()
    if clipping is None:
        return

    def begin(_: object) -> dispatch.Token | None:
        name = clipping(sys._getframe(2))
        return None if name is None else dispatch.enter(region.make(name, None, None, None, None))

    yield from contexts(torch.no_grad, begin, switch)


def _region_around_calls(
    owner: Any, method: str, region_of: Callable[..., Region | None], switch: Switch, overridable: bool = False
) -> Patch:
    """Open the region that ``region_of(*arguments)`` returns, if any, around calls of ``method``.

    A method that is ``overridable`` by ``__torch_function__`` stays so: the override receives the original, where
    torch itself would pass this wrapper.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            token, overriding = None, None
            try:
                if not dispatch.tracing():
                    shown = region_of(*args, **kwargs) if switch.on else None
                    token = None if shown is None else dispatch.enter(shown)
                    given = (*args, *kwargs.values()) if overridable else ()
                    if has_torch_function(given):
                        overriding = [value for value in given if type(value) is not torch.Tensor]
            except Exception as error:
                guard.failed(FEATURE, error)
            try:
                if overriding is not None:
                    return handle_torch_function(original, overriding, *args, **kwargs)
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if token is not None:
                    dispatch.leave(token)

        return call

    return Patch(owner, method, make)


def _collectives(switch: Switch) -> Iterator[Patch]:
    group, methods = training.collectives()
    for method, name in methods.items():
        shown = region.make(name, None, None, None, None)
        yield _region_around_calls(group, method, lambda *_, shown=shown, **__: shown, switch)


def _backward(switch: Switch) -> Iterator[Patch]:
    """Annotate backward passes: `torch.Tensor.backward` calls `torch.autograd.backward`, which is patched.

    Inside code annotated as "backward", no second region is opened.
    """
    shown = region.make(region.BACKWARD, None, None, None, None)

    def begin() -> dispatch.Token | None:
        return dispatch.enter(shown) if switch.on and not dispatch.backward_is_open() else None

    yield wrap_backward(begin, dispatch.leave)


def _copies(switch: Switch) -> Iterator[Patch]:
    for method, destination_of in (("to", _to), ("cuda", _cuda), ("copy_", _copy)):
        yield _region_around_calls(
            torch.Tensor, method, functools.partial(_region_of_copy, destination_of), switch, overridable=True
        )


Destination = tuple[torch.Tensor, torch.device | None]  # the tensor and its destination


def _region_of_copy(destination_of: Callable[..., Destination], /, *args: Any, **kwargs: Any) -> Region | None:
    """Return the region of a copy from the CPU to another device; None for any other call."""
    try:
        with _without_torch_function():
            source, device = destination_of(*args, **kwargs)
            if device is None or source.device.type != "cpu" or device.type == "cpu":
                return None
            return _copy_region(str(gpu.with_index(device)), source.numel() * source.element_size())
    except TypeError:
        return None  # wrong arguments: the method itself raises
    except Exception as error:
        guard.failed("naming a copy", error)
        return None


@functools.lru_cache(maxsize=1024)
def _copy_region(device: str, size: int) -> Region:
    name = f"copy to {device}"
    return Region(name, region.by_name(name), region.DOMAIN, payload=size)


def _to(source: torch.Tensor, /, *args: Any, **kwargs: Any) -> Destination:
    target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
    if isinstance(target, torch.Tensor):
        return source, target.device
    names_device = isinstance(target, (str, int, torch.device))
    return source, _device(target) if names_device else None  # else a dtype


def _cuda(tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> Destination:
    if device is None or isinstance(device, int):
        return tensor, _device("cuda", device)
    return tensor, _device(device)


def _device(*given: Any) -> torch.device | None:
    with Suppressed(TypeError, ValueError, RuntimeError):  # wrong arguments: the method itself raises
        return torch.device(*given)
    return None


def _copy(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Destination:
    source = next(iter((*args, *kwargs.values())), tensor)
    return source, tensor.device


PHASES = frozenset({"optimizer", "data", "backward"})
"""The parts that are phases of a step."""

PARTS: Mapping[str, Callable[[Switch], Iterator[Patch]]] = {
    "optimizer": functools.partial(_range, "optimizer", "optimizers", optimizers),
    "data": functools.partial(_range, "data", "data loaders", loaders),
    "backward": _backward,
    "copies": _copies,
    "clipping": _clipping,
    "collectives": _collectives,
}


class StepAnnotation:
    """The parts that one call of `annotate_step` requested."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return ", ".join(self.parts)


class StepPatcher(PatchService[StepAnnotation]):
    """Patches each requested part once.

    Attributes:
        parts: those that are patched now.
    """

    during_phases = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: frozenset[str] = frozenset()
        self._detailed = False  # whether they are patched for more than the phases of a step
        self._patches: list[Patch] = []
        self._switch = Switch()

    def apply(self, on: bool) -> None:
        """Patch the parts that are requested now, and undo the others."""
        parts = frozenset(part for request in self.requests for part in request.parts if on)
        detailed = dispatch.detailed
        if not detailed:
            parts &= PHASES
        if (parts, detailed) == (self.parts, self._detailed) and (parts or not self._patches):
            return
        self._switch.on, self.parts = False, frozenset()
        undo(self._patches)
        self._switch, self.parts, self._detailed = Switch(), parts, detailed
        for part in PARTS:
            if part in parts:
                apply(PARTS[part](self._switch), self._patches)

    def begin_range(self, context: Any, before: frozenset[str]) -> dispatch.Token | None:
        """Open the region of a range that torch enters now, if its part is patched but was not ``before``.

        Such a patch comes too late for the call of ``__enter__`` that is running.
        """
        begun = (RANGES[part](context) for part in self.parts & RANGES.keys() - before)
        return next((token for token in begun if token is not None), None)


patcher = StepPatcher()


@contain_request
def annotate_step(*parts: str) -> Handle:
    """Annotate the parts of a training step outside the model, in every active profiler.

    torch is patched only while a profiler records, a tool is attached or a black box runs. Results and compiled
    code do not change; regions inside compiled code do not appear.

    Args:
        *parts: which parts; all of them if none is given:

            - "optimizer": each optimizer's ``step`` and ``zero_grad``, and "data": the ``__next__`` of a
              `torch.utils.data.DataLoader`. torch.profiler shows these by itself
              (``Optimizer.step#AdamW.step``); this shows them under the same names in the other profilers.
            - "backward": ``loss.backward()`` and `torch.autograd.backward` as a whole.
            - "copies": ``copy to cuda:0``, a copy of a tensor from the CPU to another device by ``to``,
              ``cuda`` or ``copy_``, with its bytes as the payload; also the parameters, in ``model.to(...)``.
            - "clipping": `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
            - "collectives": ``all_reduce``, ``broadcast`` and the other collectives of `torch.distributed`:
              the call that starts one, not the wait for it, and not those that DDP starts in C++.

    Returns:
        A handle with ``remove()``; it is a context manager as well.

    Raises:
        TypeError: a part is not a string.
        ValueError: a part has another name.

    Example:
        >>> handle = annotate_step("optimizer", "data")
        >>> handle.remove()
    """
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f'"parts" must be strings from {", ".join(PARTS)}: {part!r}')
        if part not in PARTS:
            raise ValueError(f'"parts" must be from {", ".join(PARTS)}: {part!r}')
    skip_package()  # torch's own functions call the patched ones between two graphs
    return patcher.add(StepAnnotation(parts or tuple(PARTS)))
