"""Marks windows for Nsight Systems, which records them and writes the files.

``nsys profile -c nvtx -p 'capture@instrument' --capture-range-end=repeat:N ...`` records only the windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import gpu_wait
from ..cuda_graphs import cuda_graphs
from ..errors import CaptureError
from ..regions.emitters.nvtx import NvtxEmitter
from ..regions.region import DOMAIN, Region, by_name
from ..trace_marks import STEPS
from .cuda_profiler import cuda_profiler


class NsightSystemsExporter:
    """Opens an NVTX range ``capture@instrument`` around the recorded steps of each window."""

    name = "nsight_systems"
    hint = "marked for Nsight Systems; once written: instrument summarize REPORT.nsys-rep, or nsys-ui"

    def __init__(self) -> None:
        self._nvtx = NvtxEmitter()

    def prepare(self) -> None:
        """Do nothing: the first capture is as fast as the next."""

    def capture(self) -> NsightSystemsCapture:
        """Make the capture of one window."""
        if self._nvtx.domain(DOMAIN) is None:
            raise CaptureError("Nsight Systems does not trace NVTX: add nvtx to its option --trace")
        return NsightSystemsCapture(self._nvtx)


class NsightSystemsCapture:
    """Opens a range around one window, and in it a range "step" with the number as payload for each step."""

    def __init__(self, nvtx: NvtxEmitter) -> None:
        self._nvtx = nvtx
        self.raw: Path | None = None
        self.incomplete: list[str] = []
        self._window: Any = None
        self._step: Any = None

    def start(self) -> None:
        """Open the capture range, and call cudaProfilerStart for tools that wait for it."""
        self._window = self._nvtx.start(Region("capture", by_name("capture")))
        cuda_profiler("start")

    def step(self, number: int | None) -> None:
        """End the range of the current step, and begin one for step ``number``."""
        if self._step is not None:
            self._nvtx.end(self._step)
            self._step = None
        if number is not None:
            self._step = self._nvtx.start(Region("step", by_name("step"), payload=number))

    def add_metadata(self, key: str, value: str) -> None:
        """Mark the steps of the window, which `read_trace` needs; a report has no place for other metadata."""
        if key == STEPS:
            self._nvtx.mark(Region(f"{key}={value}", by_name(key)))

    def stop(self) -> None:
        """Close the capture range once the GPU has finished the work launched in it."""
        try:
            self.incomplete = gpu_wait.synchronize(captured=cuda_graphs.capturing)
        finally:
            window, self._window = self._window, None  # `stop` is called again after an interrupt
            try:
                cuda_profiler("stop")
            finally:
                if window is not None:
                    self._nvtx.end(window)

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Return no files: nsys writes them."""
        return []

    def discard(self) -> None:
        """Do nothing: nothing was started."""
