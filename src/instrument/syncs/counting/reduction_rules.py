"""Whether a reduction uses several blocks for one result, and so clears their semaphores by a memset before.

This is ``setReduceConfig`` in ``Reduce.cuh`` of torch, for a GPU with 108 multiprocessors, as an A100 has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .calls import Call, TensorInfo
from .launches import Launch, argument, registry, result_of, tensor

RULES, rule = registry()
_THREADS, _WARP, _MULTIPROCESSORS, _PER_MULTIPROCESSOR = 512, 32, 108, 2048
_FEWEST, _MOST = 16, 256  # values that a thread adds up
_AS_THEY_ARE = (torch.float16, torch.bfloat16, torch.complex32)  # are added up in a wider type without a copy


def last_power(number: int) -> int:
    """Return the greatest power of two up to ``number``."""
    return 1 << (max(number, 1).bit_length() - 1)


def uses_semaphores(shape: list[int], stride: list[int], reduced: list[bool], itemsize: int) -> bool:
    """Return whether several blocks compute one result.

    Args:
        shape: the sizes of the input.
        stride: its strides, in elements.
        reduced: for each dimension, whether it is reduced.
        itemsize: the bytes of an element.
    """
    dims = sorted(
        ((step, size, each) for size, step, each in zip(shape, stride, reduced, strict=True) if size != 1),
        key=lambda dim: (not dim[2], dim[0]),
    )
    inputs = outputs = 1
    for _, size, each in dims:
        inputs, outputs = (inputs * size, outputs) if each else (inputs, outputs * size)
    inner = [step for step, _, each in dims if each]
    outer = [step for step, _, each in dims if not each]
    fastest = not outer or (bool(inner) and inner[0] < outer[0])
    first, second, step = (inputs, outputs, inner[:1]) if fastest else (outputs, inputs, outer[:1])
    vector = 1
    if step == [1]:
        if fastest and first > 128 and len(_merged(dims)) == 1:
            first //= 4
        elif not fastest:
            vector = next(size for size in (4, 2, 1) if outputs % size == 0 and all(s % size == 0 for s in inner))
            first //= vector
    most = _THREADS // vector
    width_most, height_most = (min(last_power(size), most) for size in (first, second))
    width = min(width_most, _WARP)
    height = min(height_most, most // width)
    width = min(width_most, most // height)
    per_thread = -(-inputs // width) if fastest else inputs
    grid = outputs // vector if fastest else -(-(outputs // vector) // width)
    if per_thread >= min(height * 16, _MOST):
        per_thread = -(-per_thread // height)
    else:
        return False
    target = _MULTIPROCESSORS * (_PER_MULTIPROCESSOR // (width * height))
    if per_thread < _MOST or grid > target:
        return False
    return max(min(-(-target // grid), -(-per_thread // _FEWEST)), -(-per_thread // _MOST)) > 1


def _merged(dims: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Return the dimensions, with those merged that lie in memory as one."""
    result: list[tuple[int, int, bool]] = []
    for step, size, each in dims:
        if result and result[-1][2] == each and result[-1][0] * result[-1][1] == step:
            result[-1] = result[-1][0], result[-1][1] * size, each
        else:
            result.append((step, size, each))
    return result


def reduced_dims(info: TensorInfo, dims: object) -> list[bool]:
    """Return for each dimension whether an argument such as ``dim=(0, -1)`` names it; None and () name all."""
    rank = len(info.shape)
    if not isinstance(dims, (int, tuple)) or isinstance(dims, bool) or dims == ():
        return [True] * rank
    wanted = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)} if rank else set()
    return [dim in wanted for dim in range(rank)]


def reduction(info: TensorInfo, dims: object) -> Iterator[Launch]:
    """Yield the reduction of a tensor over dimensions."""
    if uses_semaphores(list(info.shape), list(info.stride), reduced_dims(info, dims), info.dtype.itemsize):
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
