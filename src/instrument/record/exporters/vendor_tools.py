"""Exporters for vendors' tools: they resume and pause a tool that writes its files itself.

Started as below, a tool records only the windows:

- ``nsys profile -c nvtx -p 'capture@instrument' --capture-range-end=repeat:N ...``
- ``ncu --profile-from-start off --nvtx ...``
- ``rocprofv3 --selected-regions --marker-trace --kernel-trace ...``
- ``vtune -collect hotspots -start-paused ...``
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ...base.compat import gpu
from ...base.errors import CaptureError
from ...base.trace_marks import STEP_PREFIX, STEPS
from .. import gpu_wait
from ..regions.region import DOMAIN, Region, by_name
from ..regions.tool_emitters import IttEmitter, NvtxEmitter, RoctxEmitter, load_roctx

_ALL_THREADS = 0


class VendorCapture:
    """A capture whose files the tool writes, with a range for each step; records nothing itself.

    Args:
        emitter: shows the ranges of steps; None if the tool's results have none.
    """

    raw: Path | None = None

    def __init__(self, emitter: Any = None) -> None:
        self._emitter = emitter
        self._step: Any = None
        self.incomplete: list[str] = []

    def start(self) -> None:
        """Do nothing."""

    def step(self, number: int | None) -> None:
        """End the range of the current step, and begin one for step ``number``."""
        step, self._step = self._step, None
        if step is not None:
            self._emitter.end(step)
        if number is not None and self._emitter is not None:
            self._step = self._emitter.start(self._step_region(number))

    def _step_region(self, number: int) -> Region:
        return Region("step", by_name("step"))

    def add_metadata(self, key: str, value: str) -> None:
        """Do nothing: the tool's results have no place for metadata."""

    def stop(self) -> None:
        """Do nothing."""

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Return no files: the tool writes them when the program ends."""
        return []

    def discard(self) -> None:
        """Do nothing: nothing was started."""


class NsightComputeCapture(VendorCapture):
    """Measures the kernels that are launched between `start` and `stop`."""

    def start(self) -> None:
        """Start measuring kernels."""
        if not cuda_profiler("start"):
            raise CaptureError("CUDA was not used before the window: leave a step before it (wait, warmup)")

    def stop(self) -> None:
        """Stop measuring kernels."""
        cuda_profiler("stop")


class RocprofCapture(VendorCapture):
    """One window. The name of a step's range has its number, as rocTX has no payload."""

    def __init__(self, roctx: RoctxEmitter, resume: Any, pause: Any) -> None:
        super().__init__(roctx)
        self._resume, self._pause = resume, pause

    def start(self) -> None:
        """Resume the recording of all threads."""
        if code := self._resume(_ALL_THREADS):
            raise CaptureError(f"roctxProfilerResume failed with {code}")

    def _step_region(self, number: int) -> Region:
        name = f"{STEP_PREFIX}{number}"
        return Region(name, by_name(name))

    def stop(self) -> None:
        """Pause the recording once the GPU has finished the work launched so far."""
        try:
            self.incomplete = gpu_wait.synchronize()
        finally:
            self._pause(_ALL_THREADS)


class VtuneCapture(VendorCapture):
    """One window, in all processes that VTune follows."""

    def start(self) -> None:
        """Resume the collection."""
        import ittapi

        ittapi.resume()

    def stop(self) -> None:
        """Pause the collection."""
        import ittapi

        ittapi.pause()


class NsightSystemsCapture(VendorCapture):
    """Opens a range around one window; the range of a step has its number as payload."""

    _window: Any = None

    def start(self) -> None:
        """Open the capture range, and call cudaProfilerStart for tools that wait for it."""
        self._window = self._emitter.start(Region("capture", by_name("capture")))
        cuda_profiler("start")

    def _step_region(self, number: int) -> Region:
        return Region("step", by_name("step"), payload=number)

    def add_metadata(self, key: str, value: str) -> None:
        """Mark the steps of the window, which `read_trace` needs; a report has no place for other metadata."""
        if key == STEPS:
            self._emitter.mark(Region(f"{key}={value}", by_name(key)))

    def stop(self) -> None:
        """Close the capture range once the GPU has finished the work launched in it."""
        try:
            self.incomplete = gpu_wait.synchronize()
        finally:
            window, self._window = self._window, None  # `stop` is called again after an interrupt
            try:
                cuda_profiler("stop")
            finally:
                if window is not None:
                    self._emitter.end(window)


def cuda_profiler(action: Literal["start", "stop"]) -> bool:
    """Call cudaProfilerStart or cudaProfilerStop; return False, without a call, if CUDA is not in use.

    CPU builds of torch raise, and a process that has not used CUDA would get a context on the wrong device.
    """
    profiler = getattr(gpu.in_use(), "profiler", None)
    if profiler is None:
        return False
    getattr(profiler, action)()
    return True


class VendorExporter:
    """Makes the captures of one tool; the manifest has its ``name``, and users read its ``hint``."""

    def __init__(self, name: str, hint: str, capture: Callable[[], VendorCapture]) -> None:
        self.name = name
        self.hint = hint
        self.capture = capture

    def prepare(self) -> None:
        """Do nothing: the first capture is as fast as the next."""


def _nsight_systems() -> VendorExporter:
    nvtx = NvtxEmitter()

    def capture() -> VendorCapture:
        if nvtx.domain(DOMAIN) is None:
            raise CaptureError("Nsight Systems does not trace NVTX: add nvtx to its option --trace")
        return NsightSystemsCapture(nvtx)

    hint = "marked for Nsight Systems; once written: instrument summarize REPORT.nsys-rep, or nsys-ui"
    return VendorExporter("nsight_systems", hint, capture)


def _nsight_compute() -> VendorExporter:
    hint = "marked for Nsight Compute; once written: ncu --import REPORT.ncu-rep, or open it in ncu-ui"
    return VendorExporter("nsight_compute", hint, NsightComputeCapture)


def _rocprof() -> VendorExporter:
    roctx, library = RoctxEmitter(), load_roctx()

    def capture() -> VendorCapture:
        try:
            resume, pause = library.roctxProfilerResume, library.roctxProfilerPause
        except AttributeError:
            raise CaptureError(
                "this rocTX library lacks roctxProfilerResume: windows need the library of rocprofiler-sdk"
            ) from None
        resume.argtypes = pause.argtypes = [ctypes.c_uint64]
        return RocprofCapture(roctx, resume, pause)

    hint = "marked for rocprofv3; once written: instrument summarize NAME_results.db"
    return VendorExporter("rocprof", hint, capture)


def _vtune() -> VendorExporter:
    hint = "marked for VTune; once written: vtune -report summary -r RESULT, or open it in vtune-gui"
    return VendorExporter("vtune", hint, functools.partial(VtuneCapture, IttEmitter()))


VENDOR_EXPORTERS: Mapping[str, Callable[[], VendorExporter]] = {
    "nsight_systems": _nsight_systems,
    "nsight_compute": _nsight_compute,
    "rocprof": _rocprof,
    "vtune": _vtune,
    "none": lambda: VendorExporter("none", "", VendorCapture),
}
