"""What is known of tensors without data: values that follow from how they were made, and numbers of small ones.

A tensor without data has a storage without data. If its numbers are known, a second storage with data is attached
to that storage, so that views share it. Operators run on both.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from .state import tensors

_FILLS = {"full": 1, "fill_": 1, "zeros": 0.0, "zero_": 0.0, "ones": 1.0, "scalar_tensor": 0, "zeros_like": 0.0}
_NEVER_TRUE = ("isnan", "isinf", "isposinf", "isneginf")
_LOGICAL = ("logical_or", "bitwise_or", "logical_and", "bitwise_and")
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_KEEP_VALUE = (
    "_is_any_true", "any", "all", "_is_all_true", "view", "detach", "clone", "_to_copy", "expand", "alias",
    "squeeze", "unsqueeze", "select", "slice", "reshape", "max", "min", "amax", "amin", "mean",
)  # fmt: skip
# The former finds no infinity
LEAVE_DATA_UNCHANGED = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")


def known_of(name: str, args: Sequence[Any]) -> Any:
    """Return the value that all elements of the result have, if it follows without the data; else None."""
    if name in _FILLS:
        place = _FILLS[name]
        value = args[place] if isinstance(place, int) else place
        return notes_of(value).get("value") if isinstance(value, torch.Tensor) else value
    if name in _NEVER_TRUE:
        return False
    if name in _COMPARISONS and "value" not in notes_of(args[0]):
        return _comparison_result(name, args[0], args[1])
    if not args:
        return None
    if isinstance(args[0], (list, tuple)):  # concatenated tensors with one value
        values = [notes_of(tensor).get("value") for tensor in tensors(list(args[0]))]
        return values[0] if name in ("stack", "cat") and len({*values}) == 1 else None
    value = notes_of(args[0]).get("value") if isinstance(args[0], torch.Tensor) else None
    if name in _LOGICAL and isinstance(args[1], torch.Tensor):
        both = (value, notes_of(args[1]).get("value"))
        decides = name in ("logical_or", "bitwise_or")  # True or anything is True
        return decides if decides in both else None if None in both else not decides
    if value is None:
        return None
    if name in ("logical_not", "bitwise_not"):
        return not value
    if name in ("sum", "count_nonzero"):
        return value * args[0].numel() if len(args) == 1 or not value else None
    return value if name in _KEEP_VALUE else None


def _comparison_result(name: str, tensor: torch.Tensor, other: Any) -> bool | None:
    """Return the result of a comparison of unknown numbers: floating-point ones equal none, integers are 1."""
    if other is tensor:
        return name in ("eq", "le", "ge")
    if tensor.is_floating_point():
        return {"eq": False, "ne": True}.get(name)
    whole = tensor.dtype is not torch.bool and not tensor.is_complex() and isinstance(other, (int, float))
    return bool(_COMPARISONS[name](1, other)) if whole else None


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the notes on the data of ``tensor``: "value" of all its elements, "seed" of random ones."""
    try:
        storage: Any = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return {}
    notes: dict[str, Any] | None = getattr(storage, "_instrument_data", None)
    if notes is None:
        notes = storage._instrument_data = {}
    return notes


def note(tensor: torch.Tensor, value: Any) -> None:
    """Have all elements of ``tensor`` read as ``value``; None if the data is unknown."""
    notes = notes_of(tensor)
    notes.clear()
    if value is not None:
        notes["value"] = value


def kind_of(tensor: torch.Tensor) -> type:
    """Return the Python type of an element."""
    if tensor.dtype is torch.bool:
        return bool
    if tensor.is_floating_point():
        return float
    return complex if tensor.is_complex() else int


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
        shown = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (tuple(args), kwargs))
        real = list(tensors(func(*shown[0], **shown[1])))
    except Exception:  # an operator may fail in any way: its values are then unknown
        return None
    alike = [each.shape for each in real] == [each.shape for each in made]
    return real if alike and all(each.device.type == "cpu" for each in real) else None


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
