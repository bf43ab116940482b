"""What tells NVIDIA's tools that a part to record begins or ends: cudaProfilerStart and cudaProfilerStop."""

from __future__ import annotations

import sys


def cuda_profiler(action: str) -> bool:
    """Call the one that ``action``, "start" or "stop", means; return whether there was anything to call it for.

    CPU builds of torch raise, and a process that has not used CUDA yet would get a context on the wrong device.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    getattr(cuda.profiler, action)()
    return True
