"""How far the clocks of ranks are apart, by the collectives that they took part in together."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from .lanes import group_rows
from .table import KERNEL, Array
from .trace import Trace

_NAME = re.compile("nccl|rccl", re.IGNORECASE)
_POINT_TO_POINT = re.compile("^(i?send|i?recv)")
_RESOLUTION_NS = 1000  # of older traces; better agreement than that tells nothing
_SHIFTS = sorted(range(-64, 65), key=abs)
_FEWEST = 8  # pairs that a shift needs to be believed


@dataclass(frozen=True)
class Clock:
    """How the clock of a rank compares with that of the lowest rank.

    Attributes:
        offset_ns: what to add to times of this rank to have them on the clock of the lowest.
        source: "collectives"; "epoch", where it has none in common with the others, so that the offset is what
            the clocks of the machines say; "reference" for the lowest rank.
        against: the rank that it was compared with.
        collectives: how many were compared.
        spread_ns: median absolute deviation of their ends from the offset.
    """

    offset_ns: int
    source: str
    against: int
    collectives: int = 0
    spread_ns: int = 0


def collective_kernels(trace: Trace) -> Array:
    """Return a mask over `trace.gpu`: kernels that the file or their name says to be collectives."""
    gpu = trace.gpu
    named = (gpu.collective > 0) | gpu.matching("name", _NAME)
    mask: Array = (gpu.category == KERNEL) & named & ~gpu.matching("collective", _POINT_TO_POINT)
    return mask


def align(
    traces: Mapping[int, Trace], collectives: Callable[[Trace], Array] = collective_kernels
) -> dict[int, Clock]:
    """Compare the clocks of ranks, such that the collectives they have in common end together.

    A collective ends on all its ranks within microseconds, however early each of them began to wait. The
    offset between two ranks is the median of the differences of those ends. Collectives are the same if they have
    the same place in the same process group, counted in each step where steps are marked, and the same name.
    Where no steps are marked, one rank may have recorded up to 64 more than the other at the start: the places
    are shifted to where the differences agree best. A rank that has none in common with the lowest is compared
    with one that was.

    Args:
        traces: by rank.
        collectives: returns a mask over `trace.gpu`.
    """
    sequences = {rank: _sequences(trace, collectives(trace)) for rank, trace in traces.items()}
    clocks: dict[int, Clock] = {}
    waiting = sorted(traces)
    lowest = waiting[0] if waiting else 0
    while waiting:
        first = waiting.pop(0)
        apart = traces[first].epoch_ns - traces[lowest].epoch_ns
        clocks[first] = Clock(apart, "epoch" if first != lowest else "reference", lowest)
        reached = [first]
        for known in reached:
            for rank in [rank for rank in waiting if sequences[rank]] if sequences[known] else ():
                found = _compare(sequences[known], sequences[rank])
                if found is not None:
                    offset, spread, count = found
                    clocks[rank] = Clock(clocks[known].offset_ns + offset, "collectives", known, count, spread)
                    waiting.remove(rank)
                    reached.append(rank)
    return {rank: clocks[rank] for rank in sorted(clocks)}


@dataclass(frozen=True)
class _Sequence:
    """The collectives of one process group: the step each was launched in or -1, its name as a number, its end."""

    step: Array
    name: Array
    end_ns: Array


def _sequences(trace: Trace, mask: Array) -> dict[tuple[str, str], _Sequence]:
    rows = trace.gpu.where(mask)
    name = np.where(rows.collective > 0, rows.collective, rows.name)
    used, inverse = np.unique(name, return_inverse=True)
    name = np.array([zlib.crc32(trace.strings[code].encode(errors="replace")) for code in used], np.int64)[inverse]
    step = np.where(rows.step >= 0, trace.steps.number[rows.step], -1) if trace.steps else rows.step
    members = _members(trace)
    # A process group has a stream of its own; without names, those of both ranks are taken in order.
    streams = np.unique(rows.stream, return_inverse=True)[1]
    result = {}
    end_ns = rows.end_ns
    for group, of_group in group_rows(rows.group):
        text = trace.strings[group]
        parts = [(-1, of_group)] if group else [(n, of_group[part]) for n, part in group_rows(streams[of_group])]
        for number, here in parts:
            key = (text, members.get(text, "")) if group else ("", str(number))
            result[key] = _Sequence(step[here], name[here], end_ns[here])
    return result


def _members(trace: Trace) -> dict[str, str]:
    """The ranks of each process group: several may have one name."""
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    known = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    return {str(group.get("pg_name")): str(group.get("ranks")) for group in known}


def _compare(
    one: dict[tuple[str, str], _Sequence], other: dict[tuple[str, str], _Sequence]
) -> tuple[int, int, int] | None:
    """The offset, its spread and the number of collectives of the group and shift that are surest."""
    best = None
    for group in sorted(one.keys() & other.keys()):
        for shift, apart in _differences(one[group], other[group]):
            if not len(apart) or (shift and len(apart) < _FEWEST):
                continue
            offset = _median(apart)
            spread = _median(np.abs(apart - offset))
            # As the standard error of a median goes. Evidence for a shift has to be much better than without.
            error = (spread + _RESOLUTION_NS) / sqrt(len(apart)) * (4 if shift else 1)
            if best is None or error < best[0]:
                best = error, (offset, spread, len(apart))
    return best and best[1]


def _differences(one: _Sequence, other: _Sequence) -> Iterator[tuple[int, Array]]:
    """By how many places the second was shifted, and how much earlier each of its collectives ended."""
    if (one.step >= 0).any() and (other.step >= 0).any():
        _, here, there = np.intersect1d(
            _places(one.step), _places(other.step), assume_unique=True, return_indices=True
        )
        here, there = here[one.step[here] >= 0], there[one.step[here] >= 0]
        yield 0, _apart(one, here, other, there)
        return
    for shift in _SHIFTS:
        here = np.arange(max(0, shift), max(0, min(len(one.step), len(other.step) + shift)))
        yield shift, _apart(one, here, other, here - shift)


def _places(step: Array) -> Array:
    """A number for each row that holds the step and the place in it."""
    order = np.argsort(step, kind="stable")
    ranked = step[order]
    places = np.empty(len(step), np.int64)
    places[order] = (ranked << 32) + np.arange(len(step)) - np.searchsorted(ranked, ranked)
    return places


def _apart(one: _Sequence, here: Array, other: _Sequence, there: Array) -> Array:
    same = one.name[here] == other.name[there]
    apart: Array = one.end_ns[here[same]] - other.end_ns[there[same]]
    return apart


def _median(values: Array) -> int:
    """In integers: times since 1970 in ns are beyond those of a float."""
    ordered = np.sort(values)
    low, high = int(ordered[(len(ordered) - 1) // 2]), int(ordered[len(ordered) // 2])
    return low + (high - low) // 2
