"""The tensors in what a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

DEPTH = 8  # how far to look into what is nested


def tensors(value: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses, nested or not, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float)):
        return
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, (tuple, list)):
        items = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    for item in items:
        yield from tensors(item, depth - 1)
