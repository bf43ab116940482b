"""What reductions launch on CUDA: where several blocks share a result, a memset clears their semaphores before."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .calls import Call, TensorInfo
from .cuda_memory import A100
from .launches import Launch, argument, registry, result_of, tensor
from .reductions import shared_bytes

RULES, rule = registry()
_AS_THEY_ARE = (torch.float16, torch.bfloat16, torch.complex32)  # are added up in a wider type without a copy


def _reduced_dims(info: TensorInfo, dims: object) -> tuple[int, ...] | None:
    """Return the dimensions that an argument such as ``dim=(0, -1)`` names; None for all, as None and () mean."""
    if not isinstance(dims, (int, tuple)) or isinstance(dims, bool) or dims == () or not info.shape:
        return None
    return tuple({dim % len(info.shape) for dim in ([dims] if isinstance(dims, int) else dims)})


def reduction(info: TensorInfo, named: object) -> Iterator[Launch]:
    """Yield the reduction of a tensor over dimensions, as an argument names them."""
    dims = _reduced_dims(info, named)
    if shared_bytes(info.shape, info.stride, dims, 0, 1, A100.multiprocessors, A100.threads):
        yield Launch("memset")
    yield Launch("reduction")


@rule(
    "sum",
    "mean",
    "nansum",
    "prod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "amax",
    "amin",
    "aminmax",
    "logsumexp",
    "argmax",
    "argmin",
    "all",
    "any",
    "linalg_vector_norm",
    "max",
    "min",
)
def _reduction(call: Call) -> Iterator[Launch]:
    info = tensor(call, 0)
    if info is None or not any(each is not None and each.elements for each in call.results):
        return
    name = call.name.rpartition("::")[2]
    if tensor(call, 1) is not None:  # of two tensors
        yield Launch("elementwise")
        return
    if not info.elements:
        yield Launch("fill")
        return
    result = result_of(call)
    single = info.elements == 1 and len(info.shape) <= 1 and info.dtype == result.dtype
    if name in ("max", "min", "any", "all") and single:
        yield Launch("memcpy", info.dtype.itemsize)
        if len(call.results) > 1:
            yield Launch("fill")
        return
    converts = name in ("sum", "mean", "prod", "nansum") and info.dtype != result.dtype
    if converts and not (info.dtype in _AS_THEY_ARE and result.dtype == torch.float32):
        yield Launch("copy")
        info = info._replace(dtype=result.dtype)
    dims = argument(call, 2 if name == "linalg_vector_norm" else 1)
    yield from reduction(info, dims)
