"""Values of tensors without data that follow from how the tensors were created."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from .tags import tensors

_FILLS = {"full": 1, "fill_": 1, "zeros": 0.0, "zero_": 0.0, "ones": 1.0, "scalar_tensor": 0, "zeros_like": 0.0}
_NEVER_TRUE = ("isnan", "isinf", "isposinf", "isneginf")
_LOGICAL = ("logical_or", "bitwise_or", "logical_and", "bitwise_and")
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_KEEP_VALUE = (
    "_is_any_true",
    "any",
    "all",
    "_is_all_true",
    "view",
    "detach",
    "clone",
    "_to_copy",
    "expand",
    "alias",
    "squeeze",
    "unsqueeze",
    "select",
    "slice",
    "reshape",
    "max",
    "min",
    "amax",
    "amin",
    "mean",
)
LEAVE_DATA_UNCHANGED = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_amp_update_scale_",
)  # the former finds no infinity


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
