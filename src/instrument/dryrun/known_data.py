"""Keeps the data of small tensors that are made of known numbers, in a dry run without data.

A tensor without data has a storage without data. If its numbers are known, a second storage with data is attached
to that storage, so that views share it. Operators run on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .tags import tensors

MAX_ELEMENTS = 2**14  # elements of a result; a mask of 128 x 128
_KEY = "_instrument_shadow"


def is_meta(tensor: Any) -> bool:
    """Return whether the program put ``tensor``, which has no data in any case, on the meta device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta"


def known_data_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the data of ``tensor``; None if the data is unknown."""
    if not isinstance(tensor, FakeTensor):
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        return tensor.detach() if plain else None
    try:
        held = getattr(tensor.untyped_storage(), _KEY, None)
        if held is None:
            return None
        size, stride = tuple(map(int, tensor.size())), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(held, tensor.storage_offset(), size, stride)
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage; sizes may depend on data
        return None


def run_on_known_data(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Run the operator ``func`` on the data, after it ran without data; call this with all modes off.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its arguments by keyword.
        out: its result.
    """
    given, made = list(tensors([*args, kwargs])), list(tensors(out))
    real = _results_with_data(func, args, kwargs, given, made)
    if real is None:
        for tensor in _written_tensors(func, args):
            drop_data(tensor)
        return
    known = {id(tensor.untyped_storage()) for tensor in given if isinstance(tensor, FakeTensor)}
    for fake, data in zip(made, real, strict=True):
        if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided:  # only this layout has a storage
            continue
        if id(fake.untyped_storage()) not in known:
            _attach_data(fake, data)


def drop_data(tensor: torch.Tensor) -> None:
    """Drop the data of ``tensor``, and of all tensors that share its storage."""
    if isinstance(tensor, FakeTensor):
        try:
            tensor.untyped_storage().__dict__.pop(_KEY, None)
        except (NotImplementedError, RuntimeError):
            return


def _results_with_data(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Any], made: list[Any]
) -> list[torch.Tensor] | None:
    """Return the results with data; None if a number is unknown, or a result has too many elements."""
    if not made or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        return None
    mutable = func._schema.is_mutable
    if mutable and not all(isinstance(tensor, FakeTensor) for tensor in given):
        return None
    try:
        if sum(int(tensor.numel()) for tensor in (*made, *given)) > MAX_ELEMENTS * (len(given) + 1):
            return None
        shadows = {id(tensor): known_data_of(tensor) for tensor in given}
        if any(shadow is None or shadow.numel() > MAX_ELEMENTS for shadow in shadows.values()):
            return None
        real = list(tensors(func(*_replace_tensors(args, shadows), **_replace_tensors(kwargs, shadows))))
    except Exception:  # an operator may fail in any way: its values are then unknown
        return None
    alike = [each.shape for each in real] == [each.shape for each in made]
    return real if alike and all(each.device.type == "cpu" for each in real) else None


def _replace_tensors(value: Any, shadows: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return shadows[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)([_replace_tensors(each, shadows) for each in value])
    return (
        {key: _replace_tensors(each, shadows) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _written_tensors(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    arguments = zip(func._schema.arguments, args, strict=False)
    return [
        tensor
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors(value)
    ]


def _attach_data(fake: FakeTensor, data: torch.Tensor) -> None:
    if fake.storage_offset() or data.layout is not torch.strided or is_meta(fake):
        return
    laid_out = torch.empty_strided(tuple(fake.size()), fake.stride(), dtype=fake.dtype).copy_(data)
    setattr(fake.untyped_storage(), _KEY, laid_out.untyped_storage())
