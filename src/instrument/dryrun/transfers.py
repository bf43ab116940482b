"""The devices of tensors, their moves between CPU and GPU, and the creation of tensors from data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.dlpack import DLDeviceType

from ..syncs.operations import FROM_GPU
from ..syncs.transfer import Transfer, is_gathered, parse_cuda, parse_to, resolve_devices
from .function_mode import CPU, FunctionMode, Handler, default_device
from .rules import record_transfer
from .state import as_cuda, size_of
from .tags import PINNED, tensors

T = torch.Tensor
_DLPACK_CUDA = 2  # its name depends on the version of torch


def _device_of(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return mode.tags.device(args[0]) or func(*args)


def _is_cuda(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return mode.tags.device(args[0]) is not None or func(*args)


def _is_cpu(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return mode.tags.device(args[0]) is None and func(*args)


def _get_device(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    device = mode.tags.device(args[0])
    index: int = func(*args, **kwargs) if device is None else device.index
    return index


def _is_pinned(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return mode.tags.get(args[0]) is PINNED


def _resolve_devices(
    mode: FunctionMode, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return resolve_devices(args, kwargs, functools.partial(_device_in_run, mode), as_cuda)


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
        record_transfer(mode.state, name, up, pinned, non_blocking, size_of(source), gathered=gathered)
    out = mode.run_quietly(source.to, dtype=dtype, copy=True, memory_format=memory_format)
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
            state.record_sync(name, "reads the tensors it is made of back from the GPU", "D2H")
        if state.fake is not None and next(tensors(data), None) is not None:
            data = state.fake.run_with_data(lambda real: tree_map_only(T, T.tolist, real), data)
            args = (args[0], data, *args[2:]) if method else (data, *args[1:])
    if own != target and target is not None and (not isinstance(data, T) or data.numel()):
        out = _create_quietly(mode, func, args, kwargs)
        if out.numel():
            pinned = isinstance(data, T) and mode.tags.get(data) is PINNED
            record_transfer(state, name, True, pinned, False, size_of(out))
    else:
        if own is not None and target is None and kwargs["device"].type == "cpu":
            state.record_sync(name, FROM_GPU, "D2H", size_of(data))
        out = _create_quietly(mode, func, args, kwargs)
    if out is data and own != target:
        out = data.clone()
    if target is not None or own is not None:
        mode.tags.put(out, target)
    return out


def _create_quietly(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    pinned = kwargs.get("pin_memory", False)
    out = mode.run_quietly(func, *args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
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
            record_transfer(mode.state, "new", True, False, False, size_of(out))
        mode.tags.put(out, device)
    return out


def _is_shared(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return mode.tags.device(args[0]) is not None or func(*args)


def _share_memory(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a GPU tensor unchanged, as its memory is shared already."""
    return args[0] if mode.tags.device(args[0]) is not None else mode.run_and_tag(func, args, kwargs)


def _dlpack_device(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = mode.tags.device(args[0])
    return func(*args) if device is None else (DLDeviceType(_DLPACK_CUDA), device.index)


def _device_of_index(mode: FunctionMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `torch.device`, which queries the GPU when its only argument is a number."""
    number = args[0] if args else kwargs.get("device")
    alone = type(number) is int and len(args) + len(kwargs) == 1
    return as_cuda(number) if alone else func(*args, **kwargs)


_KIND: Any = T  # the stubs do not show that its properties are descriptors
ANSWERS: dict[Any, Handler] = {
    torch.device: _device_of_index,
    torch._C._nn._parse_to: _parse_to,
    T.__dlpack_device__: _dlpack_device,
    T.device.__get__: _device_of,
    _KIND.is_cuda.__get__: _is_cuda,
    _KIND.is_cpu.__get__: _is_cpu,
    T.get_device: _get_device,
    torch.get_device: _get_device,
    T.is_pinned: _is_pinned,
    T.is_shared: _is_shared,
}
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
}
