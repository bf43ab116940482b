"""Which copies between memory and GPU wait."""

from __future__ import annotations

from typing import Any

import torch

from .state import State, size_of
from .tags import PINNED


def copied(state: State, target: Any, source: Any, non_blocking: bool) -> None:
    """Note the wait of a copy of ``source`` into ``target``, if it has one."""
    to, fro = state.tags.get(target), state.tags.get(source)
    up, down = to not in (None, PINNED), fro not in (None, PINNED)
    if up == down or not source.numel():
        return
    if not state.here.call and torch._C._current_graph_task_id() != -1:
        state.tags.put([target, source], to if up else fro)  # a bucket of DistributedDataParallel's, of C++
        return
    host = fro if up else to
    if up and state.here.call == "__setitem__" and not source.dim():  # `x[0] = 1`; more elements are filled
        state.wait("setitem", "copies the number for one element to the GPU", "H2D", size_of(source))
        return
    moved(state, "copy_", up, host is PINNED and dense(target, source), non_blocking, size_of(source))


def dense(*copied: Any) -> bool:
    """Tell whether a copy takes no detour: what has gaps is put together in memory that is not pinned."""
    for tensor in copied:
        extent = 1
        for stride, size in sorted(
            (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            if size != 1:
                if stride != extent:
                    return False
                extent *= size
    return True


def moved(state: State, op: str, up: bool, pinned: bool, non_blocking: bool, size: int) -> None:
    """Note the wait of a copy between memory and GPU, if it has one."""
    if non_blocking and pinned:
        return
    if not up:
        # Into memory that is not pinned, also a copy that need not wait is staged, and waits
        state.wait(op, "copies from the GPU", "D2H", size)
    elif non_blocking:
        state.wait(op, "non_blocking copies to the GPU from memory that is not pinned", "H2D", size)
    else:
        where = "pinned memory, blocking" if pinned else "memory that is not pinned"
        state.wait(op, f"copies to the GPU from {where}", "H2D", size)
