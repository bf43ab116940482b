"""Writes a copy of a trace of torch.profiler with a lane more for each stream of a GPU: its regions."""

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
"""Of the events that are added."""

_FIRST = 1_000_000_000  # thread of the lanes, which no stream is; threads of the system have lower ids


class AddedLanes(NamedTuple):
    """What was added to a copy.

    Attributes:
        spans: how many ranges.
        streams: of how many streams.
        left_out: how many more there are, which overlap too many others to be drawn.
    """

    spans: int
    streams: int
    left_out: int


def add_gpu_lanes(trace: Trace, out: Path) -> AddedLanes:
    """Write a copy of the file of a trace with lanes of regions on the GPU, gzipped if ``out`` ends in ".gz".

    All that is in the file, damage included, is copied as it is; the lanes come before the first event. A file
    at ``out`` is replaced once the copy is complete.

    Args:
        trace: as `read_trace` returned it; its file must not have changed.
        out: the copy.

    Raises:
        ValueError: the trace is of another profiler or its file no longer there to be copied, ``out`` is that very
            file or none that can be replaced, the trace has such lanes, or nothing to put on them.
        OSError: the file cannot be read, or ``out`` not be written.
    """
    source = check_source(trace.path)
    check_out(source, out)
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f"a trace of torch.profiler (.json, .json.gz) is accepted; {trace.path} is of {trace.format}"
        )
    if (trace.others.category == _word(trace, CATEGORY)).any():
        raise ValueError(f"{trace.path} has such lanes already")
    lanes = gpu_lanes(trace)
    if not lanes:
        raise ValueError(f"nothing on the GPU was launched in a region or a step of {trace.path}")
    taken = {(thread.process, thread.thread) for thread in trace.threads}
    _replace(source, out, trace.look_up.begin, _events(lanes, taken))
    spans = sum(len(row) for lane in lanes for row in lane.rows)
    return AddedLanes(spans, len(lanes), sum(lane.left_out for lane in lanes))


def check_source(source: Path) -> Path:
    """Return ``source`` if it is a file.

    Raises:
        ValueError: it is not.
    """
    if not source.is_file():
        raise ValueError(f"TRACE must be the file of one process: {source}")
    return source


def check_out(source: Path, out: Path) -> None:
    """Do nothing if a copy of ``source`` can be written to ``out``.

    Raises:
        ValueError: it cannot.
    """
    if out.exists() and (not out.is_file() or out.samefile(source)):
        raise ValueError(f"{out} is {'the trace itself' if out.is_file() else 'no file that can be replaced'}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"the folder of OUT does not exist: {out.absolute().parent}")


def _word(trace: Trace, word: str) -> int:
    return trace.strings.index(word) if word in trace.strings else -1


def _events(lanes: Iterable[GpuLane], taken: set[tuple[int | str, int | str]]) -> Iterator[str]:
    """The events of the lanes as JSON; each row is a thread of its GPU that is not ``taken``."""
    number = _FIRST
    for lane in lanes:
        for row, spans in enumerate(lane.rows):
            while (lane.device, number) in taken:
                number += 1
            place = {"pid": lane.device, "tid": number}
            name = f"stream {lane.stream}: regions" + f" ({row + 1})" * (row > 0)
            since = _us(spans[0].start_ns)
            yield _event({"ph": "M", "name": "thread_name"} | place, since, {"name": name})
            # Beside the stream, whose number is where it stands.
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
    """Exact, which a float of the time since 1970 is not."""
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"


def _replace(source: Path, out: Path, begin: int, events: Iterable[str]) -> None:
    """Copy the text with events before that of which the text begins at ``begin``."""
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
