"""The floating-point operations and bytes of operators, from their recorded shapes and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from .matmul import element_size, matmul_of, sizes_of

FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"
Results = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]

_ERRORS = (ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError, RecursionError)


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


def forward(shapes: str, scalars: str, results: Results) -> Convolution | None:
    """Return a call of `FORWARD`; None if its shapes do not fit, or the shape of its result is not known.

    Args:
        shapes: the shapes of the inputs, as JSON.
        scalars: the other inputs, as JSON; empty if the trace does not have them.
        results: as `results_of` returns them, for traces without the other inputs.
    """
    try:
        image, weight = map(sizes_of, json.loads(shapes)[:2])
        known = _parameters(scalars, 3)
        result = results.get((image, weight)) if known is None else _result(image, weight, known)
        return _checked(image, weight, result, known is not None and known.transposed, 1)
    except _ERRORS:
        return None


def backward(shapes: str, scalars: str) -> Convolution | None:
    """Return a call of `BACKWARD`, whose first input is the gradient of the result; arguments as of `forward`."""
    try:
        result, image, weight = map(sizes_of, json.loads(shapes)[:3])
        known = _parameters(scalars, 4)
        mask = json.loads(scalars)[10:11] if known else []
        passes = json.loads(mask[0].lower())[:2].count(True) if mask and mask[0] else 2
        return _checked(image, weight, result, known is not None and known.transposed, passes)
    except _ERRORS:
        return None


def results_of(backward_shapes: Iterable[str]) -> Results:
    """Return the shape of the result by the shapes of image and weight, where all backward convolutions agree."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], set[tuple[int, ...]]] = {}
    for shapes in backward_shapes:
        if call := backward(shapes, ""):
            found.setdefault((call.image, call.weight), set()).add(call.result)
    return {key: results.pop() for key, results in found.items() if len(results) == 1}


def _parameters(scalars: str, first: int) -> _Parameters | None:
    """Return the parameters, the first of which is at this place among the inputs; None without them."""
    texts = json.loads(scalars) if scalars else []
    if len(texts) < first + 6 or not all(texts[first : first + 6]):
        return None
    return _Parameters(*(json.loads(text.lower()) for text in texts[first : first + 6]))


def _result(image: Sequence[int], weight: Sequence[int], known: _Parameters) -> tuple[int, ...]:
    """Return the shape of the result, as the pages of ``torch.nn.Conv2d`` and ``ConvTranspose2d`` give it."""
    stride, padding, dilation, output_padding = (
        list(values) * (len(image) - 2) if len(values) == 1 else values
        for values in (known.stride, known.padding, known.dilation, known.output_padding)
    )
    reach = [each * (size - 1) for each, size in zip(dilation, weight[2:], strict=True)]
    places = zip(image[2:], reach, stride, padding, output_padding, strict=True)
    if known.transposed:
        channels = weight[1] * known.groups
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
    each = element_size(kinds[first])
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
        each = element_size(kinds[0])
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
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError):
        return None
    return work if work and all(work.sizes) else None


def _work(name: str, shapes: str, types: str, scalars: str, results: Results) -> Work | None:
    if (matmul := matmul_of(name, shapes, types)) is not None:
        sizes = (matmul.batch, matmul.m, matmul.n, matmul.k)
        return Work("matmul", matmul.flops, matmul.bytes, matmul.dtype, sizes)
    if name in (FORWARD, BACKWARD):
        call = forward(shapes, scalars, results) if name == FORWARD else backward(shapes, scalars)
        return call and _of_convolution(call, str(json.loads(types)[0]))
    if name in _WORK:
        return _WORK[name](json.loads(shapes), [str(kind) for kind in json.loads(types)])
    return None


def _of_convolution(call: Convolution, kind: str) -> Work:
    each = element_size(kind)
    return Work("convolution", call.flops, call.elements * each if each else None, kind, call.sizes)
