"""Writes a copy of a torch.profiler trace with an additional lane of regions for each stream of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..tables.nest import ancestor_levels
from ..tables.table import Array, Table
from ..tables.trace import Trace
from .insert_events import FIRST_LANE, check_copy, event_text, insert_events, microseconds, taken_lanes

_MAX_DEPTH = 100  # levels of nested regions
_MAX_ROWS = 16  # per stream


class LaneSpan(NamedTuple):
    """A region on a stream: from the first start to the last end of the work that it launched there.

    Attributes:
        name: the name of the region.
        start_ns: the start of the first kernel, memcpy or memset.
        end_ns: the end of the last one.
        operations: the number of kernels, memcpys and memsets.
        work_ns: the sum of their durations.
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
        rows: the spans in order of their starts, outer spans first; more than one row only if spans overlap
            without nesting.
        left_out: the number of spans that overlap spans in all rows.
    """

    device: int
    stream: int
    rows: list[list[LaneSpan]]
    left_out: int = 0


def gpu_lanes(trace: Trace) -> list[GpuLane]:
    """Return a lane for each stream that ran work of a region or a step, in order of device and stream.

    Work belongs to the region that `Trace.gpu` links it to, to the regions around that region, even on another
    thread, and to its step.
    """
    gpu = trace.gpu
    places = np.stack((gpu.device.astype(np.int64), gpu.stream), axis=1)
    streams, lane = np.unique(places, axis=0, return_inverse=True)
    spans: list[list[LaneSpan]] = [[] for _ in streams]
    alone = np.full(len(trace.steps), -1)
    for ranges, parents, link in (
        (trace.steps, alone, gpu.step),
        (trace.regions, trace.regions.parent, gpu.region),
    ):
        for number, span in _spans(ranges, parents, gpu, link, lane.reshape(-1)):
            spans[number].append(span)
    return [
        GpuLane(
            int(device),
            int(stream),
            *_arrange_in_rows(sorted(some, key=lambda span: (span.start_ns, -span.end_ns))),
        )
        for (device, stream), some in zip(streams.tolist(), spans, strict=True)
        if some
    ]


def _spans(ranges: Table, parents: Array, gpu: Table, link: Array, lane: Array) -> Iterator[tuple[int, LaneSpan]]:
    """Yield the lane and span of each range on each lane, including the work of inner ranges; parents first."""
    rows = np.flatnonzero(link >= 0)
    lanes = int(lane.max(initial=0)) + 1
    columns = gpu.start_ns[rows], gpu.end_ns[rows], np.ones(len(rows), np.int64), gpu.duration_ns[rows]
    keys, own = _reduced(link[rows].astype(np.int64) * lanes + lane[rows], columns)
    depth = np.zeros(len(parents), np.int64)
    for level, (which, _) in enumerate(ancestor_levels(np.arange(len(parents)), parents)):
        depth[which] = level
    levels = [(keys[:0], keys[:0]), *ancestor_levels(keys // lanes, parents)]
    of, around = (np.concatenate(each) for each in zip(*levels, strict=True))
    keys, sums = _reduced(around * lanes + keys[of] % lanes, [column[of] for column in own])
    for key, *work in zip(keys.tolist(), *(column.tolist() for column in sums), strict=True):
        row = key // lanes
        if depth[row] < _MAX_DEPTH:
            yield key % lanes, LaneSpan(ranges.strings[ranges.name[row]], *work)


def _reduced(keys: Array, work: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return each key once, and the first start, the last end, the count and the time of its work."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    if not len(first):
        return keys, list(work)
    functions = (np.minimum, np.maximum, np.add, np.add)
    return keys[first], [
        function.reduceat(column[order], first) for function, column in zip(functions, work, strict=True)
    ]


def _arrange_in_rows(spans: list[LaneSpan]) -> tuple[list[list[LaneSpan]], int]:
    """Put each span into the first row where it nests; return the rows, and how many spans found none."""
    rows: list[list[LaneSpan]] = []
    ends: list[list[int]] = []  # of the open spans in each row, innermost last
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
            if len(rows) == _MAX_ROWS:
                left_out += 1
            else:
                rows.append([span])
                ends.append([span.end_ns])
    return rows, left_out


CATEGORY = "gpu_region"
"""The category of the added events."""


class AddedLanes(NamedTuple):
    """The lanes that were added to a copy.

    Attributes:
        spans: the number of ranges.
        streams: the number of streams.
        left_out: the number of ranges that were not added, because they overlap too many others.
    """

    spans: int
    streams: int
    left_out: int


def add_gpu_lanes(trace: Trace, out: Path) -> AddedLanes:
    """Write a copy of the file of a trace with lanes of regions on the GPU, gzipped if ``out`` ends in ".gz".

    The content of the file, including damage, is copied unchanged; the lanes come before the first event. An
    existing file at ``out`` is replaced once the copy is complete.

    Args:
        trace: the trace that `read_trace` returned; its file must not have changed.
        out: the path of the copy.

    Raises:
        ValueError: the trace comes from another profiler, has such lanes already, or has no regions with GPU work;
            its file is missing; or ``out`` is the same file or cannot be replaced.
        OSError: the file cannot be read, or ``out`` cannot be written.
    """
    check_copy(trace, out, CATEGORY)
    lanes = gpu_lanes(trace)
    if not lanes:
        raise ValueError(f"no GPU work was launched in a region or a step of {trace.path}")
    insert_events(trace, out, _events(lanes, taken_lanes(trace)))
    spans = sum(len(row) for lane in lanes for row in lane.rows)
    return AddedLanes(spans, len(lanes), sum(lane.left_out for lane in lanes))


def _events(lanes: Iterable[GpuLane], taken: set[tuple[int | str, int | str]]) -> Iterator[str]:
    """Yield the events of the lanes as JSON; each row gets a thread id of its GPU that is not ``taken``."""
    number = FIRST_LANE
    for lane in lanes:
        for row, spans in enumerate(lane.rows):
            while (lane.device, number) in taken:
                number += 1
            place = {"pid": lane.device, "tid": number}
            name = f"stream {lane.stream}: regions" + f" ({row + 1})" * (row > 0)
            since = microseconds(spans[0].start_ns)
            yield event_text({"ph": "M", "name": "thread_name"} | place, since, {"name": name})
            # Sorts the lane next to its stream.
            yield event_text({"ph": "M", "name": "thread_sort_index"} | place, since, {"sort_index": lane.stream})
            for span in spans:
                about = {"ph": "X", "cat": CATEGORY, "name": span.name} | place
                times = f'{microseconds(span.start_ns)}, "dur": {microseconds(span.end_ns - span.start_ns)}'
                work = {"operations": span.operations, "work (us)": span.work_ns / 1000}
                yield event_text(about, times, {"device": lane.device, "stream": lane.stream} | work)
            number += 1
