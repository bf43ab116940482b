"""`cuda_profiler`: calls cudaProfilerStart and cudaProfilerStop, which start and stop NVIDIA's tools."""

from __future__ import annotations

from typing import Literal

from .. import gpu


def cuda_profiler(action: Literal["start", "stop"]) -> bool:
    """Call cudaProfilerStart or cudaProfilerStop; return False, without a call, if CUDA is not in use.

    CPU builds of torch raise, and a process that has not used CUDA would get a context on the wrong device.
    """
    profiler = getattr(gpu.in_use(), "profiler", None)
    if profiler is None:
        return False
    getattr(profiler, action)()
    return True
