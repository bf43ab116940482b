"""The floating-point operations and bytes of convolutions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from .matmul import sizes_of

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
