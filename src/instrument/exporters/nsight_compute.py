"""Mark a window for Nsight Compute, which measures the kernels launched in it: nothing of ours is written.

``ncu --profile-from-start off --nvtx ...`` measures those of the windows alone.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import CaptureError
from .cuda_profiler import cuda_profiler


class NsightComputeExporter:
    """Calls cudaProfilerStart and cudaProfilerStop around the recorded steps of each window."""

    name = "nsight_compute"
    hint = "marked for Nsight Compute; once it wrote them: ncu --import REPORT.ncu-rep, or open it in ncu-ui"

    def prepare(self) -> None:
        """Nothing is slow here."""

    def capture(self) -> NsightComputeCapture:
        """Make the capture of one window."""
        return NsightComputeCapture()


class NsightComputeCapture:
    """Kernels from `start` to `stop`."""

    raw: Path | None = None

    def start(self) -> None:
        """Have kernels measured from here on."""
        if not cuda_profiler("start"):
            raise CaptureError("CUDA was not used before the window: have a step before it (wait, warmup)")

    def step(self, number: int | None) -> None:
        """A report knows regions and no steps."""

    def add_metadata(self, key: str, value: str) -> None:
        """A report has no place for it."""

    def stop(self) -> None:
        """Have no more kernels measured."""
        cuda_profiler("stop")

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Nothing to write: ncu does."""
        return []

    def discard(self) -> None:
        """Nothing was started."""
