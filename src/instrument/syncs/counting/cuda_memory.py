"""What operators take on a GPU beside the results that they have on the CPU as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...base.compat.autograd import in_backward
from .reductions import shared_bytes


class Gpu(NamedTuple):
    """What of a GPU determines how much memory operators take.

    Attributes:
        multiprocessors: how many it has.
        threads: how many each of them runs at a time.
        workspace_bytes: what torch gives each handle of cuBLAS.
    """

    multiprocessors: int
    threads: int
    workspace_bytes: int


A100 = Gpu(108, 2048, 8519680)
H100 = Gpu(132, 2048, 1 << 25)


class Recorder(Protocol):
    """What the rules need of a `MemoryRecorder`."""

    gpu: Gpu
    call: str

    def temporary(self, *sizes: int) -> None:
        """Note memory that an operator takes while it runs."""

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """Note that a result that was just made has another size on a GPU."""

    def use_cublas(self) -> None:
        """Note a matmul."""

    def accumulate(self, out: torch.Tensor, *terms: torch.Tensor) -> None:
        """Note a sum that CUDA computes in the memory of one of its terms."""

    def on_gpu(self, storage: Any) -> None:
        """Note that the memory of ``storage`` is on the GPU."""


Extra = Callable[["Recorder", Sequence[Any], dict[str, Any], Any], None]
_aten: Any = torch.ops.aten
_INDEX = 8  # bytes of an index beside a value


def _cublas(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    recorder.use_cublas()


def _add(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Autograd adds gradients in place, and `linear` its bias, but not while a mode is on."""
    if recorder.call == "linear":
        recorder.accumulate(out, args[0])
    elif in_backward() and not torch.is_grad_enabled():
        recorder.accumulate(out, *(term for term in args if isinstance(term, torch.Tensor)))


def _accumulator(dtype: torch.dtype) -> int:
    """Return the size in bytes of what sums of ``dtype`` are computed in."""
    if dtype.is_floating_point or dtype.is_complex:
        return max(dtype.itemsize, 8 if dtype.is_complex else 4)
    return 8


def _reduction(dims_at: int | None, partial: Callable[[torch.dtype], int] = _accumulator) -> Extra:
    """Return the rule of a reduction.

    Args:
        dims_at: the place of its dimensions among the arguments; None if it reduces all.
        partial: returns the size of a partial result in bytes.
    """

    def extra(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        source = args[0]
        dims = None
        if dims_at is not None:
            dims = args[dims_at] if len(args) > dims_at else kwargs.get("dim")
        if dims is not None:
            rank = max(source.dim(), 1)
            dims = tuple(dim % rank for dim in ([dims] if isinstance(dims, int) else dims)) or None
        dtype = kwargs.get("dtype") or source.dtype
        gpu = recorder.gpu
        sizes = shared_bytes(
            tuple(source.shape), source.stride(), dims, source.storage_offset() % 4, partial(dtype),
            gpu.multiprocessors, gpu.threads,
        )  # fmt: skip
        if sizes:
            recorder.temporary(*sizes)

    return extra


def _up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


def _flash_backward(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Flash attention sums the gradient of the query in 32 bits, in a matrix of padded size.

    It takes the gradient of the result, and the result, with the heads after the length.
    """
    gradient, query, result = args[0], args[1], args[4]
    batch, heads, length, width = query.shape
    rows, size = 4 * batch * heads * _up(length, 128), query.numel() * query.element_size()
    copies = [size for each in (gradient, result) if not each.transpose(1, 2).is_contiguous()]
    recorder.temporary(*copies, rows, rows * _up(width, 32))


def _efficient_backward(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Memory-efficient attention, too; it also sums the products of gradient and result by rows first."""
    query = args[1]
    batch, heads, length, width = query.shape
    rows = 4 * batch * heads
    if query.dtype is torch.float32:
        recorder.temporary(query.numel() * query.element_size(), rows * length, rows * length)
    recorder.temporary(rows * length, rows * _up(length, 64) * _up(width, 32) + 8 * rows)


def _float_statistics(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Means and deviations are of 32 bits on CUDA."""
    for tensor in out[1:]:
        recorder.resize(tensor, 4 * tensor.numel())


def _resize(recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    recorder.on_gpu(args[0].untyped_storage())


EXTRA: dict[Any, Extra] = {
    **dict.fromkeys((_aten.resize_.default, _aten.resize_as_.default), _resize),
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.native_layer_norm.default: _float_statistics,
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _cublas),
    _aten.add.Tensor: _add,
    **dict.fromkeys((_aten.sum.default, _aten.mean.default), _reduction(None)),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim), _reduction(1)),
    **dict.fromkeys((_aten.max.default, _aten.min.default), _reduction(None, lambda dtype: dtype.itemsize)),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default), _reduction(1, lambda dtype: dtype.itemsize)),
    **dict.fromkeys((_aten.max.dim, _aten.min.dim), _reduction(1, lambda dtype: 2 * _INDEX)),
    _aten.linalg_vector_norm.default: _reduction(2),
}
