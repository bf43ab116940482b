"""Makes the results of operators on tensors without data, from what the first call of the same kind returned.

`FakeTensorMode` has such a cache, but its key takes most of the time of a dry run without data. Here the key is
the signature of the call, which the record of calls needs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..counting.signatures import Found

_META, _CPU = torch.device("meta"), torch.device("cpu")
_storage = torch.Tensor.untyped_storage
# Results depend on data, or arguments change in more than data
_UNSURE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_UNSURE_NAMES = ("aten::lift", "aten::as_strided")  # constants; the size of the storage decides on an error


def is_sure(func: Any) -> bool:
    """Return whether shapes, strides, types and numbers determine the results of an operator."""
    return (
        func.namespace == "aten"
        and not any(tag in func.tags for tag in _UNSURE_TAGS)
        and not func._schema.name.startswith(_UNSURE_NAMES)
    )


def shares_memory(func: Any) -> bool:
    """Return whether the results of an operator are in the memory of its argument."""
    return bool(func.is_view) or func is torch.ops.aten._unsafe_view.default


def is_plain(tensor: Any, mode: FakeTensorMode) -> bool:
    """Return whether ``tensor`` has no properties that matter here but shape, strides, storage and type."""
    return (
        type(tensor) is FakeTensor
        and tensor.layout is torch.strided  # others have no storage
        and tensor.constant is None
        and tensor.fake_device == _CPU
        and tensor.fake_mode is mode
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


class _Made(NamedTuple):
    """How to make one result without data.

    Attributes:
        shape: its sizes.
        stride: its strides.
        dtype: the type of its elements.
        device: its device.
        base: which argument it is a view of; None if it has its own memory.
        offset: its first element in the memory of that argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    base: int | None
    offset: int


Recipe = tuple[Callable[[list[Any]], Any] | None, list[_Made | int | None]]
"""The type of the results, None if there is one; and for each, a `_Made`, the number of an argument, or None."""


def results_of(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Found) -> Any:
    """Run an operator, or make its results as the first call with this signature returned them.

    Args:
        mode: the mode of all tensors.
        func: the operator, for which `is_sure`.
        args: its arguments.
        kwargs: its arguments by keyword.
        found: the exact signature of the call, and the tensors among its arguments, all of them `is_plain`.
    """
    signature, given = found
    recipe = signature.results
    if recipe is None:
        before = _about(given)
        out = func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            signature.results = before == _about(given) and _recipe(func, given, out)
        return out
    if recipe is False:
        return func(*args, **kwargs)
    kind, results = recipe
    with torch._C._DisableTorchDispatch():
        if kind is None:
            return _make(mode, results[0], given)
        return kind([_make(mode, result, given) for result in results])


def _make(mode: FakeTensorMode, result: _Made | int | None, given: list[Any]) -> Any:
    if result is None:
        return None
    if isinstance(result, int):
        return given[result]
    shape, stride, dtype, device, base, offset = result
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    if base is not None:
        tensor.set_(_storage(given[base]), offset, shape, stride)
    return FakeTensor(mode, tensor, device)


def _about(tensors: list[Any]) -> list[Any]:
    return [
        (each.shape, each.stride(), each.dtype, each.storage_offset(), _storage(each)._cdata) for each in tensors
    ]


def _recipe(func: Any, given: list[Any], out: Any) -> Recipe | bool:
    """Return how to make the results ``out``; False if that is not known."""
    listed = type(out) in (list, tuple)
    recipe: list[_Made | int | None] = []
    own: set[int] = set()  # memory of results
    for result in out if listed else [out]:
        place = next((place for place, tensor in enumerate(given) if tensor is result), None)
        if result is not None and place is None:
            made = _made(func, given, result)
            if made is None or _storage(result)._cdata in own:
                return False
            if made.base is None:
                own.add(_storage(result)._cdata)
            recipe.append(made)
        else:
            recipe.append(place)
    return type(out) if listed else None, recipe


def _made(func: Any, given: list[Any], result: Any) -> _Made | None:
    """Return how to make a result that is a new tensor, not an argument; None if that is not known."""
    if not isinstance(result, FakeTensor) or result.layout is not torch.strided or result.is_quantized:
        return None
    if result.requires_grad or result.constant is not None or result.is_inference() or result.is_neg():
        return None
    storage = _storage(result)
    base = next((place for place, tensor in enumerate(given) if _storage(tensor)._cdata == storage._cdata), None)
    shape, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
    if shares_memory(func):
        if base is None or len(given) > 1:
            return None
    else:
        alike = torch.empty_strided(shape, stride, dtype=result.dtype, device=_META)
        if base is not None or offset or _storage(alike).nbytes() != storage.nbytes():
            return None
    return _Made(shape, stride, result.dtype, result.fake_device, base, offset)
