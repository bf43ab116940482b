"""Where the work of each region ran on each stream of a GPU, in rows of ranges that nest, as viewers draw them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .table import Array, Table
from .trace import Trace

_DEEPEST = 100  # regions in each other that are shown
_ROWS = 16  # of a stream


class Span(NamedTuple):
    """A region on a stream: from the first start to the last end of what was launched in it and runs there.

    Attributes:
        name: of the region.
        start_ns: of the first kernel, copy or fill.
        end_ns: of the last.
        operations: how many there are.
        work_ns: their durations, added up.
    """

    name: str
    start_ns: int
    end_ns: int
    operations: int
    work_ns: int


@dataclass(frozen=True)
class GpuLane:
    """The regions on one stream.

    Attributes:
        device: the GPU.
        stream: its stream.
        rows: spans in order of their starts, of which those around others come first. One row has all of them,
            unless some overlap and neither holds the other.
        left_out: how many spans overlap those of all rows.
    """

    device: int
    stream: int
    rows: list[list[Span]]
    left_out: int = 0


def gpu_lanes(trace: Trace) -> list[GpuLane]:
    """Return the lane of each stream on which work of a region or a step ran, by device and stream.

    Work belongs to the region that `Trace.gpu` links it to, to the regions around that, also those on another
    thread, and to its step.
    """
    gpu = trace.gpu
    places = np.stack((gpu.device.astype(np.int64), gpu.stream), axis=1)
    streams, lane = np.unique(places, axis=0, return_inverse=True)
    spans: list[list[Span]] = [[] for _ in streams]
    alone = np.full(len(trace.steps), -1)
    for ranges, parents, link in (
        (trace.steps, alone, gpu.step),
        (trace.regions, trace.regions.parent, gpu.region),
    ):
        for number, span in _spans(ranges, parents.tolist(), _launched(gpu, link, lane.reshape(-1), len(streams))):
            spans[number].append(span)
    return [
        GpuLane(int(device), int(stream), *_in_rows(sorted(some, key=lambda span: (span.start_ns, -span.end_ns))))
        for (device, stream), some in zip(streams.tolist(), spans, strict=True)
        if some
    ]


_Work = tuple[int, int, int, int]  # start, end, operations and their time


def _launched(gpu: Table, link: Array, lane: Array, lanes: int) -> dict[int, dict[int, _Work]]:
    """What was launched in each range itself, by its row and the lane."""
    rows = np.flatnonzero(link >= 0)
    keys = link[rows].astype(np.int64) * lanes + lane[rows]
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    found: dict[int, dict[int, _Work]] = {}
    if len(first):
        columns = (
            np.minimum.reduceat(gpu.start_ns[rows], first),
            np.maximum.reduceat(gpu.end_ns[rows], first),
            np.diff(np.append(first, len(rows))),
            np.add.reduceat(gpu.duration_ns[rows], first),
        )
        values = zip(*(column.tolist() for column in columns), strict=True)
        for key, work in zip(keys[first].tolist(), values, strict=True):
            found.setdefault(key // lanes, {})[key % lanes] = work
    return found


def _spans(ranges: Table, parents: list[int], work: dict[int, dict[int, _Work]]) -> Iterator[tuple[int, Span]]:
    """The lane and the span of each range on each of its lanes, with the work of ranges inside; parents first."""
    depth = [0] * len(parents)
    for row, parent in enumerate(parents):  # parents come before what they hold
        depth[row] = depth[parent] + 1 if parent >= 0 else 0
    for row in reversed(range(len(parents))):
        if parents[row] >= 0 and row in work:
            around = work.setdefault(parents[row], {})
            for lane, inside in work[row].items():
                around[lane] = _both(around[lane], inside) if lane in around else inside
    for row in sorted(work):
        if depth[row] < _DEEPEST:
            name = ranges.strings[ranges.name[row]]
            yield from ((lane, Span(name, *found)) for lane, found in work[row].items())


def _both(one: _Work, other: _Work) -> _Work:
    return min(one[0], other[0]), max(one[1], other[1]), one[2] + other[2], one[3] + other[3]


def _in_rows(spans: list[Span]) -> tuple[list[list[Span]], int]:
    """Put each span into the first row in which those that are open hold it; return how many have none, too."""
    rows: list[list[Span]] = []
    ends: list[list[int]] = []  # of the spans that are open in each row, innermost last
    left_out = 0
    for span in spans:
        for row, open_ in zip(rows, ends, strict=True):
            while open_ and open_[-1] <= span.start_ns:
                open_.pop()
            if not open_ or span.end_ns <= open_[-1]:
                row.append(span)
                open_.append(span.end_ns)
                break
        else:
            if len(rows) == _ROWS:
                left_out += 1
            else:
                rows.append([span])
                ends.append([span.end_ns])
    return rows, left_out
