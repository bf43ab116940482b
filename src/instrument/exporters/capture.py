"""What an exporter is, and which one a process should use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

EXPORTERS = ("torch_profiler", "nsight_systems")


class Capture(Protocol):
    """One window's recording. All but the function that `save` returns is called on one thread.

    A capture is made when the window's warm-up begins, or its first recorded step if it has none.
    """

    def start(self) -> None:
        """Record from here on."""

    def step(self, number: int | None) -> None:
        """The recorded step ``number`` begins, or with None the last one ended."""

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into what is being recorded, where it has a place for it; called just before `stop`."""

    def stop(self) -> None:
        """Record no more."""

    def save(self, folder: Path, stem: str) -> Callable[[], list[Path]]:
        """Write what must be written at once; the function returned does the rest, on another thread.

        It returns the files in ``folder``, none where the tool itself writes them later.
        """

    def discard(self) -> None:
        """End a capture that never started."""


class Exporter(Protocol):
    """Makes captures; ``name`` is what the manifest calls it."""

    name: str
    hint: str  # where to find what was recorded, when the exporter has no files of its own

    def prepare(self) -> None:
        """Do what is slow the first time, before the loop begins."""

    def capture(self) -> Capture:
        """Make the capture of one window."""


def under_nsight_systems(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process runs under ``nsys profile`` (or ``nsys launch``)."""
    injected = environ.get("NVTX_INJECTION64_PATH", "") + environ.get("CUDA_INJECTION64_PATH", "")
    return bool(environ.get("NSYS_PROFILING_SESSION_ID")) or "ToolsInjection64" in injected


def gpu_tool(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the tool that holds the GPU's one tracing interface (CUPTI, rocprofiler) in this process."""
    if environ.get("CUDA_INJECTION64_PATH"):
        return "Nsight Systems"
    if environ.get("NV_TPS_LAUNCH_TOKEN") or environ.get("NV_COMPUTE_PROFILER_PERFWORKS_DIR"):
        return "Nsight Compute"
    if environ.get("ROCP_TOOL_LIBRARIES"):
        return "rocprofv3"
    return None


def choose(exporter: str | Exporter, options: Mapping[str, Any]) -> Exporter:
    """Return the exporter called for.

    Args:
        exporter: "auto" (Nsight Systems in a process under nsys, else torch.profiler), a name out of
            `EXPORTERS`, or an exporter.
        options: arguments for `torch.profiler.profile`.

    Raises:
        ValueError: an unknown name.
        TypeError: not an exporter; or ``options`` that torch.profiler does not take.
    """
    if exporter == "auto":
        exporter = "nsight_systems" if under_nsight_systems() else "torch_profiler"
    if exporter == "nsight_systems":
        from .nsight_systems import NsightSystemsExporter

        return NsightSystemsExporter()
    if exporter == "torch_profiler":
        from .torch_profiler import TorchProfilerExporter

        return TorchProfilerExporter(options)
    if isinstance(exporter, str):
        raise ValueError(f'"exporter" must be "auto", one of {", ".join(EXPORTERS)}, or an exporter: {exporter!r}')
    if not hasattr(exporter, "capture"):
        raise TypeError(f'"exporter" must be a name or an object with a method "capture": {exporter!r}')
    return exporter
