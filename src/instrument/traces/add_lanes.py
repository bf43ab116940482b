"""Writes a copy of a torch.profiler trace with an additional lane of regions for each stream of a GPU."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from .chunks import EventIndex
from .gpu_lanes import GpuLane, gpu_lanes
from .text import read_blocks
from .trace import ReadLosses, Trace

CATEGORY = "gpu_region"
"""The category of the added events."""

_FIRST = 1_000_000_000  # the thread id of the first lane, above all streams and system threads


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
    source = check_source(trace.path)
    check_out(source, out)
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f"TRACE must be a trace of torch.profiler (.json, .json.gz): {trace.path} is a {trace.format} file"
        )
    if (trace.others.category == _word(trace, CATEGORY)).any():
        raise ValueError(f"{trace.path} already has such lanes")
    lanes = gpu_lanes(trace)
    if not lanes:
        raise ValueError(f"no GPU work was launched in a region or a step of {trace.path}")
    taken = {(thread.process, thread.thread) for thread in trace.threads}
    _replace(source, out, trace.look_up.begin, _events(lanes, taken))
    spans = sum(len(row) for lane in lanes for row in lane.rows)
    return AddedLanes(spans, len(lanes), sum(lane.left_out for lane in lanes))


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


def _word(trace: Trace, word: str) -> int:
    return trace.strings.index(word) if word in trace.strings else -1


def _events(lanes: Iterable[GpuLane], taken: set[tuple[int | str, int | str]]) -> Iterator[str]:
    """Yield the events of the lanes as JSON; each row gets a thread id of its GPU that is not ``taken``."""
    number = _FIRST
    for lane in lanes:
        for row, spans in enumerate(lane.rows):
            while (lane.device, number) in taken:
                number += 1
            place = {"pid": lane.device, "tid": number}
            name = f"stream {lane.stream}: regions" + f" ({row + 1})" * (row > 0)
            since = _us(spans[0].start_ns)
            yield _event({"ph": "M", "name": "thread_name"} | place, since, {"name": name})
            # Sorts the lane next to its stream.
            yield _event({"ph": "M", "name": "thread_sort_index"} | place, since, {"sort_index": lane.stream})
            for span in spans:
                about = {"ph": "X", "cat": CATEGORY, "name": span.name} | place
                times = f'{_us(span.start_ns)}, "dur": {_us(span.end_ns - span.start_ns)}'
                work = {"operations": span.operations, "work (us)": span.work_ns / 1000}
                yield _event(about, times, {"device": lane.device, "stream": lane.stream} | work)
            number += 1


def _event(about: Mapping[str, Any], times: str, args: Mapping[str, Any]) -> str:
    return f'{json.dumps(about)[:-1]}, "ts": {times}, "args": {json.dumps(args)}}}'


def _us(ns: int) -> str:
    """Return microseconds as text, because a float of the time since 1970 is not exact."""
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"


def _replace(source: Path, out: Path, begin: int, events: Iterable[str]) -> None:
    """Copy the text, with the new events inserted at the offset ``begin``."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as read, _open(part, packed=out.suffix == ".gz") as write:
            place = 0
            for block in read_blocks(source, read, ReadLosses()):
                before = begin - place
                place += len(block)
                if 0 <= before < len(block):
                    write.write(block[:before])
                    write.writelines(f"{event},\n".encode() for event in events)
                    block = block[before:]
                write.write(block)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _open(path: Path, *, packed: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "wb", compresslevel=1)) if packed else path.open("wb")
