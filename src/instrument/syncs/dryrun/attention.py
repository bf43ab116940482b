"""Chooses the attention that CUDA runs in place of the CPU's, as ``sdp_utils.cpp`` of torch does on an A100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional

from .substitutes import CudaOperator, Substitute, Tensors, autocasting, can_substitute
from .torch_modes import FunctionMode

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of flash attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_aten = torch.ops.aten


def attention(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `scaled_dot_product_attention` with the operators of CUDA."""
    given = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | kwargs
    q, k, v = (given[name] for name in _NAMES[:3])
    if mode.tags.device(q) is None or not can_substitute(mode.state) or not _plain(q, k, v):
        return mode.run_and_tag(func, args, kwargs)
    with autocasting(mode.state, given, _NAMES[:4], lower=True):
        return _attention(mode, given)


def _attention(mode: FunctionMode, given: dict[str, Any]) -> Any:
    q, k, v = (given[name] for name in _NAMES[:3])
    chosen = _backend(given)
    if chosen == "math":
        names = ("attn_mask", "dropout_p", "is_causal")
        rest = [given[name] for name in names]
        more = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
        return mode.run_and_tag(torch._scaled_dot_product_attention_math, (q, k, v, *rest), more)[0]
    return _flash(mode, given) if chosen == "flash" else _efficient(mode, given)


def _plain(*tensors: Any) -> bool:
    return all(each.dim() == 4 and each.layout is torch.strided and each.numel() for each in tensors)


def _backend(given: dict[str, Any]) -> Literal["flash", "efficient", "math"]:
    q, k, v, mask = (given[name] for name in _NAMES[:4])
    same_heads = q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not (q.dtype == k.dtype == v.dtype and q.shape[0] == k.shape[0] == v.shape[0]):
        return "math"
    grouped = given["enable_gqa"] and q.shape[1] % k.shape[1] == 0 == q.shape[1] % v.shape[1]
    if any(each.stride(-1) != 1 for each in (q, k, v)) or not (same_heads or grouped):
        return "math"
    if (
        torch.backends.cuda.flash_sdp_enabled()
        and q.dtype in _HALF
        and mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= _LARGEST_HEAD
        and not (given["is_causal"] and q.shape[2] != k.shape[2])
    ):
        return "flash"
    aligned = 8 if q.dtype in _HALF else 4
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and q.dtype in (*_HALF, torch.float32)
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % aligned == 0 == v.shape[-1] % aligned
    ):
        return "efficient"
    return "math"


def _flash(mode: FunctionMode, given: dict[str, Any]) -> Any:
    q, k, v = (given[name] for name in _NAMES[:3])
    size = q.shape[-1]
    scale = given["scale"] or size**-0.5
    if size % 8:
        q, k, v = (functional.pad(each, (0, 8 - size % 8)) for each in (q, k, v))
    dropout, causal = given["dropout_p"], given["is_causal"]
    more = {"scale": scale, "enable_gqa": given["enable_gqa"]}  # not ``given``, which would keep the tensors

    def compute(tensors: Tensors) -> Any:
        q, k, v = tensors
        return functional.scaled_dot_product_attention(q, k, v, None, dropout, causal, **more)

    def further(tensors: Tensors, out: Any) -> list[Any]:
        q = tensors[0]
        statistics = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
        return [statistics, *(torch.empty(size, dtype=torch.uint64, device="cpu") for size in ((2,), ()))]

    def backward_arguments(gradient: Any, tensors: Tensors, results: Tensors) -> Tensors:
        out, statistics, *state = results
        lengths = None, None, tensors[0].shape[2], tensors[1].shape[2]
        return [gradient, *tensors, out, statistics, *lengths, dropout, causal, *state]

    operator = CudaOperator(
        compute, _aten._scaled_dot_product_flash_attention.default,
        lambda tensors: [*tensors, dropout, causal, False], further,
        _aten._scaled_dot_product_flash_attention_backward.default, backward_arguments, _like,
    )  # fmt: skip
    out = Substitute.apply(mode.state, operator, q, k, v)  # type: ignore[no-untyped-call]
    return out if out.shape[-1] == size else out[..., :size]


def _by_length(tensor: Any, _: Any) -> Any:
    """Return a tensor of batch x heads x length x size that is contiguous with the heads after the length."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() == 4 else tensor


def _like(tensor: Any, of: Any) -> Any:
    """Return the result, or a gradient, with its dimensions in the order of the query's or the tensor's."""
    return torch.empty_like(of, device="cpu").copy_(tensor)


def _efficient(mode: FunctionMode, given: dict[str, Any]) -> Any:
    q, k, v, mask = (given[name] for name in _NAMES[:4])
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        if mask.shape[-1] % 16:
            length = mask.shape[-1]
            mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
        mask = mask.expand(*q.shape[:3], k.shape[2])
    dropout, causal = given["dropout_p"], given["is_causal"]
    more = {name: given[name] for name in ("scale", "enable_gqa")}
    logs = any(each.requires_grad for each in (q, k, v)) and torch.is_grad_enabled()

    def compute(tensors: Tensors) -> Any:
        q, k, v, mask = tensors
        return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **more)

    def further(tensors: Tensors, out: Any) -> list[Any]:
        batch, heads, length = tensors[0].shape[:3]
        size = (batch, heads, -(-length // 32) * 32 if logs else 0)
        statistics = torch.empty(size, dtype=torch.float32, device="cpu")
        return [statistics, *(torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))]

    def backward_arguments(gradient: Any, tensors: Tensors, results: Tensors) -> Tensors:
        mask = tensors[3]
        needed = [True, True, True, mask is not None and mask.requires_grad]
        return [gradient, *tensors, *results, dropout, needed, causal]

    operator = CudaOperator(
        compute, _aten._scaled_dot_product_efficient_attention.default,
        lambda tensors: [*tensors, logs, dropout, causal], further,
        _aten._scaled_dot_product_efficient_attention_backward.default, backward_arguments, _by_length,
    )  # fmt: skip
    return Substitute.apply(mode.state, operator, q, k, v, mask)  # type: ignore[no-untyped-call]
