"""What functions of torch do differently on a GPU: moves, tensors from data, and reads of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.dlpack import DLDeviceType

from ...explain.waits.operations import FROM_GPU
from ..counting.calls import Memory
from ..transfer import Transfer, is_gathered, parse_cuda, parse_to
from .attention import attention
from .dataless import note
from .rules import CPU_CHECKS, record_transfer
from .state import PINNED, as_cuda, size_of, tensors
from .substitutes import dropout, rms_norm
from .torch_modes import CPU, FunctionMode, Handler, default_device

T = torch.Tensor
_DLPACK_CUDA = 2  # its name depends on the version of torch


def _on_gpu(answer: Callable[[torch.device], Any]) -> Handler:
    """Return the handler of a function that returns ``answer(device)`` for a tensor on a GPU."""

    def handler(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = mode.tags.device(args[0])
        return func(*args, **kwargs) if device is None else answer(device)

    return handler


def _resolve_devices(
    mode: FunctionMode, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments of `Tensor.to` with devices in place of tensors and device numbers.

    torch would look both up itself, on the GPU.
    """
    positional, named = list(args), dict(kwargs)
    first = positional[0] if positional else None
    if isinstance(first, T):
        positional[:1] = [_device_in_run(mode, first), first.dtype]
    elif type(first) is int:
        positional[0] = as_cuda(first)
    if isinstance(other := named.pop("tensor", None), T):
        named |= {"device": _device_in_run(mode, other), "dtype": other.dtype}
    if type(named.get("device")) is int:
        named["device"] = as_cuda(named["device"])
    return positional, named


def _device_in_run(mode: FunctionMode, tensor: torch.Tensor) -> torch.device:
    device: torch.device = mode.tags.device(tensor) or _real_device(tensor)
    return device


