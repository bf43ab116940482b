"""The rank of this process in its job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any


def rank() -> int:
    """Return the rank of this process in its distributed job; 0 outside one."""
    group = _process_group()
    if group is not None:
        return int(group.get_rank())
    given = os.environ.get("RANK", "")
    return int(given) if given.isdecimal() and len(given) < 10 else 0


def chosen_ranks(ranks: Iterable[int] | None) -> frozenset[int] | None:
    """Return the argument ``ranks`` of a user as a set.

    Raises:
        TypeError, ValueError: it does not hold integers >= 0.
    """
    if ranks is None:
        return None
    if not isinstance(ranks, Iterable):
        raise TypeError(f'"ranks" must be several integers, such as [0]: {ranks!r}')
    chosen = frozenset(ranks)
    if not (chosen and all(isinstance(rank, int) and rank >= 0 for rank in chosen)):
        raise ValueError(f'"ranks" must hold integers >= 0: {ranks!r}')
    return chosen


def process_suffix() -> str:
    """Return a suffix that keeps files of sibling processes apart; empty in a process group."""
    if _process_group() is not None:
        return ""
    multiprocessing = sys.modules.get("multiprocessing.process")
    child = multiprocessing is not None and multiprocessing.parent_process() is not None
    return f"-pid{os.getpid()}" if child else ""


def _process_group() -> Any:
    """Return `torch.distributed` if this process is in a process group, else None."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    grouped = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if grouped else None
