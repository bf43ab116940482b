"""Queries the state of the program's GPU without initializing a driver or creating a context."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .interrupts import is_interrupt

_LAST_WAIT_S = 5
_ends: ContextVar[bool] = ContextVar("instrument_process_ends", default=False)
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
    """Return whether the current stream captures a CUDA graph: a synchronization would invalidate it."""
    module = in_use()
    query = getattr(module, "is_current_stream_capturing", None)
    return query is not None and bool(query())


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


@contextmanager
def process_ends() -> Iterator[None]:
    """Let `synchronize` give up after 5 s, as the process is to end: a kernel may wait for a dead peer."""
    token = _ends.set(True)
    try:
        yield
    finally:
        _ends.reset(token)


def synchronize(*, captured: bool = False) -> list[str]:
    """Wait for all work of the GPUs that this process uses, if no CUDA graph is captured.

    An error of the GPU is not raised; the program gets it at its next call.

    Args:
        captured: whether any thread captures a graph.

    Returns:
        The reason why the synchronization was not possible, as a list of one; empty if it was done.
    """
    module = in_use()
    if module is None:
        return []
    try:
        if captured or current_stream_capturing():
            return ["a CUDA graph was captured when the window ended: kernels that still ran may be missing"]
        if _ends.get():
            return _synchronize_in_time(module)
        _synchronize_all(module)
    except Exception as error:
        if is_interrupt(error):
            raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return [f"the GPU could not be synchronized when the window ended, so kernels may be missing: {what}"]
    return []


def _synchronize_all(module: Any) -> None:
    """Wait for each GPU on which this process has a context; a wait for another one would create one there."""
    import torch

    used = getattr(torch._C, "_cuda_hasPrimaryContext", None) if module is torch.cuda else None
    if used is None:
        module.synchronize()
        return
    for device in range(module.device_count()):
        if used(device):
            module.synchronize(device)


def _synchronize_in_time(module: Any) -> list[str]:
    """Wait on a thread of its own, which stays behind if a kernel does not end."""
    errors: list[Exception] = []

    def wait() -> None:
        try:
            _synchronize_all(module)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="instrument-gpu", daemon=True)
    thread.start()
    thread.join(_LAST_WAIT_S)
    if thread.is_alive():
        return [f"work of the GPU did not end within {_LAST_WAIT_S} s of the end of the process, and is missing"]
    if errors:
        raise errors[0]
    return []
