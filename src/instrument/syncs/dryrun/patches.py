"""Has the modes watch a thread, and replaces functions outside torch.cuda through which code would escape them."""

from __future__ import annotations

import concurrent.futures.thread
import inspect
import logging
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker

from ...base.patch import Patch
from . import handlers
from .state import RunState
from .storages import Replacement, calling, dataless_changes, storage_changes
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
        stack.enter_context(FunctionMode(state, handlers.ANSWERS, {**handlers.CALLS, **handlers.READS}))
        yield


_WORKER_LOOP = worker._worker_loop


def _watching_changes(state: RunState) -> Iterator[Replacement]:
    """Yield the replacements that watch such code, or report that a dry run does not cover it."""
    yield from _threads(state)
    yield from _processes(state)
    yield from _collectives(state)
    yield from _hooks(state)
    yield from _traced(state)
    yield from _compiled(state)


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


def _collectives(state: RunState) -> Iterator[Replacement]:
    """Run the collectives of NCCL on gloo, as NCCL needs GPUs."""

    def substitute(original: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a backend, a new group has that of the first one, which has nccl for GPUs
        default = "nccl" if original.__name__ == "init_process_group" else None
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments.setdefault("backend", default)
        if "nccl" in str(given.arguments["backend"] or default).lower():
            state.record_not_covered("collectives ran on gloo instead of nccl")
            given.arguments["backend"] = "gloo"
        return original(*given.args, **given.kwargs)

    if torch.distributed.is_available():
        meshes = sys.modules.get("torch.distributed.device_mesh")
        for owner in (torch.distributed, torch.distributed.distributed_c10d, meshes):
            yield owner, "init_process_group", calling(substitute)
            yield owner, "new_group", calling(substitute)
            yield owner, "is_nccl_available", lambda original: lambda: True


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
            shapes = _is_called_by_dtensor(sys._getframe(1))
            if not shapes:
                state.record_not_covered("code under FakeTensorMode, such as torch.export, was not checked")
            if not shapes and state.fake is not None:  # C++ would end the process
                raise RuntimeError("the program's own FakeTensorMode cannot run while tensors have no data")
            state.thread.foreign_depth += 1
        return original(mode)

    def leave(original: Any, mode: Any, *error: Any) -> Any:
        state.thread.foreign_depth -= not is_ours(mode)
        return original(mode, *error)

    def from_tensor(original: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        state.thread.foreign_depth += 1
        try:
            return original(mode, *args, **kwargs)
        finally:
            state.thread.foreign_depth -= 1

    def call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        state.record_not_covered("the devices in a scripted function were not checked")
        return original(function, *args, **kwargs)

    yield FakeTensorMode, "__enter__", calling(enter)
    yield FakeTensorMode, "__exit__", calling(leave)
    yield FakeTensorMode, "from_tensor", calling(from_tensor)
    yield torch._C.ScriptFunction, "__call__", calling(call)
    yield torch._C.ScriptMethod, "__call__", calling(call)


def _is_called_by_dtensor(frame: FrameType) -> bool:
    """Return whether DTensor is the caller, which computes only the shape of a result."""
    part = f"torch{os.sep}distributed{os.sep}"
    return any(part in caller.f_code.co_filename for caller, _ in islice(walk_stack(frame), 30))


def _compiled(state: RunState) -> Iterator[Replacement]:
    """Report that compiled functions run eagerly."""
    from torch._dynamo import eval_frame

    def callback_from_stance(original: Any, callback: Any) -> Any:
        if callback not in (None, False):
            state.record_not_covered("a compiled function ran eagerly: its compiled code was not checked")
        return original(callback)

    yield eval_frame, "_callback_from_stance", calling(callback_from_stance)


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
    yield from storage_changes(state)
    yield from _watching_changes(state)
    if state.fake is not None:
        yield from dataless_changes(state.fake, state)


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
