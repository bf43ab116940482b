"""The operations and bytes of operators, from their shapes and types.

Imports nothing but numpy: a dry run counts by it in the process of the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

INPUTS: dict[str, tuple[int, int, int | None]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm", "aten::matmul"), (0, 1, None)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"), (1, 2, 0)),
    "aten::_addmm_activation": (1, 2, 0),
    "aten::linear": (0, 1, 2),
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), (0, 1, None)),
    **dict.fromkeys(("aten::addmv", "aten::addmv_", "aten::addbmm", "aten::addbmm_"), (1, 2, 0)),
}
"""The positions of both factors, and of the input that is added to the result."""

HEAVY = frozenset(("matmul", "attention", "convolution"))
"""The kinds of operators that compute most, and whose operations count as useful."""

_DIMENSIONS = {
    name: (2, 1) if "mv" in name else (1, 1) if "dot" in name else (3, 3) if "bmm" in name else (2, 2)
    for name in INPUTS
    if name not in ("aten::matmul", "aten::linear")
}
"""The dimensions of both factors, of operators that take no others."""

_LARGEST = 1 << 48  # elements along one dimension

_OTHER_RESULT = {"aten::_scaled_mm", "aten::_int_mm"}
"""Operators whose result has another type than the factors; the trace does not say which."""

_SIZES = {
    **dict.fromkeys(("signed char", "unsigned char", "bool", "c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long", "long int", "c10::complex<float>"), 8),
    "c10::complex<double>": 16,
}
"""Bytes per element by type, as torch.profiler names the types."""


_ERRORS = (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError, RecursionError)


class Matmul(NamedTuple):
    """A batch of matmuls of an m x k by a k x n matrix; `bytes` is None if a type is unknown."""

    name: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    flops: int
    bytes: int | None


def sizes_of(dims: Any) -> tuple[int, ...]:
    """Return the sizes of a tensor as a trace gives them.

    Raises:
        ValueError: one of them is not an integer that a tensor can have.
    """
    sizes = tuple(dims)
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"not the sizes of a tensor: {dims!r:.100}")
    return sizes


def matmul_of(name: str, shapes: str, types: str) -> Matmul | None:
    """Return what a call computes; None if the trace does not say, or its shapes do not fit."""
    try:
        dims, kinds = json.loads(shapes), json.loads(types or "[]")
        one, two, added = INPUTS[name]
        first, second = sizes_of(dims[one]), list(sizes_of(dims[two]))
        if name == "aten::linear":
            second[-2:] = second[:-3:-1]
        if (len(first), len(second)) != _DIMENSIONS.get(name, (len(first), len(second))):
            return None
        m, k = first[-2] if len(first) > 1 else 1, first[-1]
        rows, n = (second[-2], second[-1]) if len(second) > 1 else (second[0], 1)
        batch = prod(np.broadcast_shapes(tuple(first[:-2]), tuple(second[:-2])))
        if rows != k:
            return None
        kind_of = [str(kinds[place]) if place < len(kinds) else "" for place in (one, two)]
        extra = prod(sizes_of(dims[added])) if added is not None and len(dims) > added and dims[added] else 0
    except _ERRORS:
        return None
    left, right = (_SIZES.get(kind) for kind in kind_of)
    moved = None
    if left and right and name not in _OTHER_RESULT:
        results = 1 if "::addbmm" in name else batch
        moved = prod(first) * left + prod(second) * right + (extra + results * m * n) * left
    return Matmul(name, batch, m, n, k, kind_of[0], 2 * batch * m * n * k, moved)


FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"
Results = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


class Convolution(NamedTuple):
    """A call of a convolution.

    Attributes:
        image: batch, channels and positions of the input.
        weight: the filter: two numbers of channels, and its size along each dimension.
        result: batch, channels and positions of the result.
        transposed: whether it is a transposed convolution.
        passes: 1 forward; backward the number of gradients that are computed, of input and weight.
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    transposed: bool
    passes: int

    @property
    def flops(self) -> int:
        """Floating-point operations: each element of the result meets the filter and its channels.

        In a transposed convolution, each element of the input does; the gradients of input and weight take as much
        as the forward pass each (the count of ``torch.utils.flop_counter``).
        """
        return 2 * prod(self.image if self.transposed else self.result) * prod(self.weight[1:]) * self.passes

    @property
    def elements(self) -> int:
        """The elements of input, filter and result, each read or written once in each pass."""
        return (prod(self.image) + prod(self.weight) + prod(self.result)) * self.passes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch, channels in, channels out, positions of the result and size of the filter."""
        image, result = self.image, self.result
        return (image[0], image[1], result[1], prod(result[2:]), prod(self.weight[2:]))


class _Parameters(NamedTuple):
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def _forward(shapes: str, scalars: str, results: Results) -> Convolution | None:
    """Return a call of `FORWARD`; None if its shapes do not fit, or the shape of its result is not known.

    Args:
        shapes: the shapes of the inputs, as JSON.
        scalars: the other inputs, as JSON; empty if the trace does not have them.
        results: as `results_of` returns them, for traces without the other inputs.
    """
    image, weight = map(sizes_of, json.loads(shapes)[:2])
    parameters = _parameters(scalars, 3)
    result = results.get((image, weight)) if parameters is None else _result(image, weight, parameters)
    return _checked(image, weight, result, parameters is not None and parameters.transposed, 1)


def _backward(shapes: str, scalars: str) -> Convolution | None:
    """Return a call of `BACKWARD`, whose first input is the gradient of the result; arguments as of `_forward`."""
    result, image, weight = map(sizes_of, json.loads(shapes)[:3])
    parameters = _parameters(scalars, 4)
    mask = json.loads(scalars)[10:11] if parameters else []
    passes = json.loads(mask[0].lower())[:2].count(True) if mask and mask[0] else 2
    return _checked(image, weight, result, parameters is not None and parameters.transposed, passes)


def results_of(backward_shapes: Iterable[str]) -> Results:
    """Return the shape of the result by the shapes of image and weight, where all backward convolutions agree."""
    by_inputs: dict[tuple[tuple[int, ...], tuple[int, ...]], set[tuple[int, ...]]] = {}
    for shapes in backward_shapes:
        with suppress(*_ERRORS):
            if call := _backward(shapes, ""):
                by_inputs.setdefault((call.image, call.weight), set()).add(call.result)
    return {inputs: results.pop() for inputs, results in by_inputs.items() if len(results) == 1}


def _parameters(scalars: str, first: int) -> _Parameters | None:
    """Return the parameters, the first of which is at this place among the inputs; None without them."""
    texts = json.loads(scalars) if scalars else []
    if len(texts) < first + 6 or not all(texts[first : first + 6]):
        return None
    return _Parameters(*(json.loads(text.lower()) for text in texts[first : first + 6]))


def _result(image: Sequence[int], weight: Sequence[int], parameters: _Parameters) -> tuple[int, ...]:
    """Return the shape of the result, as the pages of ``torch.nn.Conv2d`` and ``ConvTranspose2d`` give it."""
    stride, padding, dilation, output_padding = (
        list(values) * (len(image) - 2) if len(values) == 1 else values
        for values in (parameters.stride, parameters.padding, parameters.dilation, parameters.output_padding)
    )
    reach = [each * (size - 1) for each, size in zip(dilation, weight[2:], strict=True)]
    places = zip(image[2:], reach, stride, padding, output_padding, strict=True)
    if parameters.transposed:
        channels = weight[1] * parameters.groups
        positions = [(size - 1) * step - 2 * pad + more + out + 1 for size, more, step, pad, out in places]
    else:
        channels = weight[0]
        positions = [(size + 2 * pad - more - 1) // step + 1 for size, more, step, pad, _ in places]
    return sizes_of((image[0], channels, *positions))


def _checked(
    image: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...] | None, transposed: bool, passes: int
) -> Convolution | None:
    if result is None or not (len(image) == len(weight) == len(result) >= 3) or image[0] != result[0]:
        return None
    return Convolution(image, weight, result, transposed, passes)


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
    each = _SIZES.get(kinds[first])
    moved = (prod(q) + prod(k) + prod(v) + batch * heads * queries * value_size) * tensors
    sizes = (batch, heads, queries, keys, size, value_size)
    return Work("attention", flops, moved * each if each else None, kinds[first], sizes)


def _of_elements(kind: Kind, per_element: int, reads: int) -> Callable[[Dims, Sequence[str]], Work | None]:
    def work(dims: Dims, kinds: Sequence[str]) -> Work | None:
        """Count each element of the largest input once for reading, for writing, and per further input."""
        shapes = [sizes_of(each) for each in dims[:reads] if isinstance(each, list)]
        if not shapes or not shapes[0]:
            return None
        most = max(prod(shape) for shape in shapes)
        each = _SIZES.get(kinds[0])
        moved = (sum(prod(shape) for shape in shapes if shape) + most) * each if each else None
        return Work(kind, per_element * most, moved, kinds[0], (most,))

    return work


_Computed = Callable[[Dims, Sequence[str]], "Work | None"]
_WORK: dict[str, _Computed] = {
    **{name: lambda dims, kinds: _attention(dims, kinds, 0, 2, 1) for name in _FLASH},
    **{name: lambda dims, kinds: _attention(dims, kinds, 1, 5, 2) for name in _FLASH_BACKWARD},
    **{name: _of_elements("normalization", flops, 1) for name, flops in _NORMS.items()},
    "aten::_softmax": _of_elements("softmax", 5, 1),
    "aten::_log_softmax": _of_elements("softmax", 5, 1),
    "aten::_softmax_backward_data": _of_elements("softmax", 4, 2),
    **{name: _of_elements("element-wise", 1, 2) for name in _BINARY | _BACKWARD_OF_ONE},
    **{name: _of_elements("element-wise", 1, 1) for name in _UNARY},
    **{name: _of_elements("element-wise", 0, 1) for name in _COPIES},
}


def operator_work(
    name: str, shapes: str, types: str, scalars: str = "", results: Results | None = None
) -> Work | None:
    """Return what a call of an operator computes; None if it is empty, or it or its shapes are not known.

    Args:
        name: the operator, such as "aten::mm".
        shapes: the shapes of its inputs, as JSON.
        types: their types, as JSON.
        scalars: the values of its other inputs, as JSON, of convolutions; empty if they are not known.
        results: the results of convolutions that are known from backward ones.
    """
    try:
        work = _work(name, shapes, types, scalars, results or {})
    except _ERRORS:
        return None
    return work if work and all(work.sizes) else None


def _work(name: str, shapes: str, types: str, scalars: str, results: Results) -> Work | None:
    if (matmul := matmul_of(name, shapes, types)) is not None:
        sizes = (matmul.batch, matmul.m, matmul.n, matmul.k)
        return Work("matmul", matmul.flops, matmul.bytes, matmul.dtype, sizes)
    if name in (FORWARD, BACKWARD):
        call = _forward(shapes, scalars, results) if name == FORWARD else _backward(shapes, scalars)
        return call and _of_convolution(call, str(json.loads(types)[0]))
    if name in _WORK:
        return _WORK[name](json.loads(shapes), [str(kind) for kind in json.loads(types)])
    return None


def _of_convolution(call: Convolution, kind: str) -> Work:
    each = _SIZES.get(kind)
    return Work("convolution", call.flops, call.elements * each if each else None, kind, call.sizes)
