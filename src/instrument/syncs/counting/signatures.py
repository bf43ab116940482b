"""Tells the calls of operators apart by what determines their results: shapes, strides, types and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

import torch

from ...base.compat import distributed
from .calls import GROUP

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((
    int, float, bool, complex, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip
_LONG = 8  # elements of a list
_UNSURE = object()


class Signature:
    """What calls of an operator have in common; equal ones of one run are one object.

    Attributes:
        exact: whether it determines the results, if the operator reads no data.
        scalars: which of the tensors have no dimension: a number from the CPU may be among those on the GPU.
        results: how to make the results without data; None before the first call, False if they cannot be made.
    """

    __slots__ = ("exact", "results", "scalars")

    def __init__(self, parts: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        self.exact = not any(
            part is _UNSURE or (isinstance(part, torch.dtype) and part.is_complex) for part in parts
        )  # complex tensors have a conjugate bit
        self.scalars = tuple(place for place, tensor in enumerate(given) if not tensor.dim())
        self.results: Any = None


Found = tuple[Signature, list[torch.Tensor]]
"""The signature of a call, and the tensors among its arguments."""


class Signatures:
    """The signatures of one run."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Signature] = {}

    def find(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *further: Any) -> Found:
        """Return the signature of a call, and the tensors among its arguments.

        Args:
            func: the operator.
            args: its arguments.
            kwargs: its arguments by keyword.
            further: what else tells the call apart.
        """
        parts: list[Any] = [func, *further]
        given: list[torch.Tensor] = []
        _add(args, parts, given)
        if kwargs:
            parts += kwargs
            _add(kwargs.values(), parts, given)
        if len(given) > 1:
            ids = list(map(id, given))
            if len(set(ids)) < len(ids):
                first: dict[int, int] = {}
                parts.append(tuple([first.setdefault(each, len(first)) for each in ids]))
        key = tuple(parts)
        signature = self._known.get(key)
        if signature is None:
            signature = self._known[key] = Signature(parts, given)
        return signature, given


def _add(values: Iterable[Any], parts: list[Any], given: list[torch.Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind in _TENSORS or isinstance(value, torch.Tensor):
            try:
                parts += (value.shape, value.dtype, value.stride())
            except RuntimeError:  # sparse tensors have none
                parts += (value.shape, value.dtype, _UNSURE, value.layout)
            given.append(value)
        elif kind in _VALUES:
            parts += (kind, value)
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if len(value) > _LONG and {*map(type, value)} <= _VALUES:
                parts += map(type, value)
                parts += value
            else:
                _add(value, parts, given)
        else:
            parts += (_UNSURE, plain_value(value))


def plain_value(value: Any) -> Any:
    """Return a value that is not a tensor as a `Call` has it."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return str(value)
    if isinstance(value, torch.Generator):
        return "Generator"
    group = distributed.group_of(value)
    return f"{GROUP}{group.name}" if group is not None else str(value)
