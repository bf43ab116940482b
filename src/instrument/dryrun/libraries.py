"""The libraries around the pretended GPU: CUDA's runtime, cuDNN, NCCL, NVML and NVTX."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .memory import Memory
from .state import Observer

CUDNN_VERSION = 90100
NCCL_VERSION = 2 << 32 | 21 << 16 | 5
# What nvidia-smi shows for a busy GPU: %, degrees Celsius, mW, MHz. Megatron's straggler detector logs these four.
READINGS = {"utilization": 90, "temperature": 60, "power_draw": 300_000, "clock_rate": 1410}
NOT_EMULATED = "{} is not emulated, see docs/dry-run.md"
_JITERATOR = "kernels of torch.cuda.jiterator cannot run"
_POOL_STATE = "the state of a pool of GPU memory cannot be kept"


class Code(int):
    """A result of a function of CUDA's runtime."""

    success: Code


Code.success = Code(0)


class Cudart:
    """The CUDA runtime that `torch.cuda.cudart` returns; every function succeeds."""

    cudaError = Code  # noqa: N815

    def __init__(self, memory: Memory) -> None:
        self.cudaMemGetInfo = memory.info

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Return the text of an error."""
        return "no error" if code == 0 else "unknown error"

    def cudaStreamCreate(self, *_: Any) -> Code:  # noqa: N802
        """Do nothing."""
        return Code.success

    cudaStreamDestroy = cudaHostRegister = cudaHostUnregister = cudaStreamCreate  # noqa: N815
    cudaProfilerStart = cudaProfilerStop = cudaStreamCreate  # noqa: N815


class Nvtx:
    """NVTX ranges without effect, for CPU builds of torch, which lack the functions."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._numbers = itertools.count(1)

    def rangePushA(self, message: str) -> int:  # noqa: N802
        """Open a range; return how many were open before."""
        depth: int = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        return depth

    def rangePop(self) -> int:  # noqa: N802
        """Close a range; return how many are still open."""
        self._local.depth = max(getattr(self._local, "depth", 0) - 1, 0)
        return int(self._local.depth)

    def rangeStartA(self, message: str) -> int:  # noqa: N802
        """Return the number of a new range."""
        return next(self._numbers)

    def deviceRangeStart(self, message: str, stream: int) -> int:  # noqa: N802
        """Return the number of a new range."""
        return next(self._numbers)

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


def _into(targets: Sequence[Any], parts: Sequence[Any]) -> Sequence[Any]:
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part, non_blocking=True)
    return targets


