"""Operators of the CPU for which CUDA runs another one, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
Call = tuple[Any, Sequence[Any]]
Translation = Callable[[Sequence[Any]], Call | None]


def _batch_norm(args: Sequence[Any]) -> bool:
    """Return whether CUDA runs cuDNN's batch norm, by the arguments of ``native_batch_norm``."""
    x, weight, bias, mean, variance, training = args[:6]
    return (
        torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and ((mean is None) == (variance is None))
        and (mean is not None or training)
        and x.dim() >= 3
        and x.shape[0] <= (880801 if training else 65535)
    )


def _batch_norm_backward(args: Sequence[Any]) -> bool:
    _, x, weight, mean, variance, _, _, training = args[:8]
    return training and _batch_norm([x, weight, weight, mean, variance, training])


_INTO_ZEROS = (
    "Index",
    "Gather",
    "Topk",
    "Sort",
    "Max",
    "Min",
    "Kthvalue",
    "Median",
    "Mode",
    "Nanmedian",
    "Cummax",
    "Cummin",
)
"""Beginnings of the names of autograd nodes that scatter a gradient into zeros, in place unless a mode is on."""


def _in_place(func: Any, *more: Any) -> Translation:
    """Return the translation of an operator of the backward pass to one that writes its first argument."""

    def translate(args: Sequence[Any]) -> Call | None:
        node = torch._C._current_autograd_node()
        return (func, [*args, *more]) if node is not None and node.name().startswith(_INTO_ZEROS) else None

    return translate


def _batch_norm_of_cudnn(args: Sequence[Any]) -> Call | None:
    return (_aten.cudnn_batch_norm.default, args) if _batch_norm(args) else None


def _batch_norm_backward_of_cudnn(args: Sequence[Any]) -> Call | None:
    if not _batch_norm_backward(args):
        return None
    return _aten.cudnn_batch_norm_backward.default, [args[place] for place in (1, 0, 2, 3, 4, 5, 6, 8)]


TRANSLATED: dict[Any, Translation] = {
    _aten.native_batch_norm.default: _batch_norm_of_cudnn,
    _aten.native_batch_norm_backward.default: _batch_norm_backward_of_cudnn,
    _aten.index_put.default: _in_place(_aten._index_put_impl_.default, True),  # without a check of the indices
    _aten.scatter_add.default: _in_place(_aten.scatter_add_.default),
    _aten.scatter.src: _in_place(_aten.scatter_.src),
    _aten.index_add.default: _in_place(_aten.index_add_.default),
}
"""By operator of the CPU: a function that returns the operator of CUDA and its arguments, or None for the same."""
