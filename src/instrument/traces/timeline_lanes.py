"""The lanes of a timeline: streams of GPUs; regions, modules, operators and runtime calls of threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..page.lanes import stacked
from ..page.names import shown_name
from ..units import counted
from .gpus import gpu_numbers
from .lanes import group_rows
from .table import Array, Table
from .trace_data import MODULE, TraceData
from .work_classes import work_classes, work_names

CLASSES = (
    "compute", "communication", "copies", "input", "synchronization", "overhead", "latency", "other",
    "region", "module", "operator", "runtime",
)  # fmt: skip
"""The classes of slices, which give their colors; those from "input" to "other" are of idle time."""

_TITLES = {"region": "regions", "module": "modules", "operator": "operators", "runtime": "runtime calls"}
_MOST_LANES = 32  # of streams, and of threads
_MOST_DEPTH = 32


class Lane(NamedTuple):
    """The slices of one lane, in order of start; of equal starts, the longest first.

    Attributes:
        group: what the lane belongs to: GPUs or a thread.
        title: the name of the lane.
        start_ns: the starts, on the clock of the trace.
        end_ns: the ends.
        name: the numbers of the names in the strings of the trace; those of `TimelineSource.causes` follow.
        kind: the numbers of the classes in `CLASSES`.
        work: the rows of `TimelineSource.gpu` that the slices are, or that end idle time; -1 for none.
        depth: the depth of each slice.
    """

    group: str
    title: str
    start_ns: Array
    end_ns: Array
    name: Array
    kind: Array
    work: Array
    depth: Array

    @property
    def columns(self) -> tuple[Array, ...]:
        """All columns."""
        return self.start_ns, self.end_ns, self.name, self.kind, self.work, self.depth

    @property
    def rows(self) -> int:
        """The number of depths."""
        return int(self.depth.max(initial=-1)) + 1

    def where(self, rows: Array) -> Lane:
        """Return the lane with some of its slices."""
        return Lane(self.group, self.title, *(column[rows] for column in self.columns))


class TimelineSource(NamedTuple):
    """What a timeline is made of.

    Attributes:
        trace: the trace.
        gpu: the GPU work to show: rows of `TraceData.gpu`.
        communication: a mask of the rows of ``gpu`` that communicate.
        window: the time to show, in ns on the clock of the trace.
        origin_ns: the time that the page counts from.
        causes: the names of idle time, which follow the strings of the trace, each with a sentence on it.
    """

    trace: TraceData
    gpu: Table
    communication: Array
    window: tuple[int, int]
    origin_ns: int
    causes: Mapping[str, str] = MappingProxyType({})


class Lanes(NamedTuple):
    """The lanes of a timeline.

    Attributes:
        streams: those of streams, by GPU.
        threads: those of threads, the most used thread first.
        notes: sentences on what is left out.
    """

    streams: list[Lane]
    threads: list[Lane]
    notes: list[str]


def lanes_of(source: TimelineSource) -> Lanes:
    """Return the lanes of streams and threads."""
    streams, no_streams = _stream_lanes(source)
    threads, no_threads = _thread_lanes(source)
    deep = sum(int((lane.depth >= _MOST_DEPTH).sum()) for lane in streams + threads)
    too_deep = [f"Not shown: {counted(deep, 'slice')} nested deeper than {_MOST_DEPTH} levels."] if deep else []
    streams, threads = ([lane.where(lane.depth < _MOST_DEPTH) for lane in lanes] for lanes in (streams, threads))
    return Lanes(streams, threads, no_streams + no_threads + too_deep)


def _stream_lanes(source: TimelineSource) -> tuple[list[Lane], list[str]]:
    """Return the streams with work in the window, by GPU, the most used first, and a note on the rest."""
    gpu, inside = source.gpu, _inside(source.gpu, source.window)
    device, stream = gpu_numbers(gpu)[inside], gpu.stream[inside]
    first, of_place = distinct(device, stream)
    rows_of = {number: inside[rows] for number, rows in group_rows(of_place)}
    used = {number: int(gpu.duration_ns[rows].sum()) for number, rows in rows_of.items()}
    kind, name = work_classes(gpu, source.communication), work_names(gpu)
    products = {device.id: device.name for device in source.trace.devices}
    lanes = []
    for number in sorted(_most(used), key=lambda number: device[first[number]]):
        rows, on, at = rows_of[number], int(device[first[number]]), int(stream[first[number]])
        group = shown_name(f"GPU {on} {products.get(on, '')}".strip()) if on >= 0 else "GPU"
        lanes.append(
            _lane(group, f"stream {at}" if at >= 0 else "stream", gpu, rows, name[rows], kind[rows], rows)
        )
    return lanes, _left_out(used, "stream")


def _thread_lanes(source: TimelineSource) -> tuple[list[Lane], list[str]]:
    """Return the lanes of the threads with events in the window, the most used first, and notes on the rest."""
    trace = source.trace
    rows_of: dict[int, dict[str, Array]] = defaultdict(dict)
    tables = {
        "region": trace.regions,
        "module": trace.frames,
        "operator": trace.operators,
        "runtime": trace.runtime,
    }
    for kind, table in tables.items():
        rows = _inside(table, source.window)
        if kind == "module":
            rows = rows[table.matching("name", MODULE)[rows]]
        for thread, of_thread in group_rows(table.thread[rows]):
            rows_of[thread][kind] = rows[of_thread]
    used = {
        thread: sum(int(tables[kind].duration_ns[rows].sum()) for kind, rows in own.items())
        for thread, own in rows_of.items()
    }
    titles = _thread_titles(trace, used)
    lanes = []
    for thread in _most(used):
        for kind, rows in rows_of[thread].items():
            name, kinds = tables[kind].name[rows], np.full(len(rows), CLASSES.index(kind))
            none = np.full(len(rows), -1)
            lanes.append(_lane(titles[thread], _TITLES[kind], tables[kind], rows, name, kinds, none))
    idle = len(np.unique(np.concatenate([table.thread for table in tables.values()]))) - len(used)
    notes = [f"Not shown: {counted(idle, 'thread')} without events in the window."] if idle else []
    return lanes, _left_out(used, "thread") + notes


def _most(used: Mapping[int, int]) -> list[int]:
    """Return the keys with the largest values, the largest first."""
    return sorted(used, key=lambda key: -used[key])[:_MOST_LANES]


def _left_out(used: Mapping[int, int], word: str) -> list[str]:
    rest = len(used) - _MOST_LANES
    return [f"Not shown: the {counted(rest, f'least used {word}')}."] if rest > 0 else []


def _lane(group: str, title: str, events: Table, rows: Array, name: Array, kind: Array, work: Array) -> Lane:
    start, end = events.start_ns[rows], events.start_ns[rows] + events.duration_ns[rows]
    return Lane(group, title, start, end, name, kind.astype(np.int8), work.astype(np.int32), stacked(start, end))


def distinct(*columns: Array) -> tuple[Array, Array]:
    """Return a row with each combination of values, in ascending order, and the place of each row's combination.

    `numpy.unique` with an axis compares whole rows, which takes ten times as long.
    """
    place = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, of_value = np.unique(column, return_inverse=True)
        place = np.unique(place * len(values) + of_value, return_inverse=True)[1]
    return np.unique(place, return_index=True)[1], place


def _inside(events: Table, window: tuple[int, int]) -> Array:
    """Return the rows of the events that take time in the window."""
    duration, start = events.duration_ns, events.start_ns
    return np.flatnonzero((duration > 0) & (start < window[1]) & (start + duration > window[0]))


def _thread_titles(trace: TraceData, used: Collection[int]) -> dict[int, str]:
    """Return the title of each thread, with its process if there are several."""
    several = len({trace.threads[number].process for number in used if number >= 0}) > 1
    titles = {-1: "Unknown thread"}
    for number in used:
        if number >= 0:
            thread = trace.threads[number]
            words = thread.name if str(thread.thread) in thread.name else f"thread {thread.thread} {thread.name}"
            words = words.strip() + " (autograd)" * (thread.autograd and "autograd" not in words)
            title = f"process {thread.process}, {words}" if several else words
            titles[number] = shown_name(title[:1].upper() + title[1:])
    return titles
