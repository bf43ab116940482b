"""Detects the vendor's tool that this process runs under, by its environment variables, and its NVTX domains."""

from __future__ import annotations

import os
from typing import Any

TOOL_FREE_INJECTION = "./."  # the value of NVTX_INJECTION64_PATH by which a tool disables injection


def _any_set(*variables: str) -> bool:
    return any(os.environ.get(variable) for variable in variables)


def nvtx_injected() -> bool:
    """Return whether a tool injects its library into the NVTX of this process."""
    return os.environ.get("NVTX_INJECTION64_PATH", "") not in ("", TOOL_FREE_INJECTION)


def nsight_systems() -> bool:
    """Return whether this process runs under ``nsys profile`` or ``nsys launch``."""
    injected = os.environ.get("NVTX_INJECTION64_PATH", "") + os.environ.get("CUDA_INJECTION64_PATH", "")
    return _any_set("NSYS_PROFILING_SESSION_ID") or "ToolsInjection64" in injected


def nsight_compute() -> bool:
    """Return whether this process runs under ``ncu``."""
    return _any_set("NV_TPS_LAUNCH_TOKEN", "NV_COMPUTE_PROFILER_PERFWORKS_DIR")


def rocprof() -> bool:
    """Return whether this process runs under ``rocprofv3``."""
    return _any_set("ROCP_TOOL_LIBRARIES", "ROCPROF_OUTPUT_PATH")


def vtune() -> bool:
    """Return whether this process runs under VTune, or another collector of ITT."""
    return _any_set("INTEL_LIBITTNOTIFY64")


def gpu_tracer() -> str | None:
    """Return the tool that uses the GPU's only tracing interface (CUPTI, rocprofiler) in this process, or None."""
    if _any_set("CUDA_INJECTION64_PATH"):
        return "Nsight Systems"
    if nsight_compute():
        return "Nsight Compute"
    return "rocprofv3" if rocprof() else None


def nvtx_domain(name: str) -> Any:
    """Return the `nvtx.Domain` called ``name``, or None when no tool listens.

    nvtx asks the tool whether it listens. Nsight Systems up to 2024.2 does not answer, which nvtx takes as "no":
    every range would be lost. Under these versions the domain is created without that check.
    """
    import nvtx

    domain = nvtx.get_domain(name)
    if type(domain).__name__ != "DummyDomain":
        return domain
    if not nvtx_injected():
        return None
    from nvtx._lib import lib

    try:
        domain = object.__new__(lib.Domain)
        domain.handle = lib.DomainHandle(name)
        domain.__init__(name)
    except (AttributeError, TypeError):
        return None
    return domain
