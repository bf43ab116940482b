"""Functions that read a whole tensor, and functions that behave differently on a GPU or under a mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..syncs.operations import FROM_GPU, VALUE
from .function_mode import FunctionMode, Handler
from .rules import CPU_CHECKS
from .state import size_of

T = torch.Tensor
_NAN_CHECKS = ("isnan", "isinf", "isposinf", "isneginf", "isfinite", "isclose")


def _numpy(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    force = kwargs.get("force", False)
    if mode.tags.device(source) is not None:
        if not force:
            raise TypeError(
                f"can't convert {mode.tags.device(source)} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        mode.state.record_sync("numpy", FROM_GPU, "D2H", size_of(source))
    if mode.state.fake is not None:
        return mode.state.fake.run_with_data(lambda real: real.detach().numpy(), source)
    return func(*args, **kwargs)


def _read_all(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `tolist` or `repr`, which copy the whole tensor at once."""
    if mode.tags.device(args[0]) is not None:
        mode.state.record_sync(func.__name__, FROM_GPU, "D2H", size_of(args[0]))
    return mode.read(func, *args, **kwargs)


def _format(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if mode.tags.device(args[0]) is not None:
        mode.state.record_sync("format", VALUE)
    return mode.read(func, *args, **kwargs)


def _reduce(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the pickling of a tensor, whose storage is copied later."""
    if mode.state.fake is None:
        return mode.run_quietly(func, *args, **kwargs)
    small = mode.state.fake.stand_in(args[0])
    mode.tags.put(small, mode.tags.get(args[0]))
    return mode.state.fake.run_with_data(func, small, *args[1:])


def _deepcopy(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    tag = mode.tags.get(source)
    fake = mode.state.fake
    out = mode.run_quietly(func, *args, **kwargs) if fake is None else fake.deepcopy(source, args[1])
    mode.tags.put(out, tag)
    if out.grad is not None:
        mode.tags.put(out.grad, mode.tags.get(source.grad))
    return out


def _backward(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    with mode.watch_user_code():
        torch.autograd.backward(
            args[0], given.get("gradient"), given.get("retain_graph"), given.get("create_graph", False),
            inputs=given.get("inputs"),
        )  # fmt: skip


def _nan_check(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a check for NaN or the like, which finds none in tensors without data."""
    out = mode.run_and_tag(func, args, kwargs)
    if mode.state.fake is not None:
        mode.state.fake.set_known_value(out, func.__name__ in ("isfinite", "isclose"))
    return out


def _without_value_check(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function that checks values only on the CPU."""
    return mode.run_quietly(mode.run_and_tag, func, args, kwargs)


def _pack_padded(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if mode.tags.device(args[1]) is not None:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor")
    return mode.run_and_tag(func, args, kwargs)


def _one_hot(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return _without_value_check(mode, func, args, kwargs) if classes >= 0 else mode.run_and_tag(func, args, kwargs)


def _pad_packed(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `pad_packed_sequence`, whose lengths stay on the CPU."""
    out = mode.run_and_tag(func, args, kwargs)
    mode.tags.put(out[1], None)
    return out


def _cross_entropy(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record the selection by a mask for smoothed labels with weights, which torch omits under a mode."""
    logits, target, weight, reduction, _, smoothing = args
    averaged = weight is not None and smoothing and reduction == 1 and not target.is_floating_point()
    if averaged and mode.tags.device(logits) is not None:
        mode.state.record_sync("cross_entropy")
    return mode.run_and_tag(func, args, kwargs)


def _sparse(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    indices = args[0] if args else kwargs.get("indices")
    if len(args) < 3 and kwargs.get("size") is None and mode.tags.first_device([indices]) is not None:
        mode.state.record_sync("sparse_coo_tensor", direction="D2H")
    return mode.run_and_tag(func, args, kwargs)


CALLS: dict[Any, Handler] = {
    T.numpy: _numpy,
    T.__array__: _numpy,
    T.tolist: _read_all,
    T.__repr__: _read_all,
    T.__reduce_ex__: _reduce,
    T.__format__: _format,
    T.__deepcopy__: _deepcopy,
    T.backward: _backward,
    torch.sparse_coo_tensor: _sparse,
    torch._C._nn.cross_entropy_loss: _cross_entropy,
    torch._VF._pack_padded_sequence: _pack_padded,
    torch._VF._pad_packed_sequence: _pad_packed,
    torch.nn.functional.one_hot: _one_hot,
    **{getattr(owner, name): _nan_check for owner in (torch, T) for name in _NAN_CHECKS},
    **{getattr(owner, name): _without_value_check for owner in (torch, T) for name in CPU_CHECKS},
}
