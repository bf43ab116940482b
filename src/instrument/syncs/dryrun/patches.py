"""Has the modes watch a thread, and replaces functions outside torch.cuda through which code would escape them.

Also replaced is code of torch that reads the device of a tensor or storage in C++, saves it, or needs its data.
"""

from __future__ import annotations

import concurrent.futures.thread
import logging
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import constraints
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker

from ...base.patch import Patch
from ...explain.waits.operations import FROM_GPU, FROM_PAGEABLE
from ..counting.calls import Memory
from . import autocast, handlers
from .collectives import collectives, ranks_in_environment
from .dataless import note
from .replacement import Replacement, calling
from .rules import record_transfer
from .state import PINNED, RunState, Tags, as_cuda
from .torch_modes import DispatchMode, FunctionMode, register_higher_order_operators

_OF_COMPILER = "set_is_in_mode_without_ignore_compile_internals"  # later versions of torch


@contextmanager
def modes_beside(state: RunState) -> Iterator[None]:
    """Observe the operators of the calling thread, which runs beside that of the run.

    Torch has one flag for the process, not for each thread, that a mode is on, and compiles nothing then. A thread
    that ends after the run would leave the flag as it was during the run.
    """
    kept: dict[str, bool] = {}  # empty if a mode cannot be entered
    with ExitStack() as stack:
        stack.callback(lambda: _set_flags(kept))
        stack.enter_context(modes(state))
        stack.callback(lambda: kept.update(_flags()))
        yield


def _flags() -> dict[str, bool]:
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def _set_flags(flags: dict[str, bool]) -> None:
    vars(_python_dispatch).update(flags)
    flag = flags.get("_is_in_any_mode_without_ignore_compile_internals")
    if flag is not None and (set_compiler := getattr(_python_dispatch, _OF_COMPILER, None)) is not None:
        set_compiler(flag)


@contextmanager
def modes(state: RunState) -> Iterator[None]:
    """Observe the operators of the calling thread."""
    with ExitStack() as stack:
        if state.fake is not None:
            stack.enter_context(state.fake.mode)
        stack.callback(setattr, state.thread, "functions", None)
        stack.enter_context(DispatchMode(state))
        stack.enter_context(FunctionMode(state, handlers.ANSWERS, handlers.CALLS))
        yield


_WORKER_LOOP = worker._worker_loop


