"""`TorchProfilerApi`: the methods of `torch.profiler.profile` that scripts call on a profile."""

from __future__ import annotations

import os
from typing import Any

from ...base.errors import CaptureError
from ...base.guard import guard
from .recording import Recording


class TorchProfilerApi:
    """Methods of `torch.profiler.profile`, which apply to the last window."""

    _recording: Recording | None = None  # of the open window
    _last_capture: Any = None  # of the last recorded window
    _metadata: dict[str, str] = {}  # noqa: RUF012  # each profile that is made has its own

    def export_chrome_trace(self, path: str | os.PathLike[str], use_python_export: bool = False) -> None:
        """Copy the trace of the last window to ``path``, gzipped if it ends in ".gz".

        ``use_python_export``, which torch's own handlers pass from torch 2.13 on, changes nothing.
        """
        self._recorded("export_chrome_trace").export(os.fspath(path))

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the trace of each window that ends from now on."""
        for name, text in (("key", key), ("value", value)):
            if not isinstance(text, str):
                raise TypeError(f'"{name}" must be a string: {text!r}')
        self._metadata[key] = value
        recording = self._recording
        if recording is not None and recording.start_ns is not None and recording.end_ns is None:
            with guard.contained("adding metadata"):
                recording.capture.add_metadata(key, value)

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `torch.profiler.profile.key_averages`: 30 s and 2 GB for 500,000 events."""
        return self._recorded("key_averages").profiler.key_averages(*args, **kwargs)

    def events(self) -> Any:
        """Return the result of `torch.profiler.profile.events`."""
        return self._recorded("events").profiler.events()

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total") -> Any:
        """Export stacks like `torch.profiler.profile.export_stacks`."""
        return self._recorded("export_stacks").profiler.export_stacks(path, metric)

    def export_memory_timeline(self, path: str, device: str | None = None) -> Any:
        """Export the memory timeline like `torch.profiler.profile.export_memory_timeline`."""
        return self._recorded("export_memory_timeline").profiler.export_memory_timeline(path, device)

    def _recorded(self, method: str) -> Any:
        if not hasattr(self._last_capture, "profiler"):
            raise CaptureError(f"{method}: no window was recorded by torch.profiler so far")
        return self._last_capture
