"""Collectives without NCCL: on gloo, or on no network at all if the run is one of several ranks.

As rank 0 of several, the process group is torch's fake one, which sends nothing. What a rank sends is recorded as
on a GPU, with the event that ends each collective, so that a forecast knows who waits for it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...base.compat import distributed
from ...base.guard import guard
from ..counting.recorder import FEATURE
from ..counting.streams import COMMUNICATION
from .replacement import Replacement, calling
from .state import RunState, tensors

_WAIT = "wait_tensor"


@contextmanager
def ranks_in_environment(state: RunState) -> Iterator[None]:
    """Set the variables that torchrun sets, for rank 0; end what process groups the program leaves behind."""
    if state.ranks == 1:
        yield
        return
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = ("0", "0", str(state.ranks), str(state.ranks), "localhost", "29500")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, values, strict=True))
    try:
        yield
    finally:
        try:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def collectives(state: RunState) -> Iterator[Replacement]:
    """Run the collectives of NCCL without GPUs."""

    def on_gloo(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Without a backend, a new group has that of the first one, which has nccl for GPUs
        default = "nccl" if original.__name__ == "init_process_group" else None
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments.setdefault("backend", default)
        if "nccl" in str(given.arguments["backend"] or default).lower():
            state.record_not_covered("collectives ran on gloo instead of nccl")
            given.arguments["backend"] = "gloo"
        return original(*given.args, **given.kwargs)

    def on_none(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["backend"] = distributed.FAKE
        if original.__name__ == "init_process_group":
            given.arguments.update(init_method=None, store=distributed.fake_store(), rank=0)
            given.arguments["world_size"] = state.ranks
            given.arguments.pop("device_id", None)
        return original(*given.args, **given.kwargs)

    def wait(original: Any, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        if id(work) in state.works:
            state.note_stream("wait", None, id(work))
        return original(work, *args, **kwargs)

    def rebuild(original: Any, reducer: Any) -> Any:
        """Order the buckets of DistributedDataParallel as their gradients became ready; not a part of a step.

        The ranks agree on the order by integers that C++ code writes and reads.
        """
        with state.uncounted(), _RealIntegers():  # type: ignore[no-untyped-call, unused-ignore]
            return original(reducer)

    if not torch.distributed.is_available():
        return
    distribution: Any = torch.distributed
    meshes = sys.modules.get("torch.distributed.device_mesh")
    for owner in (distribution, torch.distributed.distributed_c10d, meshes):
        yield owner, "init_process_group", calling(on_gloo if state.ranks == 1 else on_none)
        yield owner, "new_group", calling(on_gloo if state.ranks == 1 else on_none)
        yield owner, "is_nccl_available", lambda original: lambda: True
    if state.ranks > 1:
        from torch.nn.parallel import distributed as data_parallel

        yield data_parallel, "_verify_param_shape_across_processes", lambda original: lambda *args, **kwargs: True
        yield distribution.Reducer, "_rebuild_buckets", calling(rebuild)
        yield distribution.Work, "wait", calling(wait)
        yield from _dtensors(state)


def _dtensors(state: RunState) -> Iterator[Replacement]:
    """Leave out what a DTensor does beside its operators: shapes, and random states that it reads in C++ code."""

    def without_counts(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        with state.uncounted():
            return original(*args, **kwargs)

    try:
        from torch.distributed.tensor import _dispatch, _random
        from torch.distributed.tensor._sharding_prop import ShardingPropagator
    except ImportError:  # an older version of torch
        return
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", calling(without_counts)
    for module in (_dispatch, _random):
        yield module, "is_rng_supported_mesh", lambda original: lambda mesh: False


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Gives 32-bit integers data, also where other tensors have none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        kinds = {each.dtype for each in tensors([*args, given])} or {given.get("dtype")}
        if kinds != {torch.int32}:
            return func(*args, **given)
        with _disable_current_modes():
            return func(*args, **given)


def note_collective(state: RunState, func: Any, args: Sequence[Any], out: Any) -> Any:
    """Note a collective that was just recorded, or that a tensor is waited for; return its results.

    Args:
        state: the run.
        func: an operator of torch.distributed.
        args: its arguments.
        out: its results; some operators return only the work that is awaited.
    """
    work = _note(state, func, args, out)
    if work is None:
        return out
    return (*out[:-1], work.boxed()) if isinstance(out, (list, tuple)) else work.boxed()


@guard.contained(FEATURE)
def _note(state: RunState, func: Any, args: Sequence[Any], out: Any) -> Any:
    """Note a collective; return the work to await in place of its own, None if it keeps that."""
    if func._schema.name.endswith(_WAIT):
        state.note_stream("wait", None, _identity(args[0]))
        return None
    for group in filter(None, map(distributed.group_of, args)):
        state.note_group(group)
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    if results and isinstance(results[-1], torch.ScriptObject) and state.ranks > 1:
        # The reducer of DistributedDataParallel asks for what it reduced; others must not be kept in memory.
        in_place = func._schema.name.endswith("_") and "reduce" in func._schema.name
        work = distributed.finished_work(list(tensors(results[:-1])) if in_place else [])
        if work is not None:
            state.works.add(id(work))
            state.last_work = work  # Python is given the same object as long as it lives
            state.note_stream("record", COMMUNICATION, id(work))
            return work
    for tensor in tensors(results):
        state.note_stream("record", COMMUNICATION, _identity(tensor))
    return None


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
