"""The tensors in the inputs and outputs of a module."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator

import torch

MOST = 1000  # values to inspect: outputs may be graphs of objects or lists of millions


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, dictionaries and dataclasses, nested or not, in their order."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < MOST:
        found = pending.pop()
        if isinstance(found, torch.Tensor):
            yield found
        if id(found) not in seen:
            seen.add(id(found))
            pending += reversed(_inside(found))


def _inside(value: object) -> list[object]:
    # Calls no method of the value: a method may compute.
    if isinstance(value, dict):
        return list(dict.values(value))[:MOST]
    if isinstance(value, UserDict):
        return _inside(vars(value).get("data"))
    if isinstance(value, tuple):
        return list(tuple.__getitem__(value, slice(MOST)))
    if isinstance(value, list):
        return list.__getitem__(value, slice(MOST))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_held(value, field.name) for field in dataclasses.fields(value)]
    return []


def _held(value: object, name: str) -> object:
    try:
        return object.__getattribute__(value, name)  # bypasses `__getattr__`, and finds attributes in slots
    except AttributeError:
        return None
