"""The parts of a training step: data loaders, optimizers, gradient clipping, collectives and the job's store."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from ..interrupts import Suppressed


def collectives() -> tuple[Any, dict[str, str]]:
    """Return the class of process groups, and for each of its methods the name of the public collective.

    All collectives that torch.distributed starts from Python call these methods. Empty without torch.distributed.
    """
    import torch

    group = getattr(torch.distributed, "ProcessGroup", None)
    return group, {method: name for method, name in _COLLECTIVES.items() if method in vars(group or object)}


_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}


def job_store(prefix: str) -> Any:
    """Return a new connection to the store of this job, for keys that begin with ``prefix``.

    Without it, or in a job of one rank: None.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    with Suppressed(AttributeError, RuntimeError, NotImplementedError):  # torch before 2.7 cannot clone a store
        from torch.distributed import distributed_c10d

        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(prefix, store.clone())
    return None


def clipping() -> Callable[[FrameType], str | None] | None:
    """Return a function that names the gradient clipping function of torch that runs in a frame, if any.

    These functions share the code of the decorator that runs them under `torch.no_grad`. None if they do not.
    """
    from torch.nn.utils import clip_grad_norm_

    code = clip_grad_norm_.__code__
    if "func" not in code.co_freevars:
        return None

    def name(frame: FrameType) -> str | None:
        if frame.f_code is not code:
            return None
        name: str = frame.f_locals["func"].__name__
        return name if name in ("clip_grad_norm_", "clip_grad_value_") else None

    return name


def index_sampler(loader: Any) -> Any:
    """Return the sampler of batch indices that a DataLoader shares with its iterators."""
    return getattr(loader, "_index_sampler", None)


def batches_drawn(iterator: Any) -> int | None:
    """Return how many batches an iterator of a DataLoader has yielded in the epoch; None if it does not say."""
    return getattr(iterator, "_num_yielded", None)


_PATCHES = 6  # patches of one method, each of which adds a frame between torch's and the caller's


def caller_in(frame: FrameType, module: str) -> Any:
    """Return the object with a method in torch's ``module`` that runs in ``frame``, or just below it."""
    below: FrameType | None = frame
    for _ in range(_PATCHES):
        if below is None:
            return None
        if below.f_globals.get("__name__") == module:
            return below.f_locals.get("self")
        below = below.f_back
    return None
