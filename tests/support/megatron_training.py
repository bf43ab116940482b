"""Stand-in for ``megatron.training.training``, which the wheel of megatron-core lacks.

It mirrors the public parts only: the names in the module and how they call each other, the arguments
of ``train_step``, how iterations are counted, skipped, resumed, evaluated and saved, and when ``--profile`` turns
its own profilers on. `install` puts it where ``import megatron.training.training`` finds it.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

own_profilers: list[str] = []  # the profilers that Megatron itself started
_ARGS = Namespace()


def install(folder: Path) -> None:
    """Write the package ``megatron.training`` into ``folder``, for ``sys.path``."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    shutil.copy(__file__, package / "training.py")
    (package / "__init__.py").write_text("from .training import get_args, pretrain\n")


def get_args() -> Namespace:
    """Return the arguments of the command line."""
    return _ARGS


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Any,
    iteration: int | None = None,
) -> float:
    """Run one iteration."""
    optimizer.zero_grad()
    loss = forward_backward_func(forward_step_func=forward_step_func, data_iterator=data_iterator, model=model)
    optimizer.step()
    return loss


def save_checkpoint_and_time(iteration: int) -> None:
    """Do nothing."""


def evaluate(forward_step_func: Any, data_iterator: Any, model: Any) -> None:
    """Run one forward pass."""
    with torch.no_grad():
        forward_step_func(data_iterator, model[0])


def train(
    forward_step_func: Any, model: Any, optimizer: Any, config: Any, forward_backward_func: Any, data_iterator: Any
) -> list[float]:
    """Iterate from ``args.iteration`` to ``args.train_iters``; return the losses."""
    args = get_args()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    profiled = args.profile and (not args.profile_ranks or rank in args.profile_ranks)
    if profiled and args.use_pytorch_profiler:
        own_profilers.append("torch")
    losses = []
    iteration = args.iteration
    while iteration < args.train_iters:
        if profiled and iteration == args.profile_step_start and not args.use_pytorch_profiler:
            own_profilers.append("cuda")
        if iteration in args.iterations_to_skip:
            iteration += 1
            continue
        args.curr_iteration = iteration
        told = {} if args.old_release else {"iteration": iteration}
        loss = train_step(
            forward_step_func, data_iterator, model, optimizer, None, config, forward_backward_func, **told
        )
        losses.append(loss)
        iteration += 1
        if args.eval_interval and iteration % args.eval_interval == 0:
            evaluate(forward_step_func, data_iterator, model)
        if args.save_interval and iteration % args.save_interval == 0:
            save_checkpoint_and_time(iteration)
    return losses


def pretrain(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    forward_backward_func: Any,
    data_iterator: Any,
    config: Any = None,
    **args: Any,
) -> list[float]:
    """Train with the arguments ``args`` of the command line."""
    defaults = {
        "iteration": 0, "train_iters": 8, "profile": False, "profile_step_start": 10, "profile_step_end": 12,
        "profile_ranks": [], "use_pytorch_profiler": False, "iterations_to_skip": [], "eval_interval": 0,
        "save_interval": 0, "old_release": False,
    }  # fmt: skip
    vars(_ARGS).clear()
    vars(_ARGS).update(defaults | args)
    return train(forward_step_func, model, optimizer, config, forward_backward_func, data_iterator)
