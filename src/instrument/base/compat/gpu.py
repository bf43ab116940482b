"""The program's GPU: its state, without initializing a driver or creating a context; callbacks of torch's CUDA."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..interrupts import Suppressed

_TRACE_SWITCH = "_ZN3c104impl8GPUTrace9haveStateE"
_KINDS = ("cuda", "xpu", "mtia", "hpu", "npu")  # kinds of devices with a module in torch or in an extension of it


def in_use() -> Any:
    """Return torch's module of the GPU that this process has initialized, such as `torch.cuda`; None without one.

    Return None in a child that was forked after its parent initialized CUDA, as it cannot use CUDA.
    """
    return next((module for module in map(initialized, _KINDS) if module is not None), None)


def initialized(kind: str) -> Any:
    """Return torch's module of a ``kind`` of GPU such as "cuda" if this process has initialized it; else None."""
    torch = sys.modules.get("torch")
    module = vars(torch).get(kind) if torch is not None else None
    query = getattr(module, "is_initialized", None)
    return module if query is not None and query() else None


def built_for_cuda() -> bool:
    """Return whether this build of torch is for CUDA or ROCm, which both are `torch.cuda`; needs no GPU."""
    return _built_for("cuda", "hip")


def supported() -> bool:
    """Return whether this build of torch, or an extension of it, can use a GPU; needs no GPU."""
    torch = sys.modules.get("torch")
    extended = torch is not None and any(kind in vars(torch) for kind in ("hpu", "npu"))
    return extended or _built_for("cuda", "hip", "xpu")


def _built_for(*platforms: str) -> bool:
    version = getattr(sys.modules.get("torch"), "version", None)
    return any(getattr(version, platform, None) for platform in platforms)


def current_stream_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph: a synchronization would invalidate it.

    False after an error of the GPU, which makes the query raise.
    """
    query = getattr(in_use(), "is_current_stream_capturing", None)
    with Suppressed(RuntimeError):
        return query is not None and bool(query())
    return False


def current_stream() -> Any:
    """Return the current stream of the GPU in use; None without one."""
    query = getattr(in_use(), "current_stream", None)
    return query() if query is not None else None


def stream_capturing(stream: Any) -> bool:
    """Return whether ``stream``, of the GPU in use, captures a CUDA graph."""
    module = in_use()
    if module is None:  # as in a forked child
        return False
    with module.stream(stream):
        return current_stream_capturing()


def sync_callbacks() -> tuple[dict[str, list[Any]], Callable[[], None]] | None:
    """Return torch's lists of callbacks before a synchronization, and the function that turns the callbacks on.

    The keys are "stream", "event" and "device". None if this version of torch has no such callbacks: a
    synchronization is then seen only when it has ended.
    """
    import torch

    activate = getattr(torch._C, "_activate_gpu_trace", None)
    try:
        from torch.cuda import _gpu_trace as trace

        registries: dict[str, Any] = {
            "stream": trace.StreamSynchronizationCallbacks,
            "event": trace.EventSynchronizationCallbacks,
            "device": trace.DeviceSynchronizationCallbacks,
        }
        lists = {what: registry.callback_list for what, registry in registries.items()}
    except (ImportError, AttributeError):
        return None
    return (lists, activate) if activate is not None else None


def devices_in_use() -> list[int] | None:
    """Return the devices on which this process has a context; None if this version of torch does not tell."""
    import torch

    used = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return None if used is None else [device for device in range(torch.cuda.device_count()) if used(device)]


@functools.cache
def trace_switch() -> Any:
    """Return the variable of torch, with a bool as ``value``, that turns the callbacks on; None if it is hidden.

    While they are on, torch calls Python when memory of the GPU is freed, also if an error is about to be raised:
    an error of a function in C that was given a temporary tensor then becomes a SystemError.
    """
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _TRACE_SWITCH)
    except (OSError, ValueError):  # another system, another version
        return None


class _CancellableCall:
    """Calls ``call`` at most once, from any thread, and not after `cancel`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]

    @property
    def is_over(self) -> bool:
        return not self._calls

    def __call__(self) -> None:
        try:
            call = self._calls.pop()  # only one of two threads gets it
        except IndexError:
            return
        call()

    def cancel(self) -> None:
        self._calls.clear()


def when_initialized(call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` when the program initializes CUDA, on the same thread; at once if it has.

    Neither this nor the returned function waits for a thread that is initializing CUDA. ``call`` is not called if
    that thread has already run its queue, or if this version of torch has no queue.

    Returns:
        A function that cancels it: ``call`` is not called after that.
    """
    import torch

    queued: list[Any] | None = getattr(torch.cuda, "_queued_calls", None)
    lock = getattr(torch.cuda, "_initialization_lock", None)
    once = _CancellableCall(call)
    if initialized("cuda") is None and queued is not None:
        queued.append((once, []))  # not by `_lazy_call`: torch has its lock for as long as it initializes
    if initialized("cuda") is not None:
        once()

    def forget() -> None:
        once.cancel()
        if queued is None or lock is None or not lock.acquire(blocking=False):
            return  # torch runs the queue now, which it does once
        try:
            for number in reversed(range(len(queued))):  # others append meanwhile
                entry = queued[number][0]
                if isinstance(entry, _CancellableCall) and entry.is_over:
                    del queued[number]
        finally:
            lock.release()

    return forget


def with_index(device: Any) -> Any:
    """Return ``device`` with the index of the current device if it has none, as in "cuda"."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if device.index is not None or not hasattr(module, "is_initialized"):
        return device
    return torch.device(device.type, module.current_device() if initialized(device.type) else 0)
