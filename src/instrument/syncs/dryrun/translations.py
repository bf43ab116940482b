"""Operators of the CPU that CUDA has under another name, with the same arguments in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


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
    gradient, x, weight, mean, variance, _, _, training = args[:8]
    return training and _batch_norm([x, weight, weight, mean, variance, training])


Translation = tuple[Callable[[Sequence[Any]], bool], Any, tuple[int, ...]]
TRANSLATED: dict[Any, Translation] = {
    _aten.native_batch_norm.default: (_batch_norm, _aten.cudnn_batch_norm.default, (0, 1, 2, 3, 4, 5, 6, 7)),
    _aten.native_batch_norm_backward.default: (
        _batch_norm_backward, _aten.cudnn_batch_norm_backward.default, (1, 0, 2, 3, 4, 5, 6, 8),
    ),
}  # fmt: skip
"""By operator of the CPU: whether CUDA runs another one for some arguments, that one, and where it takes which."""
