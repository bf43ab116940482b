"""Regions as rocTX ranges: rocprofv3. rocTX has no domain, color, category or payload."""

from __future__ import annotations

import ctypes
from typing import Any

from ..region import Region

# The profiler preloads its own library, which must win: symbols of the process itself are tried first.
LIBRARIES = (
    None, "librocprofiler-sdk-roctx.so", "librocprofiler-sdk-roctx.so.1", "libroctx64.so", "libroctx64.so.4",
)  # fmt: skip


def load() -> Any:
    """Return the rocTX library, the profiler's own if there is one; raise ImportError if none is found."""
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "roctxRangePushA"):
            return library
    raise ImportError("no rocTX library found: install rocprofiler-sdk or roctracer (ROCm)")


class RoctxEmitter:
    """Calls rocTX through ctypes: 400 ns a range while no tool records."""

    name = "roctx"

    def __init__(self) -> None:
        library = load()
        self._push, self._pop = library.roctxRangePushA, library.roctxRangePop
        self._start, self._stop, self._mark = library.roctxRangeStartA, library.roctxRangeStop, library.roctxMarkA
        for function in (self._push, self._start, self._mark):
            function.argtypes = [ctypes.c_char_p]
        self._start.restype = ctypes.c_uint64
        self._stop.argtypes, self._stop.restype = [ctypes.c_uint64], None
        self._mark.restype = None

    def _text(self, region: Region) -> bytes:
        text = region.prepared.get("roctx")
        if text is None:
            text = region.prepared["roctx"] = region.name.encode("utf-8", "replace")
        return text

    def push(self, region: Region) -> None:
        """Push a range on this thread's stack."""
        self._push(self._text(region))

    def pop(self, _: None) -> None:
        """Pop the range."""
        self._pop()

    def start(self, region: Region) -> int:
        """Start a range that others may overlap."""
        return int(self._start(self._text(region)))

    def end(self, range_id: int) -> None:
        """End the range."""
        self._stop(range_id)

    def mark(self, region: Region) -> None:
        """Show an instant."""
        self._mark(self._text(region))
