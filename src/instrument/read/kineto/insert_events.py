"""Writes copies of torch.profiler traces with additional events: a lane of regions for each stream of a GPU."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from ...base.files import part_file, publish
from ..tables.lanes import distinct
from ..tables.nest import ancestor_levels
from ..tables.notes import about_ranks
from ..tables.table import Array, Table
from ..tables.trace import ReadLosses, Trace
from .chunks import EventIndex
from .text import BLOCK, read_blocks

FIRST_LANE = 1_000_000_000
"""The thread id of the first added lane, above all streams and system threads."""


def check_copy(trace: Trace, out: Path, category: str) -> None:
    """Check that a copy of the file of a trace can be written with lanes of a category.

    Raises:
        ValueError: the trace comes from another profiler, is a merged one, or has such lanes already; its file is
            missing; or ``out`` is the same file or cannot be replaced.
    """
    check_out(check_source(trace.path), out)
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f"TRACE must be a trace of torch.profiler (.json, .json.gz), not of {trace.format}: {trace.path}"
        )
    if about_ranks(trace.metadata):
        raise ValueError(f"TRACE must be the trace of one rank, not a merged one: {trace.path}")
    if trace.others.matching("category", re.compile(f"^{category}$")).any():
        raise ValueError(f"{trace.path} already has such lanes")


def taken_lanes(trace: Trace) -> set[tuple[int | str, int | str]]:
    """Return the process and thread ids of the trace."""
    return {(thread.process, thread.thread) for thread in trace.threads}


def check_source(source: Path) -> Path:
    """Return ``source`` if it is a file.

    Raises:
        ValueError: ``source`` is not a file.
    """
    if not source.is_file():
        raise ValueError(f"TRACE must be the file of one process: {source}")
    return source


def check_out(source: Path, out: Path) -> None:
    """Check that a copy of ``source`` can be written to ``out``.

    Raises:
        ValueError: ``out`` is the source, is not a file, or is in a missing folder.
    """
    if out.exists() and (not out.is_file() or out.samefile(source)):
        raise ValueError(f"{out} is {'the trace itself' if out.is_file() else 'not a file that can be replaced'}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"the folder of OUT does not exist: {out.absolute().parent}")


def event_text(about: Mapping[str, Any], times: str, args: Mapping[str, Any]) -> str:
    """Return the JSON text of an event; ``times`` is the text of its time and more that follows."""
    return f'{json.dumps(about)[:-1]}, "ts": {times}, "args": {json.dumps(args)}}}'


def microseconds(ns: int) -> str:
    """Return microseconds as the text of a JSON number, because a float of the time since 1970 is not exact."""
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' * (ns < 0)}{whole}" + (f".{rest:03}".rstrip("0") if rest else "")


def insert_events(trace: Trace, out: Path, events: Iterable[str]) -> None:
    """Copy the file of a trace that passed `check_copy`, with new events before the first.

    Raises:
        OSError: the file cannot be read, or ``out`` cannot be written.
    """
    source, begin = trace.path, cast(EventIndex, trace.look_up).begin
    with part_file(out) as part:
        with source.open("rb") as read, open_copy(part, packed=out.suffix == ".gz") as write:
            place = 0
            for block in read_blocks(source, read, ReadLosses()):
                before = begin - place
                place += len(block)
                if 0 <= before < len(block):
                    write.write(block[:before])
                    write.writelines(f"{event},\n".encode() for event in events)
                    block = block[before:]
                write.write(block)
        publish(part, out)


def open_copy(path: Path, *, packed: bool) -> IO[bytes]:
    """Open a file to write a trace to, packed at level 1 of gzip or plain."""
    if not packed:
        return path.open("wb")
    # gzip takes a call for each of many short texts
    return io.BufferedWriter(cast(io.RawIOBase, gzip.open(path, "wb", compresslevel=1)), BLOCK)


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
    first, lane = distinct(gpu.device, gpu.stream)
    spans: list[list[LaneSpan]] = [[] for _ in first]
    alone = np.full(len(trace.steps), -1)
    for ranges, parents, link in (
        (trace.steps, alone, gpu.step),
        (trace.regions, trace.regions.parent, gpu.region),
    ):
        for number, span in _spans(ranges, parents, gpu, link, lane):
            spans[number].append(span)
    return [
        GpuLane(device, stream, *_arrange_in_rows(sorted(some, key=lambda span: (span.start_ns, -span.end_ns))))
        for device, stream, some in zip(gpu.device[first].tolist(), gpu.stream[first].tolist(), spans, strict=True)
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
    columns = zip((np.minimum, np.maximum, np.add, np.add), work, strict=True)
    return keys[first], [function.reduceat(column[order], first) for function, column in columns]


def _arrange_in_rows(spans: list[LaneSpan]) -> tuple[list[list[LaneSpan]], int]:
    """Put each span into the first row where it nests; return the rows, and how many spans found none."""
    rows: list[list[LaneSpan]] = [[] for _ in range(_MAX_ROWS)]
    ends: list[list[int]] = [[] for _ in rows]  # of the open spans in each row, innermost last
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
            left_out += 1
    return [row for row in rows if row], left_out


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
