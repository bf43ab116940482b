"""Finds the models whose parameters an optimizer updates."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

MOST = 16  # models; a population of thousands would be no summary


def trained(optimizers: Sequence[Any]) -> list[nn.Module]:
    """Return the modules that hold the parameters of ``optimizers``, the outermost around them, `MOST` for each.

    Searches all objects of the process: 50 ms for a million.
    """
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    modules = [module for module in modules if "_modules" in vars(module)]  # else it is being made
    around: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            around.setdefault(id(child), []).append(module)
    return [root for optimizer in optimizers for root in _roots(optimizer, modules, around)]


def trains(optimizer: Any, models: Iterable[nn.Module]) -> bool:
    """Tell whether ``models`` hold all parameters of ``optimizer``."""
    held = {id(parameter) for model in models for parameter in model.parameters()}
    return _parameters(optimizer) <= held


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _roots(optimizer: Any, modules: list[nn.Module], around: dict[int, list[nn.Module]]) -> list[nn.Module]:
    parameters = _parameters(optimizer)
    climbing = [m for m in modules if any(id(own) in parameters for own in m._parameters.values())]
    seen: set[int] = set()
    roots: list[nn.Module] = []
    while climbing:
        module = climbing.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        outer = around.get(id(module), [])
        climbing += outer
        if not outer:
            roots.append(module)
    return roots[:MOST]
