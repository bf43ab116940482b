"""Watches code that runs while the modes are off: on other threads, in hooks, in compiled or traced code."""

from __future__ import annotations

import concurrent.futures.thread
import inspect
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker

from .modes import modes_beside
from .state import RunState
from .storages import Replacement

_WORKER_LOOP = worker._worker_loop


def changes(state: RunState) -> Iterator[Replacement]:
    """Yield the replacements that watch such code, or report that a dry run does not cover it."""
    yield from _threads(state)
    yield from _processes(state)
    yield from _collectives(state)
    yield from _hooks(state)
    yield from _traced(state)
    yield from _compiled(state)


def _threads(state: RunState) -> Iterator[Replacement]:
    """Watch threads that start during the run."""

    def make_start(original: Any) -> Any:
        @wraps(original)
        def start(thread: threading.Thread) -> None:
            run = thread.run

            def watched() -> None:
                with suppress(AttributeError):
                    del thread.run
                with modes_beside(state):
                    run()

            thread.run = watched  # type: ignore[method-assign]
            original(thread)

        return start

    def make_run(original: Any) -> Any:
        def run(item: Any) -> None:
            with nullcontext() if state.thread.functions is not None else modes_beside(state):
                original(item)

        return run

    yield threading.Thread, "start", make_start
    yield concurrent.futures.thread._WorkItem, "run", make_run


def worker_loop(*args: Any) -> Any:
    """Run the loop of a DataLoader worker without the pretended GPU, as it stays on the CPU."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _WORKER_LOOP(*args)


def _processes(state: RunState) -> Iterator[Replacement]:
    """Report that other processes are not watched, except the workers of a DataLoader."""

    def make_start(original: Any) -> Any:
        def start(process: Any) -> None:
            if process._target is not worker_loop:
                state.record_not_covered("the work of another process was not checked")
            original(process)

        return start

    yield worker, "_worker_loop", lambda original: worker_loop
    yield multiprocessing.process.BaseProcess, "start", make_start


def _collectives(state: RunState) -> Iterator[Replacement]:
    """Run the collectives of NCCL on gloo, as NCCL needs GPUs."""

    def make_substitute(original: Any) -> Any:
        signature = inspect.signature(original)
        # Without a backend, a new group has that of the first one, which has nccl for GPUs
        default = "nccl" if original.__name__ == "init_process_group" else None

        @wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.arguments.setdefault("backend", default)
            if "nccl" in str(given.arguments["backend"] or default).lower():
                state.record_not_covered("collectives ran on gloo instead of nccl")
                given.arguments["backend"] = "gloo"
            return original(*given.args, **given.kwargs)

        return make

    if torch.distributed.is_available():
        meshes = sys.modules.get("torch.distributed.device_mesh")
        for owner in (torch.distributed, torch.distributed.distributed_c10d, meshes):
            yield owner, "init_process_group", make_substitute
            yield owner, "new_group", make_substitute
            yield owner, "is_nccl_available", lambda original: lambda: True


def _hooks(state: RunState) -> Iterator[Replacement]:
    """Watch hooks of saved tensors, which run inside C++ calls, where the function mode is off."""

    def watched(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            functions = state.thread.functions
            with functions.watch_user_code() if functions is not None else nullcontext():
                return hook(value)

        return run

    def make_init(original: Any) -> Any:
        @wraps(original)
        def init(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
            original(hooks, watched(pack_hook), watched(unpack_hook))

        return init

    yield torch.autograd.graph.saved_tensors_hooks, "__init__", make_init


def _traced(state: RunState) -> Iterator[Replacement]:
    """Show real devices to the program's FakeTensorMode and to TorchScript, which read devices in C++."""

    def is_ours(mode: Any) -> bool:
        return state.fake is not None and mode is state.fake.mode

    def make_enter(original: Any) -> Any:
        def enter(mode: Any) -> Any:
            if not is_ours(mode):
                shapes = _is_called_by_dtensor(sys._getframe(1))
                if not shapes:
                    state.record_not_covered("code under FakeTensorMode, such as torch.export, was not checked")
                if not shapes and state.fake is not None:  # C++ would end the process
                    raise RuntimeError("the program's own FakeTensorMode cannot run while tensors have no data")
                state.thread.foreign_depth += 1
            return original(mode)

        return enter

    def make_leave(original: Any) -> Any:
        def leave(mode: Any, *error: Any) -> Any:
            state.thread.foreign_depth -= not is_ours(mode)
            return original(mode, *error)

        return leave

    def make_from_tensor(original: Any) -> Any:
        def from_tensor(mode: Any, *args: Any, **kwargs: Any) -> Any:
            state.thread.foreign_depth += 1
            try:
                return original(mode, *args, **kwargs)
            finally:
                state.thread.foreign_depth -= 1

        return from_tensor

    def make_call(original: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            state.record_not_covered("the devices in a scripted function were not checked")
            return original(function, *args, **kwargs)

        return call

    yield FakeTensorMode, "__enter__", make_enter
    yield FakeTensorMode, "__exit__", make_leave
    yield FakeTensorMode, "from_tensor", make_from_tensor
    yield torch._C.ScriptFunction, "__call__", make_call
    yield torch._C.ScriptMethod, "__call__", make_call


def _is_called_by_dtensor(frame: FrameType | None) -> bool:
    """Return whether DTensor is the caller, which computes only the shape of a result."""
    for _ in range(30):
        if frame is None:
            break
        if f"torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _compiled(state: RunState) -> Iterator[Replacement]:
    """Report that compiled functions run eagerly."""
    from torch._dynamo import eval_frame

    def make_callback(original: Any) -> Any:
        def callback_from_stance(callback: Any) -> Any:
            if callback not in (None, False):
                state.record_not_covered("a compiled function ran eagerly: its compiled code was not checked")
            return original(callback)

        return callback_from_stance

    yield eval_frame, "_callback_from_stance", make_callback
