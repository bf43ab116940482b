"""Tensors that exist before a dry run and count as GPU tensors in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..modules.optimizers import live_optimizers, parameter_ids, parameters
from .tags import tensors


def tensors_of(on_gpu: Iterable[Any]) -> list[Any]:
    """Return the tensors of ``on_gpu``, with their gradients.

    The tensors of a module are its parameters and buffers, and the state that optimizers keep of these parameters,
    as an optimizer creates it on the parameter's device. Those of an optimizer are its parameters and all its
    state.

    Raises:
        TypeError: something in ``on_gpu`` is not a module, an optimizer or a tensor, and holds no tensors.
    """
    single = isinstance(on_gpu, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
    found: list[Any] = []
    for value in [on_gpu] if single else on_gpu:
        if isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers(), *_state(value)]
        elif isinstance(value, torch.optim.Optimizer):
            found += tensors(parameters(value))
            found += _arrays(value.state.values())
        else:
            held = list(tensors(value))
            if not held:
                raise TypeError(f'"on_gpu" must hold modules, optimizers and tensors: {value!r}')
            found += held
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


def _state(model: torch.nn.Module) -> list[Any]:
    """Return the state of the parameters of ``model`` in the optimizers of this process; takes 0.1 s."""
    keys = parameter_ids(model)
    states = [getattr(optimizer, "state", None) for optimizer in live_optimizers()]
    return _arrays(
        held for state in states if isinstance(state, Mapping) for key, held in state.items() if id(key) in keys
    )


def _arrays(states: Iterable[Any]) -> list[Any]:
    """Return the tensors of states except single numbers, such as a count of steps, which stay on the CPU."""
    return [t for state in states for t in tensors(state) if t.dim()]
