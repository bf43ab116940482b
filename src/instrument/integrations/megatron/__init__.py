"""Megatron-LM and megatron-core: one line before ``pretrain(...)`` or before the loop.

>>> from instrument.integrations.megatron import attach
>>> attach("runs/gpt", wait=10, active=2)
>>> pretrain(...)
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

from ..environment import loop_from_environment
from ..loop import Loop
from .adapter import MegatronAdapter

__all__ = ["MegatronAdapter", "attach", "install"]


def attach(
    out: str | os.PathLike[str] = "runs/instrument", *, first_step: int = 0, **arguments: Any
) -> MegatronAdapter:
    """Have Megatron tell its steps, and make its parts regions, whether it is imported already or not.

    Under ``megatron.training`` a step is one iteration, numbered as in ``train_step(iteration=...)``, also when a
    run is resumed; without a plan here, ``--profile``, ``--profile-step-start``, ``--profile-step-end`` and
    ``--profile-ranks`` are the plan. In a loop of your own on megatron-core a step ends with the optimizer's.

    Args:
        out: the folder that windows land in.
        first_step: the number of the first step where a loop of your own is resumed.
        arguments: those of `instrument.integrations.loop.Loop`: the plan (``wait``, ``warmup``, ``active``, ...),
            ``modules``, ``names``, ``syncs``, ``budget``, ``ranks``, ...

    Returns:
        A handle with ``step()`` and ``remove()``, which is a context manager as well. One is attached at a time:
        a second call removes the first.

    Raises:
        ImportError: megatron-core is not installed.
        TypeError, ValueError: arguments that `Loop` does not take.
    """
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ValueError(f'"first_step" must be an integer >= 0: {first_step!r}')
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ImportError("megatron-core is missing: pip install megatron-core")
    return MegatronAdapter(Loop(out, **arguments), first_step).apply()


@functools.cache
def install() -> None:
    """Have Megatron drive the loop that the environment asks for, if any."""
    loop = loop_from_environment()
    if loop is not None:
        MegatronAdapter(loop, 0).apply()
