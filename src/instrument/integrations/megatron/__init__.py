"""Megatron-LM and megatron-core: one line before ``pretrain(...)`` or before the loop.

>>> from instrument.integrations.megatron import attach
>>> attach("runs/gpt", wait=10, active=2)
>>> pretrain(...)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from ...base.guard import guard
from ...base.units import integer
from ..adapter import require, when_requested
from ..loop import Loop
from . import adapter, core
from .adapter import FEATURE, Hooks, MegatronAdapter

__all__ = ["MegatronAdapter", "attach", "install"]

HOOKS: Mapping[str, Hooks] = {
    "megatron.core.utils": core.nvtx_ranges,
    "megatron.core.pipeline_parallel.schedules": core.schedules,
    "megatron.core.optimizer": core.optimizers,
    "megatron.core.distributed": core.distributed,
    "megatron.training.training": adapter.training,
}


@guard.prepared(FEATURE, otherwise=MegatronAdapter.inert)
def attach(
    out: str | os.PathLike[str] = "runs/instrument", *, first_step: int = 0, **options: Any
) -> MegatronAdapter:
    """Record windows of Megatron's steps, name the parts of a step, and find synchronizations.

    Under ``megatron.training`` a step is one iteration, numbered as in ``train_step(iteration=...)``, also in a
    resumed run. Without a schedule among ``options``, ``--profile``, ``--profile-step-start``,
    ``--profile-step-end`` and ``--profile-ranks`` are the schedule. In a loop of your own on megatron-core a step
    ends with the optimizer's step. Megatron may be imported before or after this call.

    Args:
        out: the folder for the recorded windows.
        first_step: the number of the first step, in a resumed loop of your own.
        options: the arguments of `instrument.integrations.loop.Loop`: the schedule (``wait``, ``warmup``,
            ``active``, ...), ``modules``, ``names``, ``syncs``, ``budget``, ``ranks``, ...

    Returns:
        The adapter, which ``detach()`` removes; it is also a context manager, and has ``step()`` for loops
        without an optimizer. Attaching again detaches the previous adapter.

    Raises:
        ImportError: megatron-core is not installed.
        TypeError, ValueError: wrong arguments.
    """
    first_step = integer("first_step", first_step)
    require("megatron.core", "megatron-core")
    return MegatronAdapter(Loop(out, **options), HOOKS, first_step).attach()


install = when_requested(functools.partial(MegatronAdapter, hooks=HOOKS))
