"""Mark a window for rocprofv3, which records it: nothing of ours is written.

``rocprofv3 --selected-regions --marker-trace --kernel-trace ...`` records the windows alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from .. import gpu
from ..cuda_graphs import cuda_graphs
from ..errors import CaptureError
from ..regions.emitters.roctx import RoctxEmitter, load
from ..regions.region import Region, by_name

_ALL_THREADS = 0


class RocprofExporter:
    """Calls roctxProfilerResume and roctxProfilerPause around the recorded steps of each window."""

    name = "rocprof"
    hint = "marked for rocprofv3; once it wrote them: instrument summarize NAME_results.db"

    def __init__(self) -> None:
        self._roctx = RoctxEmitter()
        self._library = load()

    def prepare(self) -> None:
        """Nothing is slow here."""

    def capture(self) -> RocprofCapture:
        """Make the capture of one window."""
        try:
            resume, pause = self._library.roctxProfilerResume, self._library.roctxProfilerPause
        except AttributeError:
            raise CaptureError(
                "this rocTX library has no roctxProfilerResume: windows need that of rocprofiler-sdk"
            ) from None
        resume.argtypes = pause.argtypes = [ctypes.c_uint64]
        return RocprofCapture(self._roctx, resume, pause)


class RocprofCapture:
    """One window, with a range around each step, called as torch.profiler calls it: rocTX has no payload."""

    def __init__(self, roctx: RoctxEmitter, resume: Any, pause: Any) -> None:
        self._roctx, self._resume, self._pause = roctx, resume, pause
        self.raw: Path | None = None
        self.incomplete: list[str] = []
        self._step: int | None = None

    def start(self) -> None:
        """Record from here on."""
        if code := self._resume(_ALL_THREADS):
            raise CaptureError(f"roctxProfilerResume failed with {code}")

    def step(self, number: int | None) -> None:
        """End the step that is recorded, and begin ``number``."""
        if self._step is not None:
            self._roctx.end(self._step)
            self._step = None
        if number is not None:
            name = f"ProfilerStep#{number}"
            self._step = self._roctx.start(Region(name, by_name(name)))

    def add_metadata(self, key: str, value: str) -> None:
        """A database of rocprofv3 has no place for it."""

    def stop(self) -> None:
        """Record no more, once the GPU has done what was launched so far."""
        try:
            self.incomplete = gpu.synchronize(captured=cuda_graphs.capturing)
        finally:
            self._pause(_ALL_THREADS)

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Nothing to write: rocprofv3 does."""
        return []

    def discard(self) -> None:
        """Nothing was started."""
