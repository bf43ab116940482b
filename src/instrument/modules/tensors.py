"""The tensors in the inputs and outputs of a module."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator

import torch

MAX_VALUES = 1000  # values to inspect: outputs may be graphs of objects or lists of millions


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, dictionaries and dataclasses, nested or not, in their order."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < MAX_VALUES:
        found = pending.pop()
        if isinstance(found, torch.Tensor):
            yield found
        if id(found) not in seen:
            seen.add(id(found))
            pending += reversed(_children(found))


def _children(value: object) -> list[object]:
    # Calls no method of the value: a method may compute.
    if isinstance(value, dict):
        return list(dict.values(value))[:MAX_VALUES]
    if isinstance(value, UserDict):
        return _children(vars(value).get("data"))
    if isinstance(value, tuple):
        return list(tuple.__getitem__(value, slice(MAX_VALUES)))
    if isinstance(value, list):
        return list.__getitem__(value, slice(MAX_VALUES))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_field_value(value, field.name) for field in dataclasses.fields(value)]
    return []


def _field_value(value: object, name: str) -> object:
    try:
        return object.__getattribute__(value, name)  # bypasses `__getattr__`, and finds attributes in slots
    except AttributeError:
        return None
