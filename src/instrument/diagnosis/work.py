"""The floating-point operations and bytes of operators, from their recorded shapes and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from .matmul import element_size, matmul_of, sizes_of

Kind = Literal["matmul", "attention", "convolution", "normalization", "softmax", "element-wise"]
Dims = Sequence[Any]


class Work(NamedTuple):
    """What one call of an operator computes.

    Attributes:
        kind: the kind of operator.
        flops: floating-point operations; a multiplication and an addition are two.
        bytes: each input and the result once; None if a type is unknown.
        dtype: the type of the first input, as the trace names it.
        sizes: the sizes that the operations follow from: of a matmul batch, m, n and k; of attention batch, heads,
            queries, keys, head size and head size of the values; of a convolution batch, channels in, channels
            out, positions of the result and size of the filter; else the number of elements.
    """

    kind: Kind
    flops: int
    bytes: int | None
    dtype: str
    sizes: tuple[int, ...]


_FLASH = frozenset((
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
))  # fmt: skip
_FLASH_BACKWARD = frozenset(name + "_backward" for name in _FLASH)
_NORMS = {
    "aten::native_layer_norm": 7, "aten::native_batch_norm": 7, "aten::cudnn_batch_norm": 7,
    "aten::miopen_batch_norm": 7, "aten::native_group_norm": 7, "aten::_fused_rms_norm": 5,
}  # fmt: skip
_BINARY = frozenset((
    "aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div", "aten::div_",
    "aten::maximum", "aten::minimum", "aten::pow",
))  # fmt: skip
_UNARY = frozenset((
    "aten::relu", "aten::relu_", "aten::gelu", "aten::silu", "aten::silu_", "aten::sigmoid", "aten::tanh",
    "aten::exp", "aten::sqrt", "aten::rsqrt", "aten::neg", "aten::clamp_min", "aten::clamp_min_", "aten::erf",
    "aten::cos", "aten::sin", "aten::abs", "aten::log",
))  # fmt: skip
_COPIES = frozenset(("aten::copy_", "aten::fill_", "aten::zero_"))
_BACKWARD_OF_ONE = frozenset((
    "aten::threshold_backward", "aten::gelu_backward", "aten::silu_backward", "aten::sigmoid_backward",
    "aten::tanh_backward",
))  # fmt: skip


def _attention(dims: Dims, kinds: Sequence[str], first: int, products: int, tensors: int) -> Work | None:
    """Return the work of attention over inputs of batch x heads x length x head size.

    Forward is two matmuls, 2*q*k*d each (Dao, FlashAttention-2, section 4.1); backward computes five. A causal
    mask halves the useful operations, but operators do not record it: the figures are without a mask.
    """
    q, k, v = (sizes_of(dims[place]) for place in range(first, first + 3))
    batch, heads, queries, size = q
    keys, value_size = k[2], v[3]
    if (k[0], k[3], v[0], v[2]) != (batch, size, batch, keys):
        return None
    flops = products * batch * heads * queries * keys * (size + value_size)
    each = element_size(kinds[first])
    moved = (prod(q) + prod(k) + prod(v) + batch * heads * queries * value_size) * tensors
    sizes = (batch, heads, queries, keys, size, value_size)
    return Work("attention", flops, moved * each if each else None, kinds[first], sizes)


def _convolution_backward(name: str, dims: Dims, kinds: Sequence[str]) -> Work | None:
    """Return the work of both gradients of a convolution: as much as two forward convolutions.

    The gradient of the result has the shape of the result, which the inputs of a forward convolution do not show.
    """
    result, image, weight = (sizes_of(dims[place]) for place in range(3))
    one = convolution(image, weight, result, kinds[1])
    return one and one._replace(flops=2 * one.flops, bytes=one.bytes and 2 * one.bytes)


def convolution(image: Sequence[int], weight: Sequence[int], result: Sequence[int], kind: str) -> Work | None:
    """Return the work of a forward convolution: 2 * result * channels per group * filter size operations."""
    if not (len(image) == len(weight) == len(result) >= 3) or image[0] != result[0]:
        return None
    inside = prod(weight[1:])
    each = element_size(kind)
    moved = (prod(image) + prod(weight) + prod(result)) * each if each else None
    sizes = (image[0], image[1], result[1], prod(result[2:]), prod(weight[2:]))
    return Work("convolution", 2 * prod(result) * inside, moved, kind, sizes)


def _of_elements(kind: Kind, per_element: int, reads: int) -> Callable[[str, Dims, Sequence[str]], Work | None]:
    def work(name: str, dims: Dims, kinds: Sequence[str]) -> Work | None:
        """Count each element of the largest input once for reading, for writing, and per further input."""
        shapes = [sizes_of(each) for each in dims[:reads] if isinstance(each, list)]
        if not shapes or not shapes[0]:
            return None
        most = max(prod(shape) for shape in shapes)
        each = element_size(kinds[0])
        moved = (sum(prod(shape) for shape in shapes if shape) + most) * each if each else None
        return Work(kind, per_element * most, moved, kinds[0], (most,))

    return work


_Computed = Callable[[str, Dims, Sequence[str]], "Work | None"]
_WORK: dict[str, _Computed] = {
    **{name: lambda _, dims, kinds: _attention(dims, kinds, 0, 2, 1) for name in _FLASH},
    **{name: lambda _, dims, kinds: _attention(dims, kinds, 1, 5, 2) for name in _FLASH_BACKWARD},
    "aten::convolution_backward": _convolution_backward,
    **{name: _of_elements("normalization", flops, 1) for name, flops in _NORMS.items()},
    "aten::_softmax": _of_elements("softmax", 5, 1),
    "aten::_log_softmax": _of_elements("softmax", 5, 1),
    "aten::_softmax_backward_data": _of_elements("softmax", 4, 2),
    **{name: _of_elements("element-wise", 1, 2) for name in _BINARY | _BACKWARD_OF_ONE},
    **{name: _of_elements("element-wise", 1, 1) for name in _UNARY},
    **{name: _of_elements("element-wise", 0, 1) for name in _COPIES},
}


def operator_work(name: str, shapes: str, types: str) -> Work | None:
    """Return what a call of an operator computes; None if it is empty, or it or its shapes are not known.

    Args:
        name: the operator, such as "aten::mm".
        shapes: the shapes of its inputs, as JSON.
        types: their types, as JSON.
    """
    if (matmul := matmul_of(name, shapes, types)) is not None:
        sizes = (matmul.batch, matmul.m, matmul.n, matmul.k)
        work: Work | None = Work("matmul", matmul.flops, matmul.bytes, matmul.dtype, sizes)
    elif name in _WORK:
        try:
            work = _WORK[name](name, json.loads(shapes), [str(kind) for kind in json.loads(types)])
        except (ValueError, TypeError, IndexError, KeyError, OverflowError):
            return None
    else:
        return None
    return work if work and all(work.sizes) else None


def forward_convolution(shapes: str, types: str, results: dict[tuple[str, str], tuple[int, ...]]) -> Work | None:
    """Return the work of a forward convolution whose result is known from a backward one with the same inputs."""
    try:
        dims, kinds = json.loads(shapes), json.loads(types)
        result = results.get((json.dumps(dims[0]), json.dumps(dims[1])))
        return convolution(sizes_of(dims[0]), sizes_of(dims[1]), result, str(kinds[0])) if result else None
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def results_of_convolutions(backward_shapes: Sequence[str]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shape of the result by the shapes of image and weight, where all backward convolutions agree."""
    found: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for shapes in backward_shapes:
        try:
            result, image, weight = json.loads(shapes)[:3]
            found.setdefault((json.dumps(image), json.dumps(weight)), set()).add(sizes_of(result))
        except (ValueError, TypeError, OverflowError):
            continue
    return {key: results.pop() for key, results in found.items() if len(results) == 1}
