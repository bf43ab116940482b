"""What the program did with its GPU so far, asked without a call that initializes a driver or makes a context."""

from __future__ import annotations

import sys
from typing import Any

from .interrupts import is_interrupt

_KINDS = ("cuda", "xpu", "mtia", "hpu", "npu")  # of devices that torch, or an extension of it, has a module for


def in_use() -> Any:
    """Return the module of the kind of GPU that this process has initialized, such as `torch.cuda`; else None.

    A child that was forked after its parent initialized CUDA cannot use it: None.
    """
    torch = sys.modules.get("torch")
    for kind in _KINDS:
        module = vars(torch).get(kind) if torch is not None else None
        initialized = getattr(module, "is_initialized", None)
        if initialized is not None and initialized():
            return module
    return None


def supported() -> bool:
    """Tell whether this build of torch, or an extension of it, can use a GPU, be there one or not."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    built = any(getattr(version, platform, None) for platform in ("cuda", "hip", "xpu"))
    return built or (torch is not None and any(kind in vars(torch) for kind in ("hpu", "npu")))


def capturing() -> bool:
    """Tell whether the current stream captures a CUDA graph: a synchronization would invalidate it."""
    module = in_use()
    asked = getattr(module, "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def synchronize(*, captured: bool = False) -> str:
    """Wait for all work of the current GPU, if one is in use; return why that was not possible, else "".

    Not in the capture of a CUDA graph. An error of the GPU's is the program's to see, at its next call.

    Args:
        captured: whether a graph is captured, on whatever thread.
    """
    module = in_use()
    if module is None:
        return ""
    try:
        if captured or capturing():
            return "a CUDA graph was captured where the window ended: kernels that still ran may be missing"
        module.synchronize()
    except Exception as error:
        if is_interrupt(error):
            raise
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"the GPU could not be synchronized where the window ended, so kernels may be missing: {what}"
    return ""
