"""The place of this process in its distributed job: its rank, and how many ranks there are."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank() -> int:
    """Return the rank of this process in its distributed job; 0 outside one."""
    group = _process_group()
    return int(group.get_rank()) if group is not None else number_in("RANK") or 0


def world_size() -> int:
    """Return the number of ranks of the job; 1 outside one."""
    group = _process_group()
    if group is not None:
        return int(group.get_world_size())
    size = number_in("WORLD_SIZE")
    return 1 if size is None else size


def job_without_group() -> dict[str, Any] | None:
    """Return rank and world size from the environment; None with a process group, as torch writes them."""
    rank, size = number_in("RANK"), number_in("WORLD_SIZE")
    if rank is None or _process_group() is not None:
        return None
    return {"backend": "none", "rank": rank} | ({} if size is None else {"world_size": size})


def job_without_nccl() -> dict[str, Any] | None:
    """Return the rank for a trace of Kineto's daemon; None outside a job, and with NCCL, whose calls give it."""
    group = _process_group()
    if group is None:
        return {"backend": "none", "rank": rank(), "world_size": world_size()} if "RANK" in os.environ else None
    backend = str(group.get_backend())
    if "nccl" in backend:
        return None
    return {"backend": backend, "rank": rank(), "world_size": world_size()}


def process_suffix() -> str:
    """Return a suffix that keeps files of sibling processes apart; empty in a process group."""
    if _process_group() is not None:
        return ""
    multiprocessing = sys.modules.get("multiprocessing.process")
    child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return f"-pid{os.getpid()}" if child else ""


def number_in(variable: str) -> int | None:
    """Return the number in an environment variable; None if it holds none."""
    given = os.environ.get(variable, "")
    return int(given) if given.isdecimal() and len(given) < 10 else None


def _process_group() -> Any:
    """Return `torch.distributed` if this process is in a process group, else None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    grouped = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if grouped else None
