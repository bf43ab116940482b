"""Reads the arguments of `Tensor.to`, `Tensor.cuda` and `Tensor.copy_` as torch reads them, and how it copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.compat import operators

# CUDA returns at once from a copy of that much pageable memory to the GPU (CUDA C++ Programming Guide, "Concurrent
# Execution between Host and Device"): it takes the bytes into the command.
COPIED_AT_ONCE_BYTES = 64 * 1024


class Transfer(NamedTuple):
    """The arguments of a call, as the parameters of `Tensor.to`.

    Attributes:
        device: the device of the result; None if the tensor stays on its device.
        dtype: the type of the result; None if the tensor keeps its type.
        non_blocking: whether to return before the copy is done, if possible.
        copy: whether to copy even if nothing changes.
        memory_format: None keeps the format.
    """

    device: Any
    dtype: Any = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: Any = None


def parse_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Transfer:
    """Return the transfer that ``tensor.to(*args, **kwargs)`` makes.

    Raises:
        TypeError, RuntimeError: torch does not accept these arguments.
    """
    import torch

    positional, named = list(args), dict(kwargs)
    copy = named.pop("copy", False)
    # torch's parser belongs to `Module.to`, which refuses `copy`: the last parameter of each of three signatures
    most = 2 if positional and isinstance(positional[0], (torch.dtype, torch.Tensor, type)) else 3
    if len(positional) > most:
        copy = positional.pop(most)
    device, dtype, non_blocking, memory_format = operators.parse_to(*positional, **named)
    return Transfer(device, dtype, non_blocking, copy, memory_format)


def parse_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Transfer:
    """Return the transfer that ``tensor.cuda(*args, **kwargs)`` makes; ``device`` is None for the current GPU."""
    given = dict(zip(("device", "non_blocking"), args, strict=False)) | dict(kwargs)
    return Transfer(
        given.get("device"), None, given.get("non_blocking", False), memory_format=given.get("memory_format")
    )


def parse_copy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the source of ``tensor.copy_(*args, **kwargs)``, None if there is none, and ``non_blocking``."""
    given = dict(zip(("src", "non_blocking"), args, strict=False)) | dict(kwargs)
    return given.get("src"), given.get("non_blocking", False)


def is_gathered(host: Any, dtype: Any = None, other: Any = None, memory_format: Any = None) -> bool:
    """Return whether a copy between CPU and GPU passes through memory that is not pinned, even if ``host`` is.

    torch copies a tensor as it is laid out where both sides agree, and else only if that on the CPU is contiguous.

    Args:
        host: the tensor on the CPU.
        dtype: the type of the other one; None for the same.
        other: the tensor on the GPU; None if it is created, with the layout of ``host`` if that has no gaps.
        memory_format: the layout that it is created with instead.
    """
    import torch

    if host.layout is not torch.strided:  # a sparse tensor: its parts are copied
        return False
    if other is not None and other.numel() > host.numel():  # it is expanded
        return True
    if host.is_contiguous():
        return False
    if memory_format not in (None, torch.preserve_format):
        return dtype not in (None, host.dtype) or not host.is_contiguous(memory_format=memory_format)
    if dtype not in (None, host.dtype) or (other is not None and _layout(other) != _layout(host)):
        return True
    extent = 1
    for stride, size in sorted(_layout(host)):
        if stride != extent:
            return True
        extent *= size
    return False


def _layout(tensor: Any) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
