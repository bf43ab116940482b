"""The optimizers of the process, and the parameters that they and models hold."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..live_objects import live_objects


def live_optimizers() -> list[Any]:
    """Return the optimizers of the process that are constructed; see `live_objects` for the time."""
    return [optimizer for optimizer in live_objects(Optimizer) if hasattr(optimizer, "param_groups")]


def parameters(of: Any) -> list[Any]:
    """Return the parameters that an optimizer updates, or those of a model."""
    if isinstance(of, nn.Module):
        return list(of.parameters())
    return [parameter for group in of.param_groups for parameter in group["params"]]


def parameter_ids(of: Any) -> set[int]:
    """Return the ``id()`` of each of `parameters`."""
    return {id(parameter) for parameter in parameters(of)}


def share_parameters(first: Any, second: Any) -> bool:
    """Return whether two optimizers or models have a parameter in common."""
    return not parameter_ids(first).isdisjoint(parameter_ids(second))
