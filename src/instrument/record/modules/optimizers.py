"""The optimizers of the process, the parameters that they and models hold, and the models that they update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...base.live_objects import live_objects


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


MAX_MODELS = 16  # a summary of thousands of models would not be readable


def outermost_modules(optimizers: Iterable[Any], models: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return the outermost modules around the parameters of each optimizer and around each of ``models``.

    At most `MAX_MODELS` for each. Searches all objects of the process once.
    """
    modules = [each for each in live_objects(nn.Module) if "_modules" in vars(each)]  # else its __init__ runs
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    starts = [[model] for model in models]
    for optimizer in optimizers:
        updated = parameter_ids(optimizer)
        starts.append([m for m in modules if any(id(own) in updated for own in m._parameters.values())])
    roots = {id(root): root for start in starts for root in _roots(start, parents)[:MAX_MODELS]}
    return list(roots.values())


def updates_only(optimizer: Any, models: Iterable[nn.Module]) -> bool:
    """Return whether ``models`` contain all parameters of ``optimizer``."""
    return parameter_ids(optimizer) <= set[int]().union(*map(parameter_ids, models))


def _roots(pending: list[nn.Module], parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    """Return the modules that contain those in ``pending`` and are in no other module."""
    seen: set[int] = set()
    roots: list[nn.Module] = []
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        outer = parents.get(id(module), [])
        pending += outer
        if not outer:
            roots.append(module)
    return roots
