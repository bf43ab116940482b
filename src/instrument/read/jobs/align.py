"""Finds the offsets between the clocks of ranks from their common collectives."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from ...base.trace_marks import MACHINE
from ..tables.lanes import group_rows
from ..tables.notes import process_groups
from ..tables.table import KERNEL, TRANSFERS, Array, linked
from ..tables.trace import Trace

CALLS = re.compile(f"^(?:{'|'.join(TRANSFERS)})$")
_NAME = re.compile("nccl|rccl", re.IGNORECASE)
_POINT_TO_POINT = re.compile("^(i?send|i?recv)")
_SEND_RECEIVE = re.compile("SendRecv")
_RESOLUTION_NS = 1000  # of older traces; smaller differences have no meaning
_SHIFTS = sorted(range(-64, 65), key=abs)
_MIN_PAIRS = 8  # pairs that a shift needs
_APART_NS = 3600 * 10**9  # the ranks of a job do not begin a window further apart


@dataclass(frozen=True)
class Clock:
    """The clock of a rank, compared with the clock of the lowest rank.

    Attributes:
        offset_ns: add this to times of the rank to get times on the clock of the lowest rank.
        source: "collectives"; if the rank shares no collectives with others, "machine" if it ran on the machine of
            the lowest rank, whose clock it shares, else "epoch", as the offset comes from the clocks of the
            machines; "unknown" if the start of a clock is missing or impossible; "reference" for the lowest rank.
        against: the rank that it was compared with.
        collectives: the number of collectives that were compared.
        spread_ns: the median absolute deviation of their ends from the offset.
    """

    offset_ns: int
    source: str
    against: int
    collectives: int = 0
    spread_ns: int = 0

    @property
    def is_sure(self) -> bool:
        """Whether the offset holds within a step."""
        return self.source not in ("epoch", "unknown")


def collective_kernels(trace: Trace) -> Array:
    """Return a mask of `Trace.gpu`: the kernels that are collectives, according to the file or their name.

    Kernels of sends and receives that say nothing are named like those of all-to-all: operators tell them apart.
    """
    gpu = trace.gpu
    named = (gpu.collective > 0) | gpu.matching("name", _NAME)
    between_two = gpu.matching("collective", _POINT_TO_POINT)
    if trace.operators.matching("name", CALLS).any():
        between_two |= (gpu.collective == 0) & gpu.matching("name", _SEND_RECEIVE)
    mask: Array = (gpu.category == KERNEL) & named & ~between_two
    return mask


def align(
    traces: Mapping[int, Trace], collectives: Callable[[Trace], Array] = collective_kernels
) -> dict[int, Clock]:
    """Compare the clocks of ranks by the ends of their common collectives.

    A collective ends on all its ranks within microseconds, however early each rank began to wait. The offset
    between two ranks is the median of the differences of those ends. Two collectives are the same if they have the
    same name and the same position in the same process group, counted within each step if steps are marked.
    Without marked steps, one rank may have recorded up to 64 more at the start: the positions are shifted to where
    the differences agree best. A rank without common collectives with the lowest rank is compared with a rank that
    has some.

    Args:
        traces: the traces by rank.
        collectives: returns a mask of `Trace.gpu`.

    Returns:
        The clock of each rank.
    """
    sequences = {rank: collective_sequences(trace, collectives(trace)) for rank, trace in traces.items()}
    clocks: dict[int, Clock] = {}
    waiting = sorted(traces)
    lowest = waiting[0] if waiting else 0
    while waiting:
        first = waiting.pop(0)
        clocks[first] = _by_epoch(traces[first], traces[lowest], lowest)
        reached = [first]
        for near in reached:
            for rank in [rank for rank in waiting if sequences[rank]] if sequences[near] else ():
                comparison = _compare(sequences[near], sequences[rank])
                if comparison is not None:
                    offset, spread, count = comparison
                    clocks[rank] = Clock(clocks[near].offset_ns + offset, "collectives", near, count, spread)
                    waiting.remove(rank)
                    reached.append(rank)
    return {rank: clocks[rank] for rank in sorted(clocks)}


def _by_epoch(trace: Trace, reference: Trace, lowest: int) -> Clock:
    """Return the clock of a rank by the start of its clock, if its window then begins near that of the reference.

    The start of torch's clock is the beginning of a quarter of a year, so it is the same for all ranks where one
    file lacks it or is damaged.
    """
    if trace is reference:
        return Clock(0, "reference", lowest)
    machine = trace.metadata.get(MACHINE)
    begin, own = _begin_ns(reference), _begin_ns(trace)
    if begin is None or own is None:
        begin = own = 0
    same = machine is not None and machine == reference.metadata.get(MACHINE)
    for offset, source in ((trace.epoch_ns - reference.epoch_ns, "machine" if same else "epoch"), (0, "unknown")):
        if abs(own + offset - begin) < _APART_NS:
            return Clock(offset, source, lowest)
    return Clock(begin - own, "unknown", lowest)


def _begin_ns(trace: Trace) -> int | None:
    """Return when the first step or, without steps, the first work of the GPU begins; None without both."""
    rows = trace.steps or trace.gpu
    return int(rows.start_ns.min()) if rows else None


@dataclass(frozen=True)
class CollectiveSequence:
    """The collectives of one process group on one rank, in order.

    Attributes:
        step: the number of the step that launched each, or -1.
        name: a hash of its name.
        end_ns: its end.
        duration_ns: its duration.
    """

    step: Array
    name: Array
    end_ns: Array
    duration_ns: Array


CollectiveSequences = dict[tuple[str, str], CollectiveSequence]
"""By process group: its name and the ranks that are its members."""


def collective_sequences(trace: Trace, mask: Array) -> CollectiveSequences:
    """Return the collectives of one rank by process group: its name and the ranks that are its members.

    Args:
        trace: the trace of the rank.
        mask: which rows of `Trace.gpu` are collectives.
    """
    rows = trace.gpu.where(mask)
    name = np.where(rows.collective > 0, rows.collective, rows.name)
    used, inverse = np.unique(name, return_inverse=True)
    name = np.array([name_hash(trace.strings[code]) for code in used], np.int64)[inverse]
    step = linked(trace.steps.number, rows.step)
    # The ranks of each process group: several groups may have the same name.
    members = {str(group.get("pg_name")): str(group.get("ranks")) for group in process_groups(trace.metadata)}
    # Each process group has its own stream; groups without names are matched in order of their streams.
    streams = np.unique(rows.stream, return_inverse=True)[1]
    result = {}
    end_ns = rows.end_ns
    for group, of_group in group_rows(rows.group):
        text = trace.strings[group]
        parts = [(-1, of_group)] if group else [(n, of_group[part]) for n, part in group_rows(streams[of_group])]
        for number, selected in parts:
            key = (text, members.get(text, "")) if group else ("", str(number))
            result[key] = CollectiveSequence(
                step[selected], name[selected], end_ns[selected], rows.duration_ns[selected]
            )
    return result


def name_hash(name: str) -> int:
    """Return the number that stands for a name in `CollectiveSequence`, the same on all ranks."""
    return zlib.crc32(name.encode(errors="replace"))


def _compare(one: CollectiveSequences, other: CollectiveSequences) -> tuple[int, int, int] | None:
    """Return the offset, its spread and the number of collectives of the most certain group and shift."""
    best = None
    for group in sorted(one.keys() & other.keys()):
        for shift, own, others in _pairs(one[group], other[group]):
            same = one[group].name[own] == other[group].name[others]
            apart = one[group].end_ns[own[same]] - other[group].end_ns[others[same]]
            if not len(apart) or (shift and len(apart) < _MIN_PAIRS):
                continue
            offset = _median(apart)
            spread = _median(np.abs(apart - offset))
            # Like the standard error of a median; a shift needs much better evidence.
            error = (spread + _RESOLUTION_NS) / sqrt(len(apart)) * (4 if shift else 1)
            if best is None or error < best[0]:
                best = error, (offset, spread, len(apart))
    return best and best[1]


def _pairs(one: CollectiveSequence, other: CollectiveSequence) -> Iterator[tuple[int, Array, Array]]:
    """Yield each shift of the second sequence, and the collectives of both that are then at the same place."""
    if (one.step >= 0).any() and (other.step >= 0).any():
        _, own, others = np.intersect1d(
            places(one.step), places(other.step), assume_unique=True, return_indices=True
        )
        stepped = one.step[own] >= 0
        yield 0, own[stepped], others[stepped]
        return
    for shift in _SHIFTS:
        own = np.arange(max(0, shift), max(0, min(len(one.step), len(other.step) + shift)))
        yield shift, own, own - shift


def places(step: Array) -> Array:
    """Return a number for each row, from its step and its position in the step."""
    order = np.argsort(step, kind="stable")
    ranked = step[order]
    places = np.empty(len(step), np.int64)
    places[order] = (ranked << 32) + np.arange(len(step)) - np.searchsorted(ranked, ranked)
    return places


def steps_of(places: Array) -> Array:
    """Return the step of each number from `places`, once each."""
    return np.unique(places >> 32)


def _median(values: Array) -> int:
    """Return the median as an integer: a float cannot represent ns since 1970."""
    ordered = np.sort(values)
    low, high = int(ordered[(len(ordered) - 1) // 2]), int(ordered[len(ordered) // 2])
    return low + (high - low) // 2
