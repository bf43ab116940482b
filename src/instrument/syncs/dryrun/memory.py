"""Memory of the pretended GPU: constant figures of a model that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .devices import GIB, TOTAL_MEMORY
from .streams import Pretended, Streams, pool_handle

ALLOCATED, PEAK, RESERVED = 1 * GIB, 2 * GIB, 4 * GIB
_FREE = TOTAL_MEMORY - RESERVED - GIB // 2  # less what the driver uses itself
_COUNTS = ("allocation", "segment", "active", "inactive_split")
_BYTES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
_EVENTS = (
    "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
    "num_oom_rejections",
)  # fmt: skip


def _stat(current: int, peak: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": 2 * peak, "freed": 2 * peak - current}


def _pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    small, small_peak = current // 64, peak // 64
    large = _stat(current - small, peak - small_peak)
    return {"all": _stat(current, peak), "small_pool": _stat(small, small_peak), "large_pool": large}


def stats() -> dict[str, Any]:
    """Return the counters of the caching allocator, nested as in torch."""
    figures: dict[str, Any] = {name: _pools(256, 512) for name in _COUNTS}
    figures.update({name: _pools(ALLOCATED, PEAK) for name in _BYTES})
    figures["reserved_bytes"] = _pools(RESERVED, RESERVED)
    figures.update(dict.fromkeys(_EVENTS, 0), max_split_size=-1)
    return {**figures, "oversize_allocations": _stat(0, 0), "oversize_segments": _stat(0, 0)}


def setting(setter: str, getter: str, value: Any, kind: Callable[[Any], Any] = lambda new: new) -> dict[str, Any]:
    """Return the functions ``setter`` and ``getter`` of a setting, whose first value is ``value``."""
    held = [value]

    def keep(new: Any, *_: Any, **__: Any) -> None:
        held[0] = kind(new)

    return {setter: keep, getter: lambda: held[0]}


class Pool(Pretended):
    """A pretended `torch.cuda.MemPool`."""

    def __init__(self, kind: Any, allocator: Any = None) -> None:
        super().__init__(kind)
        self.allocator = allocator
        self.id = pool_handle()

    def use_count(self) -> int:
        """Return the number of users of the pool."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Return the segments of the pool: none."""
        return []


class Memory:
    """The caching allocator: keeps its settings, and returns made-up addresses."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._addresses = itertools.count(0x7F0000000000, 2**21)
        self._fraction: dict[int, float] = {}

    def info(self, device: Any = None) -> tuple[int, int]:
        """Return free and total memory in bytes."""
        return _FREE, TOTAL_MEMORY

    def empty_cache(self) -> None:
        """Record the synchronization that freeing cached memory causes."""
        self._streams.log.record_sync("empty_cache")

    def snapshot(self, *_: Any) -> dict[str, Any]:
        """Return an empty memory snapshot: no segments, no history."""
        traces: list[list[Any]] = [[] for _ in range(self._streams.devices.count)]
        return {"segments": [], "device_traces": traces, "allocator_settings": {}, "external_annotations": []}

    def change_allocator(self, allocator: Any) -> None:
        """Record that the program's own allocator is not used."""
        self._streams.log.record_not_covered(
            "the program's own allocator is not used: tensors are in the CPU's memory"
        )

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of functions of ``torch._C`` about memory."""
        quiet = (
            "_cuda_resetAccumulatedMemoryStats", "_cuda_resetPeakMemoryStats",
            "_cuda_cudaCachingAllocator_raw_delete", "_cuda_attach_out_of_memory_observer",
            "_cuda_ipc_collect", "_cuda_annotateMemory",
            "_cuda_beginAllocateToPool", "_cuda_beginAllocateCurrentThreadToPool",
            "_cuda_beginAllocateCurrentStreamToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
            "_cuda_endAllocateCurrentStreamToPool", "_cuda_lock_mutex", "_cuda_unlock_mutex", "_host_emptyCache",
            "_accelerator_emptyHostCache", "_accelerator_resetAccumulatedStats", "_accelerator_resetPeakStats",
        )  # fmt: skip
        settings = setting("_accelerator_setAllocatorSettings", "_accelerator_getAllocatorSettings", "")
        history = setting("_cuda_record_memory_history_legacy", "_cuda_isHistoryEnabled", False, bool)
        keep_history = history["_cuda_record_memory_history_legacy"]
        return {
            **dict.fromkeys(quiet, lambda *_, **__: None),
            **setting("_cuda_cudaCachingAllocator_enable", "_cuda_cudaCachingAllocator_is_enabled", True),
            **setting("_cuda_setMemoryMetadata", "_cuda_getMemoryMetadata", ""),
            **settings,
            **history,
            "_cuda_record_memory_history": lambda enabled=None, *_, **__: keep_history(enabled),
            "_cuda_cudaCachingAllocator_set_allocator_settings": settings["_accelerator_setAllocatorSettings"],
            "_cuda_memoryStats": lambda device: stats(),
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_emptyCache": self.empty_cache,
            "_cuda_getMemoryFraction": lambda device: self._fraction.get(device, 1.0),
            "_cuda_setMemoryFraction": lambda fraction, device: self._fraction.update({device: fraction}),
            "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: next(self._addresses),
            "_cuda_cudaHostAllocator": lambda: next(self._addresses),
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_getAllocator": object,
            "_cuda_customAllocator": lambda allocate, free: object(),
            "_cuda_changeCurrentAllocator": self.change_allocator,
            "_cuda_checkPoolLiveAllocations": lambda *_: True,
            "_cuda_allocationTraceback": lambda pointer: None,
            "_cuda_memoryMetadataSupported": lambda: True,
            "_graph_pool_handle": pool_handle,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_emptyCache": self.empty_cache,
            "_accelerator_getDeviceStats": lambda device: stats(),
            "_accelerator_getMemoryInfo": self.info,
        }
