"""The arguments of `Tensor.to` and `Tensor.cuda`, read as torch reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import compat


class Transfer(NamedTuple):
    """What a call asks for; the fields are the parameters of `Tensor.to`.

    Attributes:
        device: None where the tensor stays on its device.
        dtype: None where the tensor keeps its type.
        non_blocking: return before the copy is done, where that is possible.
        copy: copy also where nothing changes.
        memory_format: None keeps the format.
    """

    device: Any
    dtype: Any = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: Any = None


def parse_to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Transfer:
    """Return what ``tensor.to(*args, **kwargs)`` asks for.

    Raises:
        TypeError, RuntimeError: torch does not accept these arguments.
    """
    import torch

    positional, named = list(args), dict(kwargs)
    copy = named.pop("copy", False)
    # The parser is that of `Module.to`, which refuses `copy`: the last parameter of each of the three signatures
    most = 2 if positional and isinstance(positional[0], (torch.dtype, torch.Tensor, type)) else 3
    if len(positional) > most:
        copy = positional.pop(most)
    device, dtype, non_blocking, memory_format = compat.parse_to(*positional, **named)
    return Transfer(device, dtype, non_blocking, copy, memory_format)


def parse_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Transfer:
    """Return what ``tensor.cuda(*args, **kwargs)`` asks for; ``device`` is None for the current GPU."""
    given = dict(zip(("device", "non_blocking"), args, strict=False)) | dict(kwargs)
    return Transfer(
        given.get("device"), None, given.get("non_blocking", False), memory_format=given.get("memory_format")
    )
