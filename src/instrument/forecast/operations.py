"""What a call of an operator asks of a GPU: its family, its sizes, and the bytes it moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import torch

MATMULS = ("linear", "matmul", "batched matmul")
"""The families whose sizes are batch, rows and columns of the result, and the length of the sums.

cuBLASLt computes a "linear": a matmul with a bias whose weight lies transposed, as `torch.nn.Linear` keeps it. It
chooses other kernels than cuBLAS does for a "matmul".
"""

UNKNOWN_FAMILY = "other"
"""The family of operators that have nothing in common, so that none stands for another."""

BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element by type."""


class Tensor(NamedTuple):
    """An input or a result of an operator; the type is one of `BYTES`, and the strides are None if not known."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    type: str

    @property
    def bytes(self) -> int:
        """The bytes in memory: those along an expanded dimension count once."""
        return prod(self._stored) * BYTES.get(self.type, 4)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def _stored(self) -> list[int]:
        if self.stride is None:
            return list(self.shape)
        return [size for size, step in zip(self.shape, self.stride, strict=True) if step or not size]

    @property
    def in_order(self) -> bool:
        """Whether the elements lie in memory in the order of the dimensions, expanded ones aside."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride or ()), strict=self.stride is not None):
            if size > 1 and step:
                if step != expected:
                    return False
                expected *= size
        return True

    @property
    def is_column_major(self) -> bool:
        """Whether a matrix lies transposed in memory."""
        return self.stride is not None and self.stride[-2] == 1 and self.stride[-1] > 1


class Operation(NamedTuple):
    """What one call computes.

    Attributes:
        family: operators that a GPU runs in the same way: "linear", "softmax backward", "element-wise".
        type: the type of the first floating-point input: "fp32".
        flops: the operations of matmuls, attention and convolutions; a multiplication and an addition are two.
        bytes: what its kernels read and write; a kernel that reads an input again counts it again.
        sizes: of `MATMULS` batch, rows, columns and length of the sums; of attention heads of the whole batch,
            queries, keys and head size; else the length of a row.
    """

    family: str
    type: str
    flops: int
    bytes: int
    sizes: tuple[int, ...]


_NO_KERNEL = frozenset((
    "alias", "as_strided", "detach", "diagonal", "empty", "empty_like", "empty_permuted", "empty_strided",
    "expand", "imag", "is_same_size", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "real",
    "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real", "_conj", "_reshape_alias", "_unsafe_view",
))  # fmt: skip
_COPIES = frozenset(("_to_copy", "clone", "contiguous", "copy_"))
_JOINS = frozenset(("cat", "stack", "all_gather_copy_in", "chunk_cat", "split_with_sizes_copy"))
_REDUCTIONS = frozenset((
    "all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max", "mean", "min",
    "nll_loss_forward", "norm", "prod", "std", "sum", "var", "var_mean", "_foreach_norm",
))  # fmt: skip
# By operator: the family, and how often the kernels move the inputs and results. The softmax's backward pass first
# multiplies two of them (ATen, SoftMax.cu); that of a layer norm reads its inputs again for the weight's gradient.
_FAMILIES = {
    "_softmax": ("softmax", 1.0), "_log_softmax": ("softmax", 1.0),
    "_softmax_backward_data": ("softmax backward", 2.0), "_log_softmax_backward_data": ("softmax backward", 2.0),
    "native_layer_norm": ("layer norm", 1.0), "_fused_rms_norm": ("layer norm", 1.0),
    "native_layer_norm_backward": ("layer norm backward", 5 / 3),
    "_fused_rms_norm_backward": ("layer norm backward", 5 / 3),
    "native_dropout": ("dropout", 1.0),
    "embedding_dense_backward": ("embedding backward", 1.0),
}  # fmt: skip
_WRITES_ONLY = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"))
# Operators that torch does not tag as pointwise, and that write each element once.
_BY_ELEMENT_TOO = _WRITES_ONLY | {
    "arange", "constant_pad_nd", "diagonal_backward", "eye", "flip", "full", "full_like", "linspace", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "repeat", "roll", "scalar_tensor", "select_backward",
    "slice_backward", "tril", "triu", "zeros", "zeros_like",
}  # fmt: skip
_BY_ROW = ("softmax", "layer norm")
_MANY = ("_foreach_", "_fused_")  # operators over lists of tensors, as of optimizers
_BY_ELEMENT = (
    "copy",
    "broadcast",
)  # kernels that find the address of each element: small ones take as long as a word
_WORD = 4  # bytes
_IN_REGISTERS = 1024  # elements: the longest row of a softmax that a warp keeps
_NOT_KEPT = 16384  # elements: a row of FP32 that shared memory cannot hold
_ALIGNED = 16  # bytes
FULLY_ALIGNED = 8
"""The 16-bit elements that a thread loads at once."""


