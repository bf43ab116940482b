"""Queries the state of the program's GPU without initializing a driver or creating a context."""

from __future__ import annotations

import sys
from typing import Any

from .interrupts import Suppressed

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
