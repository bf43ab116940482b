"""The operations of a call, and the bytes that it reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from ...explain.metrics.operator_work import HEAVY, operator_work
from .calls import Call, TensorInfo

_WRITE_ONLY = frozenset((
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "_foreach_zero_", "_foreach_copy_", "empty_like", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full",
))  # fmt: skip
"""Operators that write their first argument, or take only its shape, without reading it."""

_GATHERING = frozenset(("embedding", "index", "index_select", "gather", "take", "_unsafe_index"))
"""Operators that read as many elements of their first argument as they return."""

_SCATTERING = frozenset((
    "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_",
))  # fmt: skip
"""Operators that write as many elements of their first argument as the last one has."""


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
    work = operator_work(call.name, call.shapes, call.types, call.scalars) if call.tensors else None
    heavy = work is not None and work.kind in HEAVY
    read, written = _moved(call)
    kind = work.kind if heavy and work is not None else ""
    return Work(kind, work.flops if heavy and work is not None else 0, work is not None, read, written)


def _moved(call: Call) -> tuple[int, int]:
    name = call.name.rpartition("::")[2]
    results = _distinct([each for each in call.results if each is not None])
    inputs = _distinct(call.tensors)
    if not results and call.operator is not None and call.operator._schema.is_mutable:
        results = _distinct(list(_first(call)))
    written = sum(each.bytes for each in results.values())
    if name in _WRITE_ONLY:
        inputs = {key: each for key, each in inputs.items() if key not in {one.number for one in _first(call)}}
    elif name in _GATHERING:
        inputs |= {0: next(iter(results.values()), inputs[0])} if 0 in inputs else {}
    elif name in _SCATTERING and 0 in results and len(inputs) > 1:
        written = inputs[max(inputs)].bytes
        del inputs[0]
    read = sum(each.bytes for each in inputs.values())
    return read, written


def _distinct(tensors: list[TensorInfo]) -> dict[int, TensorInfo]:
    return {each.number: each for each in tensors if each.memory == "gpu"}


def _first(call: Call) -> list[TensorInfo]:
    """Return the tensors of the first argument."""
    first = call.arguments[0] if call.arguments else None
    if isinstance(first, TensorInfo):
        return [first]
    return [each for each in first if isinstance(each, TensorInfo)] if isinstance(first, tuple) else []