def operation_of(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Operation | None:
    """Return what a call computes; None if it launches no kernel.

    Args:
        name: the operator, as torch.profiler names it, with or without "aten::".
        inputs: the tensors among its arguments.
        results: the tensors that it returns.
    """
    name = name.removeprefix("aten::").removeprefix("fsdp::").partition(".")[0]
    if name in _NO_KERNEL or not (results or inputs):
        return None
    kind = next((each.type for each in inputs if each.type.startswith(("fp", "bf"))), "fp32")
    if "::" in name:  # an operator of the program's own, which may share its name with one of torch
        return Operation(UNKNOWN_FAMILY, kind, 0, sum(each.bytes for each in (*inputs, *results)), (0,))
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        return _matmul(name, inputs, kind)
    if name.startswith("mkldnn_rnn_layer"):
        return _recurrent(name, inputs, results, kind)
    if "attention" in name and inputs and len(inputs[0].shape) == 4:
        return _attention(name, inputs, kind)
    if name.endswith(("convolution", "convolution_backward")) and len(inputs) > 1:
        return _convolution(name, inputs, results, kind)
    if name == "all_gather_copy_in":  # into a part of its second result
        inputs = results = results[:1]
    if name in _WRITES_ONLY:
        inputs = inputs[1:]
    moved = sum(each.bytes for each in (*inputs, *results))
    if name in ("embedding", "index_select", "gather"):
        return Operation("embedding", kind, 0, 2 * sum(each.bytes for each in results), (0,))
    if name in _FAMILIES:
        family, passes = _FAMILIES[name]
        width = inputs[0].shape[-1] if family.startswith(_BY_ROW) and inputs[0].shape else 0
        if family == "softmax" and width > _IN_REGISTERS and width * BYTES.get(kind, 4) % _ALIGNED:
            # The kernel keeps no row in shared memory then and reads each three times, as it does with rows that
            # are too long for that; what it takes follows from the elements, whatever their type (SoftMax.cu).
            return Operation(family, kind, 0, 2 * BYTES["fp32"] * inputs[0].elements, (_NOT_KEPT,))
        return Operation(family, kind, 0, round(passes * moved), (width,))
    family = _memory_bound(name, inputs, results)
    if family in _BY_ELEMENT:
        moved = sum(max(each.bytes, each.bytes // BYTES.get(each.type, 4) * _WORD) for each in (*inputs, *results))
    return Operation(family, kind, 0, moved, (0,))


def matmul(family: str, kind: str, batch: int, rows: int, columns: int, sums: int) -> Operation:
    """Return a batch of matmuls."""
    moved = batch * (rows * sums + sums * columns + rows * columns) * BYTES.get(kind, 4)
    return Operation(family, kind, 2 * batch * rows * columns * sums, moved, (batch, rows, columns, sums))


def attention(family: str, kind: str, heads: int, queries: int, keys: int, size: int) -> Operation:
    """Return attention that keeps no scores, without what a mask saves.

    The backward pass computes five matmuls, the forward pass two (Dao, FlashAttention-2).
    """
    passes, matmuls = (2, 5) if family.endswith("backward") else (1, 2)
    moved = passes * 2 * heads * (queries + keys) * size * BYTES.get(kind, 4)
    return Operation(
        family, kind, 2 * matmuls * heads * queries * keys * size, moved, (heads, queries, keys, size)
    )


def alignment(sizes: tuple[int, ...], kind: str) -> int:
    """Return how many elements a kernel loads at once from the rows of a matmul.

    Tensor cores wait for their 16-bit elements, at best `FULLY_ALIGNED` at once; it matters little to other types.
    """
    _, _, columns, sums = sizes
    return gcd(FULLY_ALIGNED, columns, sums) if kind in ("bf16", "fp16") else FULLY_ALIGNED


def _matmul(name: str, inputs: Sequence[Tensor], kind: str) -> Operation | None:
    left, right = inputs[:2] if name == "_scaled_mm" else inputs[-2:]
    batch, (rows, sums), columns = prod(left.shape[:-2]), left.shape[-2:], right.shape[-1]
    if not batch * rows * sums * columns:
        return None
    family = "matmul"
    if name in ("bmm", "baddbmm"):
        family = "batched matmul"
    elif name == "addmm" and right.is_column_major and not left.is_column_major and len(inputs[0].shape) == 1:
        family = "linear"
    return matmul(family, kind, batch, rows, columns, sums)


def _attention(name: str, inputs: Sequence[Tensor], kind: str) -> Operation | None:
    """Return the work of attention that keeps no scores.

    Inputs are batch x heads x length x size; of the kernels themselves, as in "_flash_attention_forward", batch x
    length x heads x size.
    """
    backward = name.endswith("backward")
    query, key = inputs[backward : backward + 2]
    head, length = (1, 2) if name.startswith("_scaled_dot_product") else (2, 1)
    heads = query.shape[0] * query.shape[head]
    if not query.elements * key.elements:
        return None
    family = "attention backward" if backward else "attention"
    return attention(family, kind, heads, query.shape[length], key.shape[length], query.shape[3])


def _recurrent(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor], kind: str) -> Operation:
    """Return the work of a recurrent layer: each element of the sequence meets both of its weights."""
    sequence, of_input, of_state = inputs[:3]
    positions = sequence.elements // max(sequence.shape[-1], 1)
    passes = 2 if name.endswith("backward") else 1
    flops = 2 * passes * positions * (of_input.elements + of_state.elements)
    moved = sum(each.bytes for each in (*inputs, *results))
    return Operation("recurrent", kind, flops, moved, (0,))


def _convolution(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor], kind: str) -> Operation:
    """Return the work of a convolution; its backward pass computes two as large as the forward pass."""
    backward = name.endswith("backward")
    weight = inputs[1 + backward]
    positions = (inputs[0] if backward else results[0]).elements if results else 0
    flops = 2 * positions * prod(weight.shape[1:]) * (2 if backward else 1)
    moved = sum(each.bytes for each in (*inputs, *results))
    return Operation("convolution backward" if backward else "convolution", kind, flops, moved, (0,))


def _memory_bound(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """Return the family of an operator that does little but move its inputs and results.

    It is `UNKNOWN_FAMILY` if nothing says that, as of a sort or of an operator of the program's own.
    """
    if name in _REDUCTIONS:
        return "reduction"
    if name in _JOINS:
        return "copy"
    of_many = name.startswith(_MANY)
    if not (of_many or name in _COPIES or name in _BY_ELEMENT_TOO or _is_pointwise(name)):
        return UNKNOWN_FAMILY
    if not all(each.in_order for each in inputs):
        return "copy"
    if name in _COPIES and inputs and results:
        types = inputs[0].type, results[0].type
        vectorized = types[0] == types[1] or types in (("fp32", "bf16"), ("fp32", "fp16"))
        return "element-wise" if vectorized else "copy"
    if of_many:
        return "element-wise"
    result = max((each.elements for each in results), default=0)
    stored = (each.bytes // BYTES.get(each.type, 4) for each in inputs)
    return "broadcast" if any(1 < each < result for each in stored) else "element-wise"


@lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)
