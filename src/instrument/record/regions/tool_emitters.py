"""Regions as ranges of the vendors' tools: NVTX (Nsight Systems and Compute), ITT (VTune), rocTX (rocprofv3)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ...base import log
from ...base.compat.tools import nvtx_domain
from ...base.interrupts import is_interrupt
from .region import DOMAIN, Region


def _category(category: str | int | None) -> str | int | None:
    # NVTX numbers categories with 32 bits; a number beyond them becomes a name.
    return str(category) if isinstance(category, int) and not 0 <= category < 1 << 32 else category


def _payload(payload: Any) -> Any:
    # nvtx passes integers on as int64; one beyond that becomes the nearest float.
    if not isinstance(payload, int) or -(1 << 63) <= payload < 1 << 63:
        return payload
    try:
        return float(payload)
    except OverflowError:
        return math.copysign(math.inf, 1 if payload > 0 else -1)


class NvtxEmitter:
    """Emits registered strings with cached attributes: 60 ns a range while no tool records."""

    name = "nvtx"

    def __init__(self) -> None:
        try:
            import nvtx  # noqa: F401
        except ImportError:
            raise ImportError("nvtx is missing: pip install nvtx") from None
        self._domains: dict[str, Any] = {}
        self.domain(DOMAIN)

    def domain(self, name: str) -> Any:
        """Return the domain called ``name``, or None if the tool does not listen to it."""
        if name not in self._domains:
            self._domains[name] = nvtx_domain(name)  # kept, as the domain is destroyed with its last reference
        return self._domains[name]

    def _prepare(self, region: Region) -> tuple[Any, Any]:
        domain = self.domain(region.domain)
        category = _category(region.category)
        attributes = domain and domain.get_event_attributes(
            message=region.name, color=region.color, category=category
        )
        if attributes is not None and region.payload is not None:
            try:
                attributes.payload = _payload(region.payload)
            except Exception as error:  # show the range without it: nvtx needs numpy for anything but a number
                if is_interrupt(error):
                    raise
                log.warning("payload not shown", region=region.name, error=repr(error))
        prepared = region.prepared["nvtx"] = (domain, attributes)
        return prepared

    def push(self, region: Region) -> Any:
        """Push a range on this thread's stack."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        if domain is not None:
            domain.push_range(attributes)
        return domain

    def pop(self, domain: Any, /) -> None:
        """Pop the range."""
        if domain is not None:
            domain.pop_range()

    def start(self, region: Region) -> tuple[Any, int]:
        """Start a range that others may overlap."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        return domain, (domain.start_range(attributes) if domain is not None else 0)

    def end(self, handle: tuple[Any, int], /) -> None:
        """End the range."""
        domain, range_id = handle
        if domain is not None:
            domain.end_range(range_id)

    def mark(self, region: Region) -> None:
        """Show an instant."""
        domain, attributes = region.prepared.get("nvtx") or self._prepare(region)
        if domain is not None:
            domain.mark(attributes)


class NvtxStartEndEmitter(NvtxEmitter):
    """Emits ranges that belong to no thread instead of nested ones."""

    push = NvtxEmitter.start
    pop = NvtxEmitter.end


class IttEmitter:
    """Emits nested tasks, and overlapped tasks for code that is suspended; needs the package ittapi."""

    name = "itt"

    def __init__(self) -> None:
        try:
            import ittapi
        except ImportError:
            raise ImportError("ittapi is missing: pip install ittapi") from None
        self._itt = ittapi
        self._domains: dict[str, Any] = {}

    def _prepare(self, region: Region) -> tuple[Any, Any]:
        domain = self._domains.get(region.domain)
        if domain is None:
            domain = self._domains[region.domain] = self._itt.domain(region.domain)
        prepared = region.prepared["itt"] = (domain, self._itt.string_handle(region.name))
        return prepared

    def push(self, region: Region) -> Any:
        """Begin a task nested in this thread's current task."""
        domain, text = region.prepared.get("itt") or self._prepare(region)
        self._itt.task_begin(domain, text)
        return domain

    def pop(self, domain: Any) -> None:
        """End the task."""
        self._itt.task_end(domain)

    def start(self, region: Region) -> tuple[Any, Any]:
        """Begin a task that others may overlap."""
        domain, text = region.prepared.get("itt") or self._prepare(region)
        task = self._itt.id(domain)
        self._itt.task_begin_overlapped(domain, text, task)
        return domain, task

    def end(self, handle: tuple[Any, Any]) -> None:
        """End the task."""
        self._itt.task_end_overlapped(*handle)

    def mark(self, region: Region) -> None:
        """Show an instant as a task of zero length: ittapi has no markers."""
        self.pop(self.push(region))


# The profiler preloads its own library, which must win: symbols of the process itself are tried first.
ROCTX_LIBRARIES = (
    None, "librocprofiler-sdk-roctx.so", "librocprofiler-sdk-roctx.so.1", "libroctx64.so", "libroctx64.so.4",
)  # fmt: skip


def load_roctx() -> Any:
    """Return the rocTX library, the profiler's own if there is one; raise ImportError if none is found."""
    for name in ROCTX_LIBRARIES:
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
        library = load_roctx()
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
