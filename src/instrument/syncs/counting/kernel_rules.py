"""What operators launch on CUDA where that depends on their arguments; each rule follows torch's code for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .calls import Call, TensorInfo
from .launches import (
    Launch,
    argument,
    as_contiguous,
    contiguous_stride,
    copy,
    is_contiguous,
    is_dense,
    tensor,
    tensors_at,
)

Rule = Callable[[Call], Iterator[Launch]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that makes a function the rule of the operators with these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _result(call: Call) -> TensorInfo:
    return next(each for each in call.results if each is not None)


@rule(
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh", "is_same_size",
    "record_stream", "_assert_tensor_metadata", "_assert_scalar", "sym_size", "transpose_", "squeeze_", "unsqueeze_",
    "t_", "detach_", "as_strided_", "swapaxes_", "_resize_output_", "is_pinned", "_has_compatible_shallow_copy_type",
)  # fmt: skip
def _nothing(call: Call) -> Iterator[Launch]:
    """Only memory or metadata."""
    yield from ()


@rule("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full", "scalar_tensor", "zero_")
def _filled(call: Call) -> Iterator[Launch]:
    info = _result(call) if call.results else tensor(call, 0)
    if info is not None and info.elements and info.memory == "gpu":
        yield Launch("fill")


@rule("fill_")
def _fill(call: Call) -> Iterator[Launch]:
    value = tensor(call, 1)
    if value is not None and value.memory != "gpu":
        value = None  # is read on the CPU
    if _result(call).elements:
        yield Launch("fill" if value is None else "copy")


@rule("copy_")
def _copy(call: Call) -> Iterator[Launch]:
    target, source = call.tensors[:2]
    yield from copy(target, source)


@rule("clone", "_to_copy", "contiguous")
def _clone(call: Call) -> Iterator[Launch]:
    source = tensor(call, 0)
    if source is not None:
        yield from copy(_result(call)._replace(number=-1), source)


@rule("_foreach_copy_")
def _foreach_copy(call: Call) -> Iterator[Launch]:
    for target, source in zip(tensors_at(call, 0), tensors_at(call, 1), strict=False):
        yield from copy(target, source)


@rule("_local_scalar_dense", "item")
def _item(call: Call) -> Iterator[Launch]:
    yield Launch("memcpy", call.tensors[0].dtype.itemsize, "gpu", "cpu")


def _for_blas(matrix: TensorInfo) -> Iterator[Launch]:
    """Yield the copy of a matrix whose rows or columns are not in one piece."""
    *_, rows, columns = matrix.shape
    *_, down, right = matrix.stride
    if not ((right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))):
        yield Launch("copy")


@rule("mm", "bmm", "_int_mm")
def _matmul(call: Call) -> Iterator[Launch]:
    one, other = call.tensors[:2]
    result = _result(call)
    if not result.elements:
        return
    if not one.elements:
        yield Launch("fill")
        return
    yield from _for_blas(one)
    yield from _for_blas(other)
    yield Launch("gemm")


@rule("addmm", "baddbmm", "addmm_", "baddbmm_", "addbmm", "_addmm_activation")
def _added_matmul(call: Call) -> Iterator[Launch]:
    added, one, other = call.tensors[:3]
    result = _result(call)
    if not result.elements:
        return
    epilogue = len(added.shape) == 1 and is_contiguous(added) and len(result.shape) == 2 and is_contiguous(result)
    epilogue = epilogue and result.dtype != torch.float64 and argument(call, 3) == 1
    if not epilogue and added.number != result.number:
        yield from copy(result._replace(number=-1), added._replace(shape=result.shape, stride=_expanded(added, result.shape)))
    if one.elements:
        yield from _for_blas(one)
        yield from _for_blas(other)
        yield Launch("gemm")


def _expanded(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    missing = len(shape) - len(info.shape)
    sizes = (1,) * missing + info.shape
    strides = (0,) * missing + info.stride
    return tuple(0 if size == 1 and wanted != 1 else step for size, step, wanted in zip(sizes, strides, shape, strict=True))
