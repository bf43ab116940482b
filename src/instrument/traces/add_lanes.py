"""Writes a copy of a torch.profiler trace with an additional lane of regions for each stream of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .gpu_lanes import GpuLane, gpu_lanes
from .insert_events import FIRST_LANE, check_copy, event_text, insert_events, microseconds, taken_lanes
from .trace import Trace

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
