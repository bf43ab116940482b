"""The API that the pretended GPU does not emulate, and how a call of it is answered.

Each call is a finding that names the function and `docs/dry-run.md`. A call whose result the program needs raises
the same sentence; any other call is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch

from .state import SyncLog

PAGE = "docs/dry-run.md"
_TUNABLE = "_cuda_tunableop_"
_WITHOUT_RESULT = re.compile(r"\w*enable|set_\w+|write_file_on_exit")  # without a result
_HOST = "torch.cuda.host_memory_stats"
# Functions of torch._C, each with the public function that calls it
_SKIPPED_FUNCTIONS = {
    "_cuda_record_untuned_enable": "torch.cuda.tunable.record_untuned_enable",
    "_cuda_resetAccumulatedHostMemoryStats": "torch.cuda.reset_accumulated_host_memory_stats",
    "_cuda_resetPeakHostMemoryStats": "torch.cuda.reset_peak_host_memory_stats",
    **{
        f"_nccl_{name}": f"torch.cuda.nccl.{name}"
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "init_rank")
    },
}
_RAISING_FUNCTIONS = {
    "_cuda_record_untuned_is_enabled": "torch.cuda.tunable.record_untuned_is_enabled",
    "_cuda_hostMemoryStats": _HOST,
    "_cuda_jiterator_compile_and_launch_kernel": "torch.cuda.jiterator",
    "_cuda_getCheckpointState": "a checkpoint of a CUDA memory pool",
    "_cuda_setCheckpointPoolState": "a checkpoint of a CUDA memory pool",
    "_construct_CUDA_Tensor_From_Storage_And_Metadata": "a checkpoint of a CUDA memory pool",
}
# Functions of torch._C that begin so call the driver, also those that a later version of torch adds
_DRIVER_PREFIXES = ("_cuda_", "_accelerator_", "_nccl_")
_GREEN = ("__init__", "create", "max_workqueue_concurrency")
# Functions that would query a driver
_RAISING_PUBLIC = ("list_gpu_processes", "memory_usage", "device_memory_used")


def unsupported(log: SyncLog, api: str, *, needed: bool = True) -> Callable[..., None]:
    """Return the replacement of a function that is not emulated.

    Args:
        log: records a call.
        api: the name of the function that the user called.
        needed: whether the program cannot go on without the result.
    """
    sentence = f"a dry run does not support {api}: see {PAGE}"

    def call(*_: Any, **__: Any) -> None:
        log.record_not_covered(sentence)
        if needed:
            raise RuntimeError(sentence)

    return call


def private_functions(log: SyncLog) -> dict[str, Any]:
    """Return the replacements of functions of ``torch._C``, by name."""
    skipped = {name: unsupported(log, api, needed=False) for name, api in _SKIPPED_FUNCTIONS.items()}
    tunable = {name.removeprefix(_TUNABLE) for name in vars(torch._C) if name.startswith(_TUNABLE)}
    for api in tunable.union(torch.cuda.tunable.__all__):  # a build for the CPU lacks the functions of torch._C
        needed = _WITHOUT_RESULT.fullmatch(api) is None
        skipped[_TUNABLE + api] = unsupported(log, f"torch.cuda.tunable.{api}", needed=needed)
    return skipped | {name: unsupported(log, api) for name, api in _RAISING_FUNCTIONS.items()}


def driver_functions(log: SyncLog) -> dict[str, Any]:
    """Return replacements of all functions of ``torch._C`` that call the driver, for those without another one."""
    return {
        name: unsupported(log, f"torch._C.{name}")
        for name, found in vars(torch._C).items()
        if name.startswith(_DRIVER_PREFIXES) and isinstance(found, BuiltinFunctionType)
    }


def public_functions(log: SyncLog) -> dict[Any, dict[str, Any]]:
    """Return the replacements of public functions, by the module or class that holds them."""

    def compile_kernel(source: str, name: str, *_: Any, **__: Any) -> Callable[..., None]:
        return unsupported(log, f"the CUDA kernel {name} of torch.cuda._compile_kernel", needed=False)

    readings = {name: unsupported(log, f"torch.cuda.{name}") for name in _RAISING_PUBLIC}
    green = unsupported(log, "torch.cuda.GreenContext")
    plan_cache: Any = torch.backends.cuda.cuFFTPlanCacheManager
    return {
        torch.cuda: {**readings, "_compile_kernel": compile_kernel},
        torch.cuda.memory: readings,
        getattr(torch.cuda, "GreenContext", None): dict.fromkeys(_GREEN, green),
        plan_cache: {"__getitem__": unsupported(log, "torch.backends.cuda.cufft_plan_cache")},
        torch: {"_cufft_clear_plan_cache": unsupported(log, "torch.backends.cuda.cufft_plan_cache")},
    }
