"""The libraries around the pretended GPU: the CUDA runtime and its memory, cuDNN, NCCL, NVML, NVTX."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..counting.allocator import CachingAllocator
from .devices import GIB, TOTAL_MEMORY, Pretended, pool_handle
from .state import RunState

CUDNN_VERSION = 90100
NCCL_VERSION = 2 << 32 | 21 << 16 | 5
# Readings that frameworks log, of a busy GPU; `clock_rate` in MHz, `power_draw` in mW, `temperature` in degrees
READINGS = {
    "utilization": 90, "temperature": 60, "power_draw": 300_000, "clock_rate": 1410,
}  # fmt: skip


_FIGURES = SimpleNamespace(allocated=GIB, max_allocated=2 * GIB, reserved=4 * GIB, max_reserved=4 * GIB)
_DRIVER = GIB // 2  # what the driver uses itself
_COUNTS = ("allocation", "segment", "active", "inactive_split")
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


class MemoryFigures:
    """What torch says of the memory of the GPU; fixed figures of a model that fits while nothing is counted.

    Args:
        allocator: returns the allocator as it is now; None while nothing is counted.
    """

    def __init__(self, allocator: Callable[[], CachingAllocator | None]) -> None:
        self._allocator = allocator

    def stats(self) -> dict[str, Any]:
        """Return the counters of the caching allocator, nested as in torch; only sums of bytes are known."""
        now = self._allocator() or _FIGURES
        figures: dict[str, Any] = {name: _pools(256, 512) for name in _COUNTS}
        for name in ("allocated_bytes", "active_bytes", "requested_bytes"):
            figures[name] = _pools(now.allocated, now.max_allocated)
        figures["reserved_bytes"] = _pools(now.reserved, now.max_reserved)
        figures["inactive_split_bytes"] = _pools(now.reserved - now.allocated, now.max_reserved)
        figures.update(dict.fromkeys(_EVENTS, 0), max_split_size=-1)
        return {**figures, "oversize_allocations": _stat(0, 0), "oversize_segments": _stat(0, 0)}

    def free_and_total(self) -> tuple[int, int]:
        """Return the free and the total memory in bytes."""
        return max(TOTAL_MEMORY - (self._allocator() or _FIGURES).reserved - _DRIVER, 0), TOTAL_MEMORY

    def reset_peaks(self) -> None:
        """Begin with the peaks anew."""
        if (now := self._allocator()) is not None:
            now.reset_peaks()

    def release_cached(self) -> None:
        """Give back what is cached."""
        if (now := self._allocator()) is not None:
            now.release_cached()


class CudaResult(int):
    """A result code of the CUDA runtime."""

    success: CudaResult


CudaResult.success = CudaResult(0)


class Cudart:
    """The result of `torch.cuda.cudart`; every function succeeds."""

    cudaError = CudaResult  # noqa: N815

    def __init__(self, memory: MemoryFigures) -> None:
        self._memory = memory

    def cudaMemGetInfo(self, device: Any = None) -> tuple[int, int]:  # noqa: N802
        """Return free and total memory in bytes."""
        return self._memory.free_and_total()

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Return the text of an error."""
        return "no error" if code == 0 else "unknown error"

    def cudaStreamCreate(self, *_: Any) -> CudaResult:  # noqa: N802
        """Do nothing."""
        return CudaResult.success

    cudaStreamDestroy = cudaHostRegister = cudaHostUnregister = cudaStreamCreate  # noqa: N815
    cudaProfilerStart = cudaProfilerStop = cudaStreamCreate  # noqa: N815


class Nvtx(threading.local):  # each thread has its own ranges
    """Replaces the NVTX functions that a build for the CPU lacks; its ranges are not recorded."""

    depth = 0
    _numbers = itertools.count(1)  # of all threads

    def rangePushA(self, message: str) -> int:  # noqa: N802
        """Open a range; return the number of ranges open before."""
        self.depth += 1
        return self.depth - 1

    def rangePop(self) -> int:  # noqa: N802
        """Close a range; return the number of ranges still open."""
        self.depth = max(self.depth - 1, 0)
        return self.depth

    def rangeStartA(self, *_: Any) -> int:  # noqa: N802
        """Return the number of a new range."""
        return next(self._numbers)

    deviceRangeStart = rangeStartA  # noqa: N815

    def markA(self, *_: Any) -> None:  # noqa: N802
        """Do nothing."""

    rangeEnd = deviceRangeEnd = markA  # noqa: N815


def _to(tensor: Any, index: int) -> Any:
    return tensor.to("cpu" if index < 0 else torch.device("cuda", index), non_blocking=index >= 0)


def _scatter(
    tensor: Any, devices: Sequence[int], sizes: Any = None, dim: int = 0, streams: Any = None
) -> list[Any]:
    parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    return [_to(part, index) for part, index in zip(parts, devices, strict=False)]


def _copy_all(targets: Sequence[Any], parts: Sequence[Any]) -> Sequence[Any]:
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part, non_blocking=True)
    return targets


