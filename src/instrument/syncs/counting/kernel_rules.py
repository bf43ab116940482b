"""What operators launch on CUDA where that depends on their arguments; each rule follows torch's code for CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .calls import Call, TensorInfo
from .launches import Launch, argument, copy, is_contiguous, registry, result_of, tensor, tensors_at

RULES, rule = registry()


@rule(
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh",
    "is_same_size", "record_stream", "_assert_tensor_metadata", "_assert_scalar", "sym_size", "transpose_",
    "squeeze_", "unsqueeze_", "t_", "detach_", "as_strided_", "swapaxes_", "_resize_output_", "is_pinned",
    "_has_compatible_shallow_copy_type",
)  # fmt: skip
def _nothing(call: Call) -> Iterator[Launch]:
    """Only memory or metadata."""
    yield from ()


@rule(
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "scalar_tensor",
    "zero_",
)
def _filled(call: Call) -> Iterator[Launch]:
    info = result_of(call) if call.results else tensor(call, 0)
    if info is not None and info.elements and info.memory == "gpu":
        yield Launch("fill")


@rule("fill_")
def _fill(call: Call) -> Iterator[Launch]:
    value = tensor(call, 1)
    if value is not None and value.memory != "gpu":
        value = None  # is read on the CPU
    if result_of(call).elements:
        yield Launch("fill" if value is None else "copy")


@rule("copy_")
def _copy(call: Call) -> Iterator[Launch]:
    target, source = call.tensors[:2]
    yield from copy(target, source)


@rule("clone", "_to_copy", "contiguous")
def _clone(call: Call) -> Iterator[Launch]:
    source = tensor(call, 0)
    if source is not None:
        yield from copy(result_of(call)._replace(number=-1), source)


@rule("_local_scalar_dense", "item")
def _item(call: Call) -> Iterator[Launch]:
    if call.tensors[0].memory == "gpu":
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
    result = result_of(call)
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
    result = result_of(call)
    if not result.elements:
        return
    epilogue = len(added.shape) == 1 and is_contiguous(added) and len(result.shape) == 2 and min(other.shape) > 1
    epilogue = epilogue and result.dtype != torch.float64 and argument(call, 3) == 1
    if not epilogue and added.number != result.number:
        yield from copy(
            result._replace(number=-1), added._replace(shape=result.shape, stride=_expanded(added, result.shape))
        )
    for _ in range((one.shape[0] if "::addbmm" in call.name else 1) if one.elements else 0):
        yield from _for_blas(one)
        yield from _for_blas(other)
        yield Launch("gemm")


@rule("mv", "addmv", "addmv_")
def _vector(call: Call) -> Iterator[Launch]:
    *added, matrix, vector = call.tensors[:3]
    result = result_of(call)
    if added and added[0].number != result.number:
        yield from copy(result._replace(number=-1), added[0])
    yield from _for_blas(matrix)
    if vector.stride == (0,):
        yield Launch("copy")
    yield Launch("gemm")


def _expanded(info: TensorInfo, shape: tuple[int, ...]) -> tuple[int, ...]:
    missing = len(shape) - len(info.shape)
    sizes = (1,) * missing + info.shape
    strides = (0,) * missing + info.stride
    return tuple(
        0 if size == 1 and wanted != 1 else step for size, step, wanted in zip(sizes, strides, shape, strict=True)
    )


@rule("pow")
def _pow(call: Call) -> Iterator[Launch]:
    base, exponent = tensor(call, 0), argument(call, 1)
    result = result_of(call)
    if not result.elements:
        return
    if base is None:
        yield Launch("fill")
        yield Launch("elementwise")
    elif exponent in (0, 1) and not isinstance(exponent, TensorInfo):
        yield from [Launch("fill")] if exponent == 0 else copy(result._replace(number=-1), base)
    else:
        yield Launch("elementwise")


@rule("masked_fill", "scatter", "scatter_add", "index_add", "index_copy", "index_fill", "masked_scatter", "put")
def _out_of_place(call: Call) -> Iterator[Launch]:
    """Copy the first argument, and change the copy."""
    source, result = call.tensors[0], result_of(call)
    if result.elements:
        yield from copy(result._replace(number=-1), source)
        if call.name.endswith("masked_fill"):
            yield Launch("elementwise")
        elif call.tensors[1].elements:
            yield Launch("index")


@rule("scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_", "index_fill_", "put_")
def _in_place(call: Call) -> Iterator[Launch]:
    if result_of(call).elements and call.tensors[1].elements:
        yield Launch("index")


@rule("select_backward", "slice_backward")
def _into_zeros(call: Call) -> Iterator[Launch]:
    """Fill the gradient of the whole with zeros, and copy that of the part into it."""
    gradient, result = call.tensors[0], result_of(call)
    if not result.elements:
        return
    yield Launch("fill")
    dim = argument(call, 2) % max(len(result.shape), 1)
    shape, stride = list(result.shape), list(result.stride)
    if call.name.endswith("select_backward"):
        del shape[dim], stride[dim]
    else:
        shape[dim] = gradient.shape[dim]
        stride[dim] *= argument(call, 5)
    yield from copy(result._replace(shape=tuple(shape), stride=tuple(stride), number=-1), gradient)


@rule("constant_pad_nd")
def _pad(call: Call) -> Iterator[Launch]:
    source, result = call.tensors[0], result_of(call)
    if any(side > 0 for side in argument(call, 1)):
        yield Launch("fill")
    if result.elements and source.elements:
        yield Launch("copy")


@rule("cat", "stack")
def _concatenated(call: Call) -> Iterator[Launch]:
    parts = [each for each in tensors_at(call, 0) if each.elements]
    result = result_of(call)
    if not result.elements:
        return
    dims = len(result.shape)
    if call.name.endswith("stack") and argument(call, 1) % dims < dims - 1:
        dims -= 1  # it concatenates along the dimension before
    if call.name.endswith("stack") and len(parts) == 1:
        yield from copy(result._replace(shape=parts[0].shape, stride=parts[0].stride, number=-1), parts[0])
    elif len({each.dtype for each in parts}) > 1 or dims > _CAT_DIMS:
        yield from (Launch("copy") for _ in parts)
    else:
        yield from (Launch("copy") for _ in range(-(-len(parts) // _CAT_BATCH)))


_CAT_DIMS, _CAT_BATCH = 4, 128  # dimensions and tensors that one kernel of `cat` takes


@rule("_amp_update_scale_")
def _update_scale(call: Call) -> Iterator[Launch]:
    yield Launch("optimizer")


@rule("equal")
def _equal(call: Call) -> Iterator[Launch]:
    yield from map(Launch, ("elementwise", "reduction"))
    yield Launch("memcpy", 1, "gpu", "cpu")


@rule("linspace", "logspace", "arange")
def _range(call: Call) -> Iterator[Launch]:
    if result_of(call).elements:
        yield Launch(
            "fill" if result_of(call).elements == 1 and not call.name.endswith("arange") else "elementwise"
        )
