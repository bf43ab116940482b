"""Exporters for tools that record a window themselves: Nsight Compute, rocprofv3 and VTune.

Each exporter resumes and pauses its tool and writes no files. Started as below, a tool records only the windows:

- ``ncu --profile-from-start off --nvtx ...``
- ``rocprofv3 --selected-regions --marker-trace --kernel-trace ...``
- ``vtune -collect hotspots -start-paused ...``

`NsightSystemsExporter` has a module of its own, as it also writes the window and its steps into the report.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from .. import gpu_wait
from ..cuda_graphs import cuda_graphs
from ..errors import CaptureError
from ..regions.emitters.itt import IttEmitter
from ..regions.emitters.roctx import RoctxEmitter, load
from ..regions.region import Region, by_name
from ..trace_marks import STEP_PREFIX
from .cuda_profiler import cuda_profiler

_ALL_THREADS = 0


class VendorCapture:
    """Base class of captures whose files the tool writes; subclasses define `start` and `stop`."""

    raw: Path | None = None

    def step(self, number: int | None) -> None:
        """Do nothing: the tool's results have no steps."""

    def add_metadata(self, key: str, value: str) -> None:
        """Do nothing: the tool's results have no place for metadata."""

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Return no files: the tool writes them when the program ends."""
        return []

    def discard(self) -> None:
        """Do nothing: nothing was started."""


class NsightComputeExporter:
    """Calls cudaProfilerStart and cudaProfilerStop around the recorded steps of each window."""

    name = "nsight_compute"
    hint = "marked for Nsight Compute; once written: ncu --import REPORT.ncu-rep, or open it in ncu-ui"

    def prepare(self) -> None:
        """Do nothing: the first capture is as fast as the next."""

    def capture(self) -> NsightComputeCapture:
        """Make the capture of one window."""
        return NsightComputeCapture()


class NsightComputeCapture(VendorCapture):
    """Measures the kernels that are launched between `start` and `stop`."""

    def start(self) -> None:
        """Start measuring kernels."""
        if not cuda_profiler("start"):
            raise CaptureError("CUDA was not used before the window: leave a step before it (wait, warmup)")

    def stop(self) -> None:
        """Stop measuring kernels."""
        cuda_profiler("stop")


class RocprofExporter:
    """Calls roctxProfilerResume and roctxProfilerPause around the recorded steps of each window."""

    name = "rocprof"
    hint = "marked for rocprofv3; once written: instrument summarize NAME_results.db"

    def __init__(self) -> None:
        self._roctx = RoctxEmitter()
        self._library = load()

    def prepare(self) -> None:
        """Do nothing: the first capture is as fast as the next."""

    def capture(self) -> RocprofCapture:
        """Make the capture of one window."""
        try:
            resume, pause = self._library.roctxProfilerResume, self._library.roctxProfilerPause
        except AttributeError:
            raise CaptureError(
                "this rocTX library lacks roctxProfilerResume: windows need the library of rocprofiler-sdk"
            ) from None
        resume.argtypes = pause.argtypes = [ctypes.c_uint64]
        return RocprofCapture(self._roctx, resume, pause)


class RocprofCapture(VendorCapture):
    """One window, with a range for each step. Its name has the step's number, as rocTX has no payload."""

    def __init__(self, roctx: RoctxEmitter, resume: Any, pause: Any) -> None:
        self._roctx, self._resume, self._pause = roctx, resume, pause
        self.incomplete: list[str] = []
        self._step: int | None = None

    def start(self) -> None:
        """Resume the recording of all threads."""
        if code := self._resume(_ALL_THREADS):
            raise CaptureError(f"roctxProfilerResume failed with {code}")

    def step(self, number: int | None) -> None:
        """Close the range of the current step and open one for step ``number``."""
        if self._step is not None:
            self._roctx.end(self._step)
            self._step = None
        if number is not None:
            name = f"{STEP_PREFIX}{number}"
            self._step = self._roctx.start(Region(name, by_name(name)))

    def stop(self) -> None:
        """Pause the recording once the GPU has finished the work launched so far."""
        try:
            self.incomplete = gpu_wait.synchronize(captured=cuda_graphs.capturing)
        finally:
            self._pause(_ALL_THREADS)


class VtuneExporter:
    """Resumes the collection for the recorded steps of each window, and pauses it after them."""

    name = "vtune"
    hint = "marked for VTune; once written: vtune -report summary -r RESULT, or open it in vtune-gui"

    def __init__(self) -> None:
        self._itt = IttEmitter()

    def prepare(self) -> None:
        """Do nothing: the first capture is as fast as the next."""

    def capture(self) -> VtuneCapture:
        """Make the capture of one window."""
        return VtuneCapture(self._itt)


class VtuneCapture(VendorCapture):
    """One window, with a task "step" for each step."""

    def __init__(self, itt: IttEmitter) -> None:
        self._itt = itt
        self._step: Any = None

    def start(self) -> None:
        """Resume the collection, in all processes that VTune follows."""
        import ittapi

        ittapi.resume()

    def step(self, number: int | None) -> None:
        """End the task of the current step and begin one for the next."""
        if self._step is not None:
            self._itt.end(self._step)
            self._step = None
        if number is not None:
            self._step = self._itt.start(Region("step", by_name("step")))

    def stop(self) -> None:
        """Pause the collection."""
        import ittapi

        ittapi.pause()