def replacements() -> dict[str, Any]:
    """Return the replacements of functions of ``torch._C`` that call other libraries."""
    private: Any = torch._C
    return {
        **setting(
            "_set_linalg_preferred_backend", "_get_linalg_preferred_backend", private._LinalgBackend.Default
        ),
        **setting("_set_blas_preferred_backend", "_get_blas_preferred_backend", private._BlasBackend.Cublas),
        **setting("_cuda_set_sync_debug_mode", "_cuda_get_sync_debug_mode", 0),
        **setting("_cuda_set_cudnn_benchmark_limit", "_cuda_get_cudnn_benchmark_limit", 10),
        **setting("_cudnn_set_conv_benchmark_empty_cache", "_cuda_get_conv_benchmark_empty_cache", True),
        **setting("_cuda_setCublasWorkspaceSize", "_cuda_getCublasWorkspaceSize", 8 * 2**20),
        **setting("_cuda_setCublasLtWorkspaceSize", "_cuda_getCublasLtWorkspaceSize", 2**20),
        "_cuda_getCurrentBlasHandle": lambda: 0x560001000000,
        "_cuda_getCurrentSolverHandle": lambda: 0x560002000000,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_resetCublasWorkspaceSize": lambda: None,
        "_cuda_resetCublasLtWorkspaceSize": lambda: None,
        "_cuda_getHipblasltVersion": lambda: 0,
        "_can_use_cudnn_attention": lambda parameters, debug=False: False,
        "_cudnn_clear_dropout_state": lambda: None,
        "_nccl_version": lambda: NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_unique_id": lambda: bytes(128),
        "_broadcast": lambda tensor, devices: [_to(tensor, index) for index in devices],
        "_broadcast_coalesced": lambda tensors, devices, size: [[_to(t, i) for t in tensors] for i in devices],
        "_broadcast_out": lambda tensor, targets: _copy_all(targets, [tensor] * len(targets)),
        "_scatter": _scatter,
        "_scatter_out": lambda tensor, targets, dim, streams: _copy_all(
            targets, tensor.split([target.size(dim) for target in targets], dim)
        ),
        "_gather": lambda tensors, dim, index: _to(torch.cat([*tensors], dim), 0 if index is None else index),
        "_gather_out": lambda tensors, target, dim: target.copy_(torch.cat([*tensors], dim)),
    }


def _activities() -> set[Any]:
    kinds = torch.profiler.ProfilerActivity
    return {kinds.CPU, kinds.CUDA}


def _emitting() -> dict[str, Any]:
    """Let `emit_nvtx` emit nothing if torch is built without CUDA, where it would raise."""
    profiler: Any = torch.autograd.profiler
    enable, disable = profiler._enable_profiler, profiler._disable_profiler
    refused: list[Any] = []

    def enable_profiler(config: Any, *given: Any) -> Any:
        try:
            return enable(config, *given)
        except RuntimeError as error:
            if "NVTX" not in str(error):
                raise
            refused.append(config)

    def disable_profiler() -> Any:
        return refused.pop() if refused else disable()

    return {"_enable_profiler": enable_profiler, "_disable_profiler": disable_profiler}


def public_functions() -> dict[Any, dict[str, Any]]:
    """Return, by module, the replacements of functions that load a library themselves."""
    readings = {name: (lambda device=None, value=value: value) for name, value in READINGS.items()}
    profiling = {"_supported_activities": _activities}
    backends: Any = torch.backends
    cudnn = backends.cudnn.m  # the module behind the object that handles assignments
    return {
        torch.cuda: readings,
        cudnn: {
            "version": lambda: CUDNN_VERSION,
            "is_available": lambda: True,
            "is_acceptable": lambda tensor: False,  # otherwise RNNs pass their weights to cuDNN
        },
        torch.autograd: profiling,
        torch.autograd.profiler: profiling | _emitting(),
        torch.profiler: profiling,
    }


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


def memory_replacements(log: RunState, devices: int, memory: MemoryFigures) -> dict[str, Any]:
    """Return the replacements of functions of ``torch._C`` about memory: settings are kept, addresses made up."""
    addresses = itertools.count(0x7F0000000000, 2**21)
    fractions: dict[int, float] = {}

    def snapshot(*_: Any) -> dict[str, Any]:
        traces: list[list[Any]] = [[] for _ in range(devices)]
        return {"segments": [], "device_traces": traces, "allocator_settings": {}, "external_annotations": []}

    def empty_cache() -> None:
        log.record_sync("empty_cache")
        memory.release_cached()

    def change_allocator(allocator: Any) -> None:
        log.record_not_covered("the program's own allocator is not used: tensors are in the CPU's memory")

    quiet = (
        "_cuda_resetAccumulatedMemoryStats",
        "_cuda_cudaCachingAllocator_raw_delete", "_cuda_attach_out_of_memory_observer",
        "_cuda_ipc_collect", "_cuda_annotateMemory",
        "_cuda_beginAllocateToPool", "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_beginAllocateCurrentStreamToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
        "_cuda_endAllocateCurrentStreamToPool", "_cuda_lock_mutex", "_cuda_unlock_mutex", "_host_emptyCache",
        "_accelerator_emptyHostCache", "_accelerator_resetAccumulatedStats",
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
        "_cuda_memoryStats": lambda device: memory.stats(),
        "_cuda_resetPeakMemoryStats": lambda device: memory.reset_peaks(),
        "_accelerator_resetPeakStats": lambda device: memory.reset_peaks(),
        "_cuda_memorySnapshot": snapshot,
        "_cuda_emptyCache": empty_cache,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        "_cuda_setMemoryFraction": lambda fraction, device: fractions.update({device: fraction}),
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: next(addresses),
        "_cuda_cudaHostAllocator": lambda: next(addresses),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getAllocator": object,
        "_cuda_customAllocator": lambda allocate, free: object(),
        "_cuda_changeCurrentAllocator": change_allocator,
        "_cuda_checkPoolLiveAllocations": lambda *_: True,
        "_cuda_allocationTraceback": lambda pointer: None,
        "_cuda_memoryMetadataSupported": lambda: True,
        "_graph_pool_handle": pool_handle,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_getDeviceStats": lambda device: memory.stats(),
        "_accelerator_getMemoryInfo": lambda device=None: memory.free_and_total(),
    }
