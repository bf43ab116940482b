"""The memory that torch's reductions on CUDA take while they run, as several blocks of threads share one result.

Follows ``setReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

_WARP = 32
_THREADS = 512  # of a block at most; half of it for complex numbers of 128 bits
_VECTOR = 4  # elements that a thread loads at a time
_LEAST_VALUES, _MOST_VALUES = 16, 256  # that a thread reduces, before blocks share a result


class Dim(NamedTuple):
    """A dimension of the input: its size, its stride in elements, and whether it is reduced."""

    size: int
    stride: int
    reduced: bool


@lru_cache(maxsize=4096)
def shared_bytes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: tuple[int, ...] | None,
    offset: int,
    partial_bytes: int,
    multiprocessors: int,
    threads: int,
) -> tuple[int, ...]:
    """Return the sizes of the buffers of a reduction, which are none if no blocks share a result.

    Args:
        shape: the sizes of the input.
        strides: its strides in elements.
        reduced: the dimensions that are reduced, counted from the front; None for all.
        offset: where the input begins in its memory, in elements.
        partial_bytes: the size of a partial result.
        multiprocessors: how many the GPU has.
        threads: how many each of them runs at a time.
    """
    dims = _coalesced(shape, strides, reduced)
    fast = [dim for dim in dims if dim.reduced]
    slow = dims[len(fast) :]
    inputs, outputs = _product(fast), _product(slow)
    if not inputs * outputs:
        return ()
    along = not slow or not fast or fast[0].stride < slow[0].stride
    first, second = (inputs, outputs) if along else (outputs, inputs)
    stride = 1 if not dims else (fast[0] if along and fast else slow[0]).stride
    vector = 1
    if stride == 1 and along and first >= 128 and len(fast) == 1:
        first //= _VECTOR
    elif stride == 1 and not along:
        vector = _output_vector(fast, slow, offset)
        first //= vector
    most = _THREADS // vector
    widest, highest = min(_power(first), most), min(_power(second), most)
    height = min(highest, most // min(widest, _WARP))
    width = min(widest, most // height)
    step_in, step_out = (width, 1) if along else (1, width)
    in_blocks = -(-inputs // step_in) >= min(height * 16, _MOST_VALUES)
    step_in, step_out = (step_in * height, step_out) if in_blocks else (step_in, step_out * height)
    values, grid = -(-inputs // step_in), -(-(outputs // vector) // step_out)
    target = multiprocessors * (threads // (width * height))
    if not in_blocks or values < _MOST_VALUES or grid > target:
        return ()
    fewest, most_blocks = -(-values // _MOST_VALUES), -(-values // _LEAST_VALUES)
    blocks = min(max(-(-target // grid), fewest), most_blocks)
    if blocks <= 1:
        return ()
    return partial_bytes * outputs * blocks * (1 if along else width * vector), 4 * grid


def _product(dims: Sequence[Dim]) -> int:
    return prod(dim.size for dim in dims)


def _power(number: int) -> int:
    """Return the greatest power of 2 up to ``number``, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _coalesced(shape: tuple[int, ...], strides: tuple[int, ...], reduced: tuple[int, ...] | None) -> list[Dim]:
    """Return the dimensions as TensorIterator orders and joins them: reduced ones first, then by stride."""
    dims = [
        Dim(size, stride, reduced is None or place in reduced)
        for place, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if size != 1
    ]
    dims.reverse()
    dims.sort(key=lambda dim: (not dim.reduced, dim.stride))
    joined: list[Dim] = []
    for dim in dims:
        last = joined[-1] if joined else None
        if last is not None and last.reduced == dim.reduced and last.stride * last.size == dim.stride:
            joined[-1] = Dim(last.size * dim.size, last.stride, last.reduced)
        else:
            joined.append(dim)
    return joined


def _output_vector(fast: Sequence[Dim], slow: Sequence[Dim], offset: int) -> int:
    vector = _VECTOR
    for number in (offset, slow[0].size, *(dim.stride for dim in (*fast, *slow[1:]))):
        while number % vector:
            vector //= 2
    return vector