def _parse_to(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Parse the arguments of `Module.to` and `PackedSequence.to`."""
    positional, named = _resolve_devices(mode, args, kwargs)
    return func(*positional, **named)


def _to(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source, *rest = args
    transfer = parse_to(*_resolve_devices(mode, rest, kwargs))
    if transfer.device is None:
        return mode.run_and_tag(func, args, kwargs)
    return _transfer(mode, "to", source, transfer)


def _cuda(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    transfer = parse_cuda(args[1:], kwargs)
    device = as_cuda("cuda" if transfer.device is None else transfer.device)
    if device is None:
        raise RuntimeError(f"Invalid device, must be cuda device: {transfer.device}")
    return _transfer(mode, "cuda", args[0], transfer._replace(device=device))


def _cpu(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _transfer(mode, "cpu", args[0], Transfer(CPU, **kwargs))


def _transfer(mode: FunctionMode, name: str, source: torch.Tensor, transfer: Transfer) -> Any:
    tags, target = mode.tags, as_cuda(transfer.device)
    before = tags.device(source)
    dtype, non_blocking = transfer.dtype or source.dtype, transfer.non_blocking
    memory_format = transfer.memory_format or torch.preserve_format
    real = mode.real_device(transfer.device)
    if real.type != "cpu" or _real_device(source).type != "cpu":  # such as "meta"
        return source.to(real, dtype, non_blocking, transfer.copy, memory_format=memory_format)
    if before == target:
        if target is None:
            mode.state.note_cpu_selection()
        return mode.run_and_tag(
            T.to, (source, dtype, non_blocking, transfer.copy), {"memory_format": memory_format}
        )
    if source.numel() and (before is None or target is None):
        # torch pins the result of a non-blocking copy from the GPU
        up = target is not None
        pinned = tags.get(source) is PINNED if up else non_blocking
        gathered = up and is_gathered(source, dtype, memory_format=memory_format)
        memory: Memory = "gpu" if up else "pinned" if pinned else "cpu"
        mode.state.count_copy(source, memory, dtype=dtype, non_blocking=non_blocking)
        record_transfer(mode.state, name, up, pinned, non_blocking, size_of(source), gathered=gathered)
    out = mode.run_on_host(source.to, dtype=dtype, copy=True, memory_format=memory_format)
    tags.put(out, target or (PINNED if non_blocking else None))
    return out


def _type(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    device = mode.tags.device(source)
    if wanted is None:
        name: str = func(source)
        return name if device is None else name.replace("torch.", "torch.cuda.", 1)
    if isinstance(wanted, torch.dtype):
        return mode.run_and_tag(func, args, kwargs)
    name = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
    target = as_cuda("cuda") if ".cuda." in name else CPU
    kind = torch.empty(0, device=CPU).type(name.replace(".cuda.", ".")).dtype
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return _transfer(mode, "type", source, Transfer(target, kind, non_blocking))


def _type_as(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
    return _transfer(mode, "type_as", source, Transfer(_device_in_run(mode, other), other.dtype))


def _pin_memory(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if mode.tags.get(source) is PINNED:
        return source
    if mode.tags.device(source) is None and _real_device(source).type != "cpu":
        return func(*args, **kwargs)  # raises torch's own error
    if mode.tags.device(source) is not None:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    out = source.clone()
    mode.tags.put(out, PINNED)
    return out


def _from_data(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `torch.tensor` and similar functions, from Python or numpy data or from tensors."""
    method = func is T.new_tensor
    data: Any = args[1 if method else 0] if len(args) > method else kwargs.get("data", kwargs.get("obj"))
    own = mode.tags.device(data) if isinstance(data, T) else None
    device = kwargs.get("device")
    if device is None and not method:
        device = default_device()
    if device is None and (method or isinstance(data, T)):
        device = _device_in_run(mode, args[0] if method else data)
    kwargs = {**kwargs, "device": None if device is None else mode.real_device(device)}
    target = as_cuda(device)
    name, state = func.__name__, mode.state
    if not isinstance(data, T):
        held = [t for t in tensors(data) if mode.tags.device(t) is not None]
        if held:
            for each in held:
                state.count_copy(each, "cpu")
            state.record_sync(name, "reads the tensors it is made of back from the GPU", "D2H")
        if state.fake is not None and next(tensors(data), None) is not None:
            data = state.fake.run_with_data(lambda real: tree_map_only(T, T.tolist, real), data)
            args = (args[0], data, *args[2:]) if method else (data, *args[1:])
    up = own != target and target is not None and (not isinstance(data, T) or data.numel())
    if not up and own is not None and target is None and kwargs["device"].type == "cpu":
        state.count_copy(data, "cpu")
        state.record_sync(name, FROM_GPU, "D2H", size_of(data))
    out = _create_quietly(mode, func, args, kwargs)
    if up and out.numel():
        pinned = isinstance(data, T) and mode.tags.get(data) is PINNED
        state.count_copy(out, "gpu", source="pinned" if pinned else "cpu")
        record_transfer(state, name, True, pinned, False, size_of(out))
    if out is data and own != target:
        out = data.clone()
    if target is not None or own is not None:
        mode.tags.put(out, target)
    return out


def _create_quietly(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    pinned = kwargs.get("pin_memory", False)
    out = mode.run_on_host(func, *args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
    if pinned:
        mode.tags.put(out, PINNED)
    return out


def _real_device(tensor: torch.Tensor) -> torch.device:
    return T.device.__get__(tensor)


def _new(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the legacy `Tensor.new`, with sizes or with data."""
    out = mode.run_quietly(mode.run_and_tag, func, args, kwargs)
    device = mode.tags.device(args[0])
    if device is not None:
        if len(args) > 1 and not isinstance(args[1], (int, T)):
            mode.state.count_copy(out, "gpu", source="cpu")
            record_transfer(mode.state, "new", True, False, False, size_of(out))
        mode.tags.put(out, device)
    return out


def _share_memory(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a GPU tensor unchanged, as its memory is shared already."""
    return args[0] if mode.tags.device(args[0]) is not None else mode.run_and_tag(func, args, kwargs)


def _device_of_index(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `torch.device`, which queries the GPU when its only argument is a number."""
    number = args[0] if args else kwargs.get("device")
    alone = type(number) is int and len(args) + len(kwargs) == 1
    return as_cuda(number) if alone else func(*args, **kwargs)


_KIND: Any = T  # the stubs do not show that its properties are descriptors
ANSWERS: dict[Any, Handler] = {
    torch.device: _device_of_index,
    torch._C._nn._parse_to: _parse_to,
    T.__dlpack_device__: _on_gpu(lambda device: (DLDeviceType(_DLPACK_CUDA), device.index)),
    T.device.__get__: _on_gpu(lambda device: device),
    _KIND.is_cuda.__get__: _on_gpu(lambda device: True),
    _KIND.is_cpu.__get__: _on_gpu(lambda device: False),
    T.get_device: _on_gpu(lambda device: device.index),
    torch.get_device: _on_gpu(lambda device: device.index),
    T.is_pinned: lambda mode, func, args, kwargs: mode.tags.get(args[0]) is PINNED,
    T.is_shared: _on_gpu(lambda device: True),
}


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
        mode.state.count_copy(source, "cpu")
        mode.state.record_sync("numpy", FROM_GPU, "D2H", size_of(source))
    if mode.state.fake is not None:
        return mode.state.fake.run_with_data(lambda real: real.detach().numpy(), source)
    return func(*args, **kwargs)


def _read_all(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `tolist` or `repr`, which copy the whole tensor at once, or `format`, which reads a number."""
    if mode.tags.device(args[0]) is not None:
        copied = () if func is T.__format__ else (FROM_GPU, "D2H", size_of(args[0]))
        mode.state.count_copy(args[0], "cpu")
        mode.state.record_sync(func.__name__, *copied)
    run = mode.run_on_host if mode.state.fake is None else mode.state.fake.run_with_data
    return run(func, *args, **kwargs)


def _reduce(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the pickling of a tensor, whose storage is copied later."""
    if mode.state.fake is None:
        return mode.run_quietly(func, *args, **kwargs)
    pretended = mode.state.fake.pretended(args[0])
    mode.tags.put(pretended, mode.tags.get(args[0]))
    return mode.state.fake.run_with_data(func, pretended, *args[1:])


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
        torch.autograd.backward(args[0], given.pop("gradient", None), **given)


def _nan_check(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a check for NaN or the like, which finds none in tensors without data."""
    out = mode.run_and_tag(func, args, kwargs)
    if mode.state.fake is not None:
        note(out, func.__name__ in ("isfinite", "isclose"))
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
    T.to: _to,
    T.cuda: _cuda,
    T.cpu: _cpu,
    T.type: _type,
    T.type_as: _type_as,
    T.pin_memory: _pin_memory,
    T.share_memory_: _share_memory,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    T.new_tensor: _from_data,
    T.new: _new,
    T.numpy: _numpy,
    T.__array__: _numpy,
    T.tolist: _read_all,
    T.__repr__: _read_all,
    T.__reduce_ex__: _reduce,
    T.__format__: _read_all,
    T.__deepcopy__: _deepcopy,
    T.backward: _backward,
    torch._C._nn.scaled_dot_product_attention: attention,
    torch.dropout: dropout,
    torch.rms_norm: rms_norm,
    torch.sparse_coo_tensor: _sparse,
    torch._C._nn.cross_entropy_loss: _cross_entropy,
    torch._VF._pack_padded_sequence: _pack_padded,
    torch._VF._pad_packed_sequence: _pad_packed,
    torch.nn.functional.one_hot: _one_hot,
    **{getattr(owner, name): _nan_check for owner in (torch, T) for name in _NAN_CHECKS},
    **{getattr(owner, name): _without_value_check for owner in (torch, T) for name in CPU_CHECKS},
}
