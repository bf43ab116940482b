"""Reads what traces say in their metadata: of the files that they were made from, and how they were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...base.trace_marks import COMMAND, MERGE, SLIM
from .lanes import map_unique, map_unique_pairs
from .table import Array
from .trace import ReadLosses

_ON_GPU = ("gpu", "gpu_regions", "syncs")


_OPTIONS = {"record_shapes": "--shapes", "with_stack": "--stacks", "profile_memory": "--memory events"}


def by_command(metadata: Mapping[str, Any]) -> bool:
    """Return whether `instrument run` recorded a trace, so that its user has options, and no arguments."""
    return COMMAND in metadata


def to_record(metadata: Mapping[str, Any], **argument: Literal[True] | str) -> str:
    """Return an argument of `instrument.profile` as the user of a trace writes it, perhaps as an option."""
    ((name, value),) = argument.items()
    if by_command(metadata):
        return _OPTIONS.get(name) or f"--{name} {value}"
    return f"{name}=True" if value is True else f'{name}="{value}"'


def merge_note(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the note in the metadata of a trace; empty if the trace is not a merged one."""
    return mapping(metadata.get(MERGE))


def about_ranks(metadata: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return what the note says of each rank, in ascending order; empty if the trace is not a merged one."""
    ranks = mapping(merge_note(metadata).get("ranks"))
    by_rank = {int(rank): mapping(about) for rank, about in ranks.items() if rank.isdecimal() and len(rank) < 8}
    return dict(sorted(by_rank.items()))


def metadata_of(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of the file of a rank, from what the note says of the rank."""
    return mapping(about.get("metadata"))


def process_groups(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what torch says of each process group of a job."""
    groups = mapping(metadata.get("distributedInfo")).get("pg_config")
    return [mapping(group) for group in groups] if isinstance(groups, list) else []


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
        for process, before in mapping(about.get("processes")).items()
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
    new_numbers = {
        place: number for number, place in enumerate(sorted(place for place in places if place[1] >= 0))
    }
    for part in tables:
        part["device"] = map_unique_pairs(
            rank_of[part["thread"]], part["device"], lambda rank, device: new_numbers.get((rank, device), -1)
        )
    return new_numbers


def mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value``, or an empty mapping if it is not a mapping."""
    return value if isinstance(value, Mapping) else {}


_MOST = 1 << 62  # events or bytes


def note_of(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the note in the metadata of a trace; empty if the trace is not a slim one."""
    return mapping(metadata.get(SLIM))


def note_losses(lost: ReadLosses) -> dict[str, Any]:
    """Return what could not be read of a file, as a value of its note."""
    return {"events": lost.events, "bytes": lost.bytes, "repaired": lost.repaired, "reasons": dict(lost.reasons)}


def add_losses(note: Mapping[str, Any], lost: ReadLosses) -> None:
    """Add what could not be read of the files from which a slim or merged trace was made."""
    before = mapping(note.get("lost"))
    lost.events += _count(before.get("events"))
    lost.bytes += _count(before.get("bytes"))
    lost.repaired += _count(before.get("repaired"))
    for reason, count in mapping(before.get("reasons")).items():
        lost.reasons[str(reason)] = lost.reasons.get(str(reason), 0) + _count(count)


def lanes_of(note: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the lanes of overlapping events: the process, the thread id of the lane, and the one of its thread."""
    lanes = note.get("lanes")
    for lane in lanes if isinstance(lanes, list) else ():
        if isinstance(lane, list) and len(lane) == 3 and not any(isinstance(each, (list, dict)) for each in lane):
            yield lane[0], lane[1], lane[2]


def own_threads(note: Mapping[str, Any], threads: Mapping[Any, int]) -> Array:
    """Return for each thread the thread that its events belong to: another one for lanes of overlapping events.

    Args:
        note: the note in the metadata of a slim or merged trace.
        threads: the number of each pair of process and thread.
    """
    owner = np.arange(len(threads))
    for process, lane, thread in lanes_of(note):
        if (process, lane) in threads and (process, thread) in threads:
            owner[threads[process, lane]] = threads[process, thread]
    return owner[owner]  # a slim trace of a slim trace may have lanes of lanes


def kept_steps(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of steps of a slim trace, and of the file that it was made from; None if it has all."""
    steps = mapping(note_of(metadata).get("steps"))
    kept, of = _count(steps.get("kept")), _count(steps.get("of"))
    return (kept, of) if 0 < kept < of else None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _MOST else 0