def _threads(state: RunState) -> Iterator[Replacement]:
    """Watch threads that start during the run."""

    def start(original: Any, thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            with suppress(AttributeError):
                del thread.run
            with modes_beside(state):
                run()

        thread.run = watched  # type: ignore[method-assign]
        original(thread)

    def run(original: Any, item: Any) -> None:
        with nullcontext() if state.thread.functions is not None else modes_beside(state):
            original(item)

    yield threading.Thread, "start", calling(start)
    yield concurrent.futures.thread._WorkItem, "run", calling(run)


def worker_loop(*args: Any) -> Any:
    """Run the loop of a DataLoader worker without the pretended GPU, as it stays on the CPU."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _WORKER_LOOP(*args)


def _processes(state: RunState) -> Iterator[Replacement]:
    """Report that other processes are not watched, except the workers of a DataLoader."""

    def start(original: Any, process: Any) -> None:
        if process._target is not worker_loop:
            state.record_not_covered("the work of another process was not checked")
        original(process)

    yield worker, "_worker_loop", lambda original: worker_loop
    yield multiprocessing.process.BaseProcess, "start", calling(start)


def _hooks(state: RunState) -> Iterator[Replacement]:
    """Watch hooks of saved tensors, which run inside C++ calls, where the function mode is off."""

    def watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            functions = state.thread.functions
            with functions.watch_user_code() if functions is not None else nullcontext():
                return hook(value)

        return run

    def init(original: Any, hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        original(hooks, watched(pack_hook), watched(unpack_hook))

    yield torch.autograd.graph.saved_tensors_hooks, "__init__", calling(init)


def _traced(state: RunState) -> Iterator[Replacement]:
    """Show real devices to the program's FakeTensorMode and to TorchScript, which read devices in C++."""

    def is_ours(mode: Any) -> bool:
        return state.fake is not None and mode is state.fake.mode

    def enter(original: Any, mode: Any) -> Any:
        if not is_ours(mode):
            # DTensor computes only the shape of a result
            callers = (caller.f_code.co_filename for caller, _ in islice(walk_stack(sys._getframe(1)), 30))
            shapes = any(f"torch{os.sep}distributed{os.sep}" in file for file in callers)
            if not shapes:
                state.record_not_covered("code under FakeTensorMode, such as torch.export, was not checked")
            if not shapes and state.fake is not None:  # C++ would end the process
                raise RuntimeError("the program's own FakeTensorMode cannot run while tensors have no data")
            state.thread.foreign_depth += 1
        return original(mode)

    def leave(original: Any, mode: Any, *error: Any) -> Any:
        state.thread.foreign_depth -= not is_ours(mode)
        return original(mode, *error)

    def from_tensor(original: Any, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        state.thread.foreign_depth += 1
        try:
            return original(mode, *args, **kwargs)
        finally:
            state.thread.foreign_depth -= 1

    def call(original: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        state.record_not_covered("the devices in a scripted function were not checked")
        return original(function, *args, **kwargs)

    yield FakeTensorMode, "__enter__", calling(enter)
    yield FakeTensorMode, "__exit__", calling(leave)
    yield FakeTensorMode, "from_tensor", calling(from_tensor)
    yield torch._C.ScriptFunction, "__call__", calling(call)
    yield torch._C.ScriptMethod, "__call__", calling(call)


_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _python_bodies(state: RunState) -> Iterator[Replacement]:
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


_register_builtin = getattr(torch.jit._builtins, "_register_builtin", None)
if _register_builtin is not None:  # makes TorchScript accept the function as the builtins that it replaces
    _register_builtin(_is_overridden, "aten::has_torch_function")


# Modules of torch that read a storage in place, which is in the CPU's memory
_REAL = ("torch.serialization", "torch.multiprocessing.reductions")


def _storages(state: RunState) -> Iterator[Replacement]:
    """Yield the replacements of code that reads or saves the device of a tensor."""
    tags = state.tags

    def group(original: Any, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        groups = {}
        for (device, dtype), held in original(*args, **kwargs).items():
            groups[tags.first_device(held[0][0]) or device, dtype] = held
        return groups

    def location_tag(original: Any, storage: Any) -> Any:
        device = tags.storage_device(storage)
        if device is None:
            return original(storage)
        state.count_copy(storage, "cpu", source="gpu")
        state.record_sync("save", FROM_GPU, "D2H", storage.nbytes())
        return str(device)

    def restore_location(original: Any, storage: Any, location: Any) -> Any:
        device = as_cuda(location)
        if device is None:
            return original(storage, location)
        state.count_copy(storage, "gpu")
        state.record_sync("load", FROM_PAGEABLE, "H2D", storage.nbytes())
        tags.put_storage(storage, device)
        return storage

    def device(original: Any) -> property:
        def get(storage: Any) -> Any:
            asking = sys._getframe(1).f_globals.get("__name__")
            pretended = None if asking in _REAL else tags.storage_device(storage)
            return original.__get__(storage) if pretended is None else pretended

        return property(get)

    def make_new(original: Any) -> Any:
        def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            target = as_cuda(device)
            real = device if target is None else "cpu" if state.fake is None else "meta"
            out = original(kind, *args, device=real, **kwargs)
            if target is not None:
                tags.put_storage(out, target)
            return out

        return staticmethod(new)

    def copy_(original: Any, storage: Any, source: Any, non_blocking: Any = None) -> Any:
        """Record a synchronizing copy without data, for which no operator runs that would record it."""
        if state.fake is None:
            return original(storage, source, non_blocking)
        up = tags.storage_device(storage) is not None
        if up != (tags.storage_device(source) is not None):
            pinned = tags.storage_tag(source if up else storage) is PINNED
            host: Memory = "pinned" if pinned else "cpu"
            state.count_copy(source, "gpu" if up else host, source=host if up else "gpu")
            record_transfer(state, "copy_", up, pinned, bool(non_blocking), source.nbytes())
        return storage

    def resize_(original: Any, storage: Any, size: int) -> Any:
        out = original(storage, size)
        if tags.storage_device(storage) is not None:
            state.note_memory(storage, True)
        return out

    def named(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        with state.named_call(original.__name__):
            return original(*args, **kwargs)

    def create(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        return state.thread.functions.run_and_tag(original, args, kwargs)

    def from_dlpack(original: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, torch.Tensor) and tags.device(source) is not None:
            return source.detach()
        return original(source, *args, **kwargs)

    def resize(original: Any, storage: Any, size: int) -> Any:
        original(storage, size)  # as FSDP frees and allocates the parameters that it gathered
        if tags.storage_device(storage) is not None:
            state.note_memory(storage, True)
        return storage

    yield torch.UntypedStorage, "resize_", calling(resize)
    yield torch.UntypedStorage, "__new__", make_new
    yield torch.UntypedStorage, "device", device
    yield torch.UntypedStorage, "copy_", calling(copy_)
    yield torch.UntypedStorage, "resize_", calling(resize_)
    for name in ("to", "cuda", "cpu"):
        yield torch.UntypedStorage, name, calling(named)
    yield torch, "range", calling(create)
    bindings: Any = torch._C
    yield bindings._nested, "nested_tensor", calling(create)
    yield torch, "from_dlpack", calling(from_dlpack)
    yield torch.utils.dlpack, "from_dlpack", calling(from_dlpack)
    yield torch._C, "_group_tensors_by_device_and_dtype", calling(group)
    yield torch.serialization, "location_tag", calling(location_tag)
    yield torch.serialization, "default_restore_location", calling(restore_location)


def _dataless(state: RunState) -> Iterator[Replacement]:
    """Return the replacements with which tensors without data answer as if they had data, outside operators."""
    if state.fake is None:
        return
    mode, tags = state.fake.mode, state.tags

    def device(original: Any) -> property:
        def get(tensor: Any) -> Any:
            if not state.thread.depth and not mode.in_kernel_invocation:
                pretended = tags.device(tensor)
                if pretended is not None:
                    return pretended
            return original.fget(tensor)

        return property(get, original.fset)

    def apply(_: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
        return _apply(module, fn, recurse, tags)

    def check(original: Any, constraint: Any, value: Any) -> Any:
        out = original(constraint, value)
        note(out, True)
        return out

    chosen = threading.local()  # the map_location of the current torch.load

    def rebuild_tensor(_: Any, storage: Any, storage_offset: int, size: Any, stride: Any) -> Any:
        data = getattr(storage, "_untyped_storage", storage)
        saved = getattr(data, "_fake_device", None)  # where torch.load would have put it
        where = getattr(chosen, "location", None)
        where = where.get(str(saved), saved) if isinstance(where, dict) else where
        put = where(data, str(saved)) if callable(where) else None  # without data, torch.load does not call it
        where = None if callable(where) else where
        chosen_device = saved if where is None else where
        device = as_cuda(chosen_device) if put is None else tags.storage_device(put)
        restored = tags.storage_device(data) is not None  # by torch 2.6, which calls restore_location itself
        if device is not None and put is None and not restored:
            state.count_copy(data, "gpu")
            state.record_sync("load", FROM_PAGEABLE, "H2D", data.nbytes())
        real = "meta" if str(chosen_device) == "meta" else "cpu"
        out = torch.empty_strided(size, stride, dtype=storage.dtype, device=real)
        tags.put(out, device if where is not None else device or tags.storage_device(data))
        return out

    def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen.location = map_location
        try:
            return original(f, map_location, *args, **kwargs)
        finally:
            chosen.location = None

    def load_from_bytes(original: Any, data: bytes) -> Any:
        with _disable_current_modes():  # under FakeTensorMode, torch forgets the device
            return original(data)

    for chooser in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        yield sys.modules[chooser], "_foreach_supported_types", lambda original: [*original, FakeTensor]
    yield FakeTensor, "device", device
    yield FakeTensor, "tolist", lambda _: torch.Tensor.tolist  # FakeTensor's own method reads each element
    yield torch.nn.Module, "_apply", calling(apply)
    yield torch._utils, "_rebuild_tensor", calling(rebuild_tensor)
    yield torch, "load", calling(load)
    yield torch.storage, "_load_from_bytes", calling(load_from_bytes)
    for kind in vars(constraints).values():
        if isinstance(kind, type) and "check" in vars(kind):
            yield kind, "check", calling(check)


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool, tags: Tags) -> Any:
    """Replace `Module._apply`, whose exchange of tensors fails for tensors of FakeTensorMode."""
    if recurse:
        for child in module.children():
            _apply(child, fn, recurse, tags)
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is None:
                continue
            with torch.no_grad():
                out = fn(tensor)
            if isinstance(tensor, FakeTensor) and _kind_of(out) == _kind_of(tensor):
                tags.put(tensor, tags.get(out))
            else:
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                held[name] = torch.nn.Parameter(out, tensor.requires_grad) if is_parameter else out
    return module


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, getattr(tensor, "fake_device", None)


_CHANGES: tuple[Callable[[RunState], Iterator[Replacement]], ...] = (
    _python_bodies, _storages, _threads, _processes, collectives, _hooks, _traced, _dataless,
)  # fmt: skip


@contextmanager
def patched(state: RunState) -> Iterator[list[Patch]]:
    """Replace functions that must know the pretended devices; restore all at the end, even after an error.

    Yield the changes without those of what starts threads and processes.
    """
    patches: list[Patch] = []
    with ExitStack() as stack:
        stack.enter_context(ranks_in_environment(state))
        for changes in _CHANGES:
            for owner, name, make in changes(state):
                if hasattr(owner, name):
                    patch = Patch(owner, name, make)
                    patch.apply_in(stack)
                    if changes not in (_threads, _processes):
                        patches.append(patch)
        if state.fake is not None:
            # This logger writes 40 lines for each operator with unsupported arguments
            log = logging.getLogger("torch._subclasses.fake_tensor")
            stack.callback(log.removeFilter, _drop_record)
            log.addFilter(_drop_record)
        if autocast.is_supported():
            casts = autocast.CudaAutocast(state.tags, lambda cast: state.allocations.mark([cast], "casts"))
            state.cast = casts.cast
            stack.callback(casts.undo)
            for owner, name, make in casts.replacements():
                patches.append(Patch(owner, name, make))
                patches[-1].apply_in(stack)
        register_higher_order_operators(stack)
        stack.callback(_reset_default_device, _device.CURRENT_DEVICE)
        yield patches


def _drop_record(record: logging.LogRecord) -> bool:
    return False


def _reset_default_device(before: Any) -> None:
    if before != _device.CURRENT_DEVICE:
        torch.set_default_device(before)
    context = torch._GLOBAL_DEVICE_CONTEXT
    if getattr(context, "device_context", context) is None:  # with which `get_default_device` fails in torch 2.6
        del context.device_context
