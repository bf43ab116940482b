"""Reads what a merged trace says of its ranks: their processes, their GPUs and their own metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..trace_marks import MERGE
from .lanes import map_unique, map_unique_pairs
from .table import Array

"""The key of the note in the metadata of a merged trace."""

_ON_GPU = ("gpu", "gpu_regions", "syncs")


def merge_note(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the note in the metadata of a trace; empty if the trace is not a merged one."""
    return _mapping(metadata.get(MERGE))


def about_ranks(metadata: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return what the note says of each rank, in ascending order; empty if the trace is not a merged one."""
    ranks = _mapping(merge_note(metadata).get("ranks"))
    known = {int(rank): _mapping(about) for rank, about in ranks.items() if rank.isdecimal() and len(rank) < 8}
    return dict(sorted(known.items()))


def metadata_of(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of the file of a rank, from what the note says of the rank."""
    return _mapping(about.get("metadata"))


def number_gpus(
    columns: Mapping[str, dict[str, Array]], processes: Sequence[Any], ranks: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[int, int], int]:
    """Number the GPUs in order of the ranks, in place: GPUs of several ranks have the same number in their files.

    Args:
        columns: the columns of each table.
        processes: the process of each thread.
        ranks: what the note says of each rank.

    Returns:
        The new number of each pair of a rank and the number in its file.
    """
    own = {
        int(process): (rank, before)
        for rank, about in ranks.items()
        for process, before in _mapping(about.get("processes")).items()
        if process.isdecimal() and len(process) < 10
    }
    numbers = {process: before for process, (_, before) in own.items() if type(before) is int}
    rank_of = np.array([own[each][0] if type(each) is int and each in own else -1 for each in processes], np.int64)
    tables = [columns[name] for name in _ON_GPU if name in columns]
    places = set[tuple[int, int]]()
    for part in tables:
        # Some categories have the process instead of the number of the GPU.
        part["device"] = map_unique(part["device"], lambda device: numbers.get(device, device))
        places.update(zip(rank_of[part["thread"]].tolist(), part["device"].tolist(), strict=True))
    found = {place: number for number, place in enumerate(sorted(place for place in places if place[1] >= 0))}
    for part in tables:
        part["device"] = map_unique_pairs(
            rank_of[part["thread"]], part["device"], lambda rank, device: found.get((rank, device), -1)
        )
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