class _State:
    """Settings by name, each with a setter and a getter."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def pair(self, setter: str, getter: str, value: Any) -> dict[str, Any]:
        self.values[getter] = value
        return {
            setter: lambda new, *_: self.values.update({getter: new}),
            getter: lambda: self.values[getter],
        }


def _settings() -> dict[str, Any]:
    state, private = _State(), torch._C
    return {
        **state.pair(
            "_set_linalg_preferred_backend", "_get_linalg_preferred_backend", private._LinalgBackend.Default
        ),
        **state.pair("_set_blas_preferred_backend", "_get_blas_preferred_backend", private._BlasBackend.Cublas),
        **state.pair("_cuda_set_sync_debug_mode", "_cuda_get_sync_debug_mode", 0),
        **state.pair("_cuda_set_cudnn_benchmark_limit", "_cuda_get_cudnn_benchmark_limit", 10),
        **state.pair("_cudnn_set_conv_benchmark_empty_cache", "_cuda_get_conv_benchmark_empty_cache", True),
        **state.pair("_cuda_setCublasWorkspaceSize", "_cuda_getCublasWorkspaceSize", 8 * 2**20),
        **state.pair("_cuda_setCublasLtWorkspaceSize", "_cuda_getCublasLtWorkspaceSize", 2**20),
    }


def _uncovered(observer: Observer, why: str, fatal: bool = False) -> Callable[..., None]:
    def answer(*_: Any, **__: Any) -> None:
        observer.note_uncovered(why)
        if fatal:  # there is no result to return
            raise RuntimeError(f"not covered by a dry run: {why}")

    return answer


def answers(observer: Observer) -> dict[str, Any]:
    """Return the functions of ``torch._C`` that call other libraries."""
    collectives = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "init_rank")
    return {
        **_settings(),
        "_cuda_getCurrentBlasHandle": lambda: 0x560001000000,
        "_cuda_getCurrentSolverHandle": lambda: 0x560002000000,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_resetCublasWorkspaceSize": lambda: None,
        "_cuda_resetCublasLtWorkspaceSize": lambda: None,
        "_cuda_getHipblasltVersion": lambda: 0,
        "_nccl_version": lambda: NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_unique_id": lambda: bytes(128),
        **{f"_nccl_{name}": _uncovered(observer, f"torch.cuda.nccl.{name} does nothing") for name in collectives},
        "_broadcast": lambda tensor, devices: [_to(tensor, index) for index in devices],
        "_broadcast_coalesced": lambda tensors, devices, size: [[_to(t, i) for t in tensors] for i in devices],
        "_broadcast_out": lambda tensor, targets: _into(targets, [tensor] * len(targets)),
        "_scatter": _scatter,
        "_scatter_out": lambda tensor, targets, dim, streams: _into(
            targets, tensor.split([target.size(dim) for target in targets], dim)
        ),
        "_gather": lambda tensors, dim, index: _to(torch.cat([*tensors], dim), 0 if index is None else index),
        "_gather_out": lambda tensors, target, dim: target.copy_(torch.cat([*tensors], dim)),
        "_cuda_jiterator_compile_and_launch_kernel": _uncovered(observer, _JITERATOR, fatal=True),
        "_cuda_getCheckpointState": _uncovered(observer, _POOL_STATE, fatal=True),
        "_cuda_setCheckpointPoolState": _uncovered(observer, _POOL_STATE, fatal=True),
    }


def compiler(observer: Observer) -> Callable[..., Callable[..., None]]:
    """Return a replacement of `torch.cuda._compile_kernel` whose kernels only note that they did not run."""
    return lambda source, name, *_, **__: _uncovered(observer, f"the CUDA kernel {name} cannot run")


class _NotEmulated:
    """Takes the place of an object whose attributes and items are not emulated.

    Args:
        observer: notes each use.
        name: the public name of the object.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        use = _uncovered(observer, NOT_EMULATED.format(name), fatal=True)
        self.__dict__["_use"] = use

    def __getattr__(self, name: str) -> Any:
        self._use()

    def __setattr__(self, name: str, value: Any) -> None:
        self._use()

    def __getitem__(self, index: Any) -> Any:
        self._use()


def _not_emulated(observer: Observer) -> dict[Any, dict[str, Any]]:
    """Return, by module, what raises when it is used: no known training script needs it."""

    def functions(module: str, names: Sequence[str]) -> dict[str, Any]:
        return {name: _uncovered(observer, NOT_EMULATED.format(f"{module}.{name}"), fatal=True) for name in names}

    cuda, tunable = torch.cuda, torch.cuda.tunable
    readings = functions("torch.cuda", ("memory_usage", "device_memory_used", "list_gpu_processes"))
    host = functions("torch.cuda", ("host_memory_stats", "host_memory_stats_as_nested_dict"))
    resets = functions("torch.cuda", ("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats"))
    return {
        cuda: readings | host | resets,
        cuda.memory: readings | host | resets,
        tunable: functions("torch.cuda.tunable", tunable.__all__),
        torch.backends.cuda: {"cufft_plan_cache": _NotEmulated(observer, "torch.backends.cuda.cufft_plan_cache")},
    }


def _activities() -> set[Any]:
    kinds = torch.profiler.ProfilerActivity
    return {kinds.CPU, kinds.CUDA}


def _emitting() -> dict[str, Any]:
    """Make `emit_nvtx` emit nothing instead of raising an error, where torch was built without CUDA."""
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


def public(observer: Observer) -> dict[Any, dict[str, Any]]:
    """Return, by module, replacements of functions that would search for a library themselves."""
    readings = {name: (lambda device=None, value=value: value) for name, value in READINGS.items()}
    profiling = {"_supported_activities": _activities}
    backends: Any = torch.backends
    cudnn = backends.cudnn.m  # the module behind the object that torch puts in its place
    refused = _not_emulated(observer)
    return {
        **refused,
        torch.cuda: {**readings, "_compile_kernel": compiler(observer), **refused[torch.cuda]},
        cudnn: {
            "version": lambda: CUDNN_VERSION,
            "is_available": lambda: True,
            "is_acceptable": lambda tensor: False,  # RNNs would hand their weights to cuDNN
        },
        torch.autograd: profiling,
        torch.autograd.profiler: profiling | _emitting(),
        torch.profiler: profiling,
    }
