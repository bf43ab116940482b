"""The operations of a call, and the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ...explain.metrics.operator_work import HEAVY, operator_work
from .calls import Call, TensorInfo, tensors_in
from .launches import argument

_WRITE_ONLY = frozenset((
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "_foreach_zero_", "_foreach_copy_", "empty_like", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full",
))  # fmt: skip
"""Operators that write their first argument, or take only its shape, without reading it."""

_GATHERING = frozenset(("embedding", "index", "index_select", "gather", "take", "_unsafe_index"))
"""Operators that read as many elements of their first argument as they return."""

_RECURRENT = "aten::mkldnn_rnn_layer"  # the CPU's, for which cuDNN has one of its own
_SCATTERING = frozenset((
    "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_",
    "index_fill_", "index_reduce_",
))  # fmt: skip
"""Operators that write the elements of their first argument that an index names."""


class Work(NamedTuple):
    """What one call does.

    Attributes:
        kind: "matmul", "attention" or "convolution"; empty for other operators.
        flops: floating-point operations of these kinds; a multiplication and an addition are two.
        known: whether the operations of the operator are known; those of element-wise ones do not count.
        read: bytes of its inputs on the GPU, each once.
        written: bytes of its results, each once.
    """

    kind: str
    flops: int
    known: bool
    read: int
    written: int


def work_of(call: Call) -> Work:
    """Return what a call that launches kernels does.

    The operations are those of `operator_work`, which a trace of the same call has. An operator that takes
    elements by their index reads as many as it returns.
    """
    if call.name.startswith(_RECURRENT):
        return Work("matmul", _recurrent(call), True, *_moved(call))
    work = operator_work(call.name, call.shapes, call.types, call.scalars) if call.tensors else None
    heavy = work is not None and work.kind in HEAVY
    read, written = _moved(call)
    kind = work.kind if heavy and work is not None else ""
    return Work(kind, work.flops if heavy and work is not None else 0, work is not None, read, written)


def _recurrent(call: Call) -> int:
    """Return the operations of a recurrent layer: each element of the sequence meets both of its weights."""
    sequence, of_input, of_state = call.tensors[:3]
    positions = sequence.elements // max(sequence.shape[-1], 1)
    passes = 2 if call.name.endswith("backward") else 1
    return 2 * passes * positions * (of_input.elements + of_state.elements)


def _moved(call: Call) -> tuple[int, int]:
    name = call.name.removeprefix("aten::")
    results = _distinct([*(each for each in call.results if each is not None), *_written(call)])
    inputs = _distinct(call.tensors)
    written = sum(each.bytes for each in results.values())
    if name in _WRITE_ONLY:
        inputs = {key: each for key, each in inputs.items() if key not in {one.number for one in _first(call)}}
    elif name in _GATHERING:
        inputs |= {0: next(iter(results.values()), inputs[0])} if 0 in inputs else {}
    elif name in _SCATTERING and 0 in inputs:
        target = inputs.pop(0)
        written = _scattered(call, target) * target.dtype.itemsize
        if _adds(call, name):
            return written + sum(each.bytes for each in inputs.values()), written
    return sum(each.bytes for each in inputs.values()), written


def _distinct(tensors: list[TensorInfo]) -> dict[int, TensorInfo]:
    return {each.number: each for each in tensors if each.memory == "gpu"}


def _written(call: Call) -> Iterator[TensorInfo]:
    """Yield the tensors among the arguments that the operator writes; gradients only if a scale is given."""
    schema = call.operator._schema.arguments
    given = dict(zip((each.name for each in schema), call.arguments, strict=False))
    for each in schema:
        written = each.alias_info is not None and each.alias_info.is_write
        if written and (each.name != "grads" or given.get("grad_scale") is not None):
            yield from tensors_in(given.get(each.name))


def _adds(call: Call, name: str) -> bool:
    """Return whether an operator of `_SCATTERING` reads what it writes."""
    if "index_put" in name:
        return argument(call, 3) is True
    return "_add" in name or "reduce" in call.operator._overloadname or "_reduce" in name


def _scattered(call: Call, target: TensorInfo) -> int:
    """Return the number of elements that an operator of `_SCATTERING` writes; at most, where a mask names them."""
    if "index_put" in call.name:
        return _put(target, call.arguments[1], call.arguments[2])
    index = call.arguments[2]
    if "scatter" in call.name or not target.shape:
        return int(index.elements)
    return int(index.elements * target.elements // max(target.shape[call.arguments[1]], 1))


def _put(target: TensorInfo, indices: Sequence[TensorInfo | None], values: TensorInfo) -> int:
    """Return the number of elements that ``index_put_`` writes."""
    place, indexed, masked = 0, 1, False
    given = [each for each in indices if each is not None]
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        dims = len(index.shape) if index is not None and is_mask else 1
        if index is not None:
            indexed, masked = indexed * prod(target.shape[place : place + dims]), masked or is_mask
        place += dims
    rest = target.elements // max(indexed, 1)
    if not masked:
        return prod(np.broadcast_shapes(*(each.shape for each in given))) * rest
    return values.elements if values.elements > rest else max(each.elements for each in given) * rest


def _first(call: Call) -> list[TensorInfo]:
    """Return the tensors of the first argument."""
    return list(tensors_in(argument(call, 0)))
