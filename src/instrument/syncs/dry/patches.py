"""What is replaced outside of torch.cuda while a dry run lasts; each is put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch
from torch.utils import _device

from ...patch import Patch
from . import moves, readings
from .dispatch import Dispatch
from .functions import Functions
from .state import State, as_cuda

_ASKED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
Made = tuple[Any, str, Callable[[Any], Any]]  # owner, name, and what makes the replacement


@contextmanager
def modes(state: State) -> Iterator[None]:
    """Watch what the calling thread does."""
    with ExitStack() as stack:
        if state.fake is not None:
            stack.enter_context(state.fake.mode)
        stack.enter_context(Dispatch(state))
        stack.enter_context(Functions(state, moves.ANSWERS, {**moves.CALLS, **readings.CALLS}))
        yield


@contextmanager
def patched(state: State) -> Iterator[None]:
    """Replace what must know of pretended devices; put everything back at the end, whatever happened."""
    with ExitStack() as stack:
        for owner, name, make in [
            *_python_bodies(),
            *_devices(state),
            *_threads(state),
            *_hooks(state),
            *_compiled(state),
        ]:
            if hasattr(owner, name):
                stack.callback(Patch(owner, name, make).undo)
        if state.fake is not None:
            for patch in state.fake.patches(state):
                stack.callback(patch().undo)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_reset_default_device, _device.CURRENT_DEVICE)
        yield


def _reset_default_device(before: Any) -> None:
    if before != _device.CURRENT_DEVICE:
        torch.set_default_device(before)


def _python_bodies() -> Iterator[Made]:
    """Have functions of torch's that are written in Python run as if they were the user's own.

    Otherwise a function mode sees them as one call, and nothing of what they do inside, such as user code in
    backward hooks.
    """
    for owner in (torch.nn.functional, torch.nn.init, torch.autograd, torch._lowrank, torch._lobpcg):
        for name in _ASKED:
            yield owner, name, lambda original: _by_subclass


def _by_subclass(*args: Any) -> bool:
    """Tell whether a class of tensors of the user's overrides functions; modes do not count."""
    values = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    kinds = {type(value) for value in values if hasattr(type(value), "__torch_function__")}
    functions = [kind.__torch_function__ for kind in kinds]
    return any(getattr(function, "__func__", function) not in _PLAIN for function in functions)


_PLAIN = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def _devices(state: State) -> Iterator[Made]:
    """Where torch's own code asks C++ for the device of a tensor, or writes it down."""
    tags = state.tags

    def grouped(original: Any) -> Any:
        def group(*args: Any, **kwargs: Any) -> dict[Any, Any]:
            groups = {}
            for (device, dtype), held in original(*args, **kwargs).items():
                groups[tags.first(held[0][0]) or device, dtype] = held
            return groups

        return group

    def located(original: Any) -> Any:
        def location_tag(storage: Any) -> Any:
            device = tags.of_storage(storage)
            if device is None:
                return original(storage)
            state.wait("save", "copies from the GPU", "D2H", storage.nbytes())
            return str(device)

        return location_tag

    def restored(original: Any) -> Any:
        def default_restore_location(storage: Any, location: Any) -> Any:
            device = as_cuda(location)
            if device is None:
                return original(storage, location)
            state.wait("load", "copies to the GPU from memory that is not pinned", "H2D", storage.nbytes())
            tags.put_storage(storage, device)
            return storage

        return default_restore_location

    def downloaded(original: Any) -> Any:
        def cpu(storage: Any) -> Any:
            if tags.of_storage(storage) is None:
                return original(storage)
            state.wait("cpu", "copies from the GPU", "D2H", storage.nbytes())
            return storage.clone()

        return cpu

    yield torch.UntypedStorage, "cpu", downloaded
    yield torch._C, "_group_tensors_by_device_and_dtype", grouped
    yield torch.serialization, "location_tag", located
    yield torch.serialization, "default_restore_location", restored


def _threads(state: State) -> Iterator[Made]:
    """Threads that start during the run are watched too."""

    def starting(original: Any) -> Any:
        @wraps(original)
        def start(thread: threading.Thread) -> None:
            run = thread.run

            def watched() -> None:
                with suppress(AttributeError):
                    del thread.run
                with modes(state):
                    run()

            thread.run = watched  # type: ignore[method-assign]
            original(thread)

        return start

    yield threading.Thread, "start", starting


def _hooks(state: State) -> Iterator[Made]:
    """Hooks of saved tensors run inside of C++ calls, where the function mode is off."""

    def watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            functions = state.here.functions
            with functions.reentered() if functions is not None else nullcontext():
                return hook(value)

        return run

    def made(original: Any) -> Any:
        def __init__(self: Any, pack_hook: Any, unpack_hook: Any) -> None:  # noqa: N807
            original(self, watched(pack_hook), watched(unpack_hook))

        return __init__

    yield torch.autograd.graph.saved_tensors_hooks, "__init__", made


def _compiled(state: State) -> Iterator[Made]:
    """Say that compiled functions run eagerly."""
    from torch._dynamo import eval_frame

    def eager(original: Any) -> Any:
        def callback_from_stance(callback: Any) -> Any:
            if callback not in (None, False):
                state.uncovered("a compiled function ran eagerly: what its compiled code does was not looked at")
            return original(callback)

        return callback_from_stance

    yield eval_frame, "_callback_from_stance", eager
