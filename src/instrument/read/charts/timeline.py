"""The timeline of a trace: its steps, and what the GPUs and the threads did meanwhile.

Zoom levels reduce the slices, so that a page shows a million of them with little data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...base.printable import shown_name
from ...base.units import counted, duration
from ..tables.intervals import merge_overlaps
from ..tables.lanes import distinct, group_rows
from ..tables.table import Array, Table, linked
from ..tables.trace import MODULE, MODULE_PREFIX, Trace
from ..tables.work_classes import gpu_numbers, work_classes, work_names

_CELLS = 2000  # of the coarsest level: about one for each pixel of a screen
_CELL = 4  # resolutions: the slices of a merged one begin within this time
_FINER = 4  # factor of the resolution from level to level


class Slices(NamedTuple):
    """Slices in rows; those of a row are in order of start and do not overlap.

    Attributes:
        row: the row of each slice, in ascending order.
        start_ns: its start.
        end_ns: its end, later than its start.
        kind: the number of its class.
    """

    row: Array
    start_ns: Array
    end_ns: Array
    kind: Array


class Merged(NamedTuple):
    """Runs of slices that a level shows as one.

    Attributes:
        row: the row of each run.
        start_ns: the start of its first slice.
        end_ns: the end of its last.
        slices: its number of slices.
        covered_ns: the sum of their lengths.
        kind: the class with the largest part of this sum.
    """

    row: Array
    start_ns: Array
    end_ns: Array
    slices: Array
    covered_ns: Array
    kind: Array


class Level(NamedTuple):
    """What a zoom level adds to those above it, whose single slices it shows as well.

    Attributes:
        resolution_ns: slices at least as long are shown one by one.
        single: the numbers of the slices that this level is the first to show one by one.
        merged: the others, which replace the merged slices of the level above.
    """

    resolution_ns: int
    single: Array
    merged: Merged

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self.single) + len(self.merged.row)


class Zoom(NamedTuple):
    """Zoom levels, the coarsest first.

    Attributes:
        levels: the levels.
        whole: how many of them cover the whole window; the others cover the detailed parts.
        detailed: the parts of the window with more levels.
    """

    levels: list[Level]
    whole: int
    detailed: list[tuple[int, int]]


def stacked(start_ns: Array, end_ns: Array) -> Array:
    """Return a depth for each slice of a lane, so that those of one depth do not overlap.

    Nested slices lie below those around them. If some overlap without being nested, each slice of the lane takes
    the first depth that is free.

    Args:
        start_ns: the starts, ascending; of equal starts, the longest slice first.
        end_ns: the ends, each later than its start.
    """
    depth = np.arange(len(start_ns)) - np.searchsorted(np.sort(end_ns), start_ns, "right")
    order = np.lexsort((start_ns, depth))
    one, next_ = order[:-1], order[1:]
    if ((depth[one] == depth[next_]) & (start_ns[next_] < end_ns[one])).any():
        return np.array(_first_free(start_ns.tolist(), end_ns.tolist()), np.int64)
    return depth


def _first_free(starts: list[int], ends: list[int]) -> list[int]:
    taken: list[tuple[int, int]] = []  # heap of ends and depths
    free: list[int] = []  # heap of depths
    depths = []
    for start, end in zip(starts, ends, strict=True):
        while taken and taken[0][0] <= start:
            heappush(free, heappop(taken)[1])
        depths.append(heappop(free) if free else len(taken))
        heappush(taken, (end, depths[-1]))
    return depths


def zoom_levels(slices: Slices, window: tuple[int, int], detailed: Sequence[tuple[int, int]], most: int) -> Zoom:
    """Return the zoom levels of a timeline.

    Args:
        slices: all slices.
        window: the time that the coarsest level shows.
        detailed: parts of the window, none or disjoint, that get finer levels than the rest: half of ``most`` is
            theirs, unless that is enough for all slices.
        most: how many slices all levels may have together; at least a few for each row.
    """
    part = np.full(len(slices.row), -1, np.int8)
    for number, (start, end) in enumerate(detailed):
        part[(slices.start_ns >= start) & (slices.start_ns < end)] = number
    halved = len(detailed) > 0 and 2 * len(slices.row) > most
    levels: list[Level] = []
    left = _add_levels(levels, slices, part, np.arange(len(slices.row)), window, most // 2 if halved else most)
    whole = len(levels)
    if halved:
        _add_levels(levels, slices, part, left[part[left] >= 0], window, most)
    return Zoom(levels, whole, list(detailed) if len(levels) > whole else [])


def _add_levels(
    levels: list[Level], slices: Slices, part: Array, left: Array, window: tuple[int, int], most: int
) -> Array:
    """Add levels of the slices ``left`` as long as all levels together have at most ``most`` slices.

    Returns:
        The slices that no level shows one by one.
    """
    span = window[1] - window[0]
    resolution = levels[-1].resolution_ns // _FINER if levels else max(span // _CELLS, 1)
    used = sum(map(len, levels))
    while len(left):
        level, rest = _level(slices, part, left, resolution, window[0])
        if used + len(level) > most:
            if levels or resolution > span:
                break
            resolution *= _FINER
            continue
        levels.append(level)
        left, used, resolution = rest, used + len(level), resolution // _FINER
    return left


def _level(slices: Slices, part: Array, left: Array, resolution: int, low: int) -> tuple[Level, Array]:
    """Return a level, and which of the slices that were left it merges."""
    short = (slices.end_ns[left] - slices.start_ns[left]) < resolution
    some = left[short]
    row, start, end = slices.row[some], slices.start_ns[some], slices.end_ns[some]
    new = np.zeros(len(some), bool)
    new[:1] = True
    # A run also ends at a slice that is shown by itself: the numbers of its neighbors are not adjacent.
    for key in (some - np.arange(len(some)), row, (start - low) // max(_CELL * resolution, 1), part[some]):
        new[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(new)
    counts = np.diff(first, append=len(some))
    alone = np.repeat(counts == 1, counts)
    several = counts > 1
    begin, last = first[several], (first + counts - 1)[several]
    covered, kind = _covered(end - start, slices.kind[some], first, several)
    merged = Merged(row[begin], start[begin], end[last], counts[several], covered, kind)
    single = np.sort(np.concatenate((left[~short], some[alone])))
    return Level(resolution, single, merged), some[~alone]


def _covered(length: Array, kind: Array, first: Array, several: Array) -> tuple[Array, Array]:
    """Return the sum of the lengths of each run of several slices, and the class with most of it."""
    most, of, total = (np.zeros(int(several.sum()), np.int64) for _ in range(3))
    for each in np.unique(kind).tolist():
        covered = np.add.reduceat(np.where(kind == each, length, 0), first)[several]
        of[covered > most] = each
        most, total = np.maximum(most, covered), total + covered
    return total, of


def packed(slices: Slices, zoom: Zoom, low_ns: int, **columns: Array) -> list[dict[str, Any]]:
    """Return the levels as columns of small integers, which compress well.

    A level has the number of slices of each row (``rows``) and, one after the other, their gap since the end of
    the slice before them (of the first in a row, since ``low_ns``) and their length; of single slices also
    ``columns``, of merged ones the rest of `Merged`. The columns are JSON, since lists take ten times the memory.

    Args:
        slices: all slices.
        zoom: the levels.
        low_ns: the time that the page counts from.
        **columns: more columns of `slices`.
    """
    rows = int(slices.row.max(initial=-1)) + 1

    def level_of(resolution: int, single: Array, merged: Merged) -> dict[str, Any]:
        own = slices.row[single], slices.start_ns[single], slices.end_ns[single]
        added = {name: column[single] for name, column in columns.items()}
        counts = {"slices": merged.slices, "covered": merged.covered_ns, "kind": merged.kind}
        return {
            "resolution_ns": resolution,
            "single": _as_json(_times(*own, rows, low_ns) | added),
            "merged": _as_json(_times(merged.row, merged.start_ns, merged.end_ns, rows, low_ns) | counts),
        }

    return [level_of(*level) for level in zoom.levels]


def _times(row: Array, start: Array, end: Array, rows: int, low: int) -> dict[str, Array]:
    before = np.full(len(row), low)
    before[1:] = np.where(row[1:] == row[:-1], end[:-1], low)
    return {"rows": np.bincount(row, minlength=rows), "gap": start - before, "length": end - start}


def _as_json(columns: dict[str, Array]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(column.tolist())) for name, column in columns.items()}


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
        gpu: the GPU work to show: rows of `Trace.gpu`.
        communication: a mask of the rows of ``gpu`` that communicate.
        window: the time to show, in ns on the clock of the trace.
        origin_ns: the time that the page counts from.
        causes: the names of idle time, which follow the strings of the trace, each with a sentence on it.
    """

    trace: Trace
    gpu: Table
    communication: Array
    window: tuple[int, int]
    origin_ns: int
    causes: Mapping[str, str] = MappingProxyType({})


def lanes_of(source: TimelineSource) -> tuple[list[Lane], list[Lane], list[str]]:
    """Return the lanes of streams, by GPU, and of threads, the most used first, and notes on what is left out."""
    streams, no_streams = _stream_lanes(source)
    threads, no_threads = _thread_lanes(source)
    deep = sum(int((lane.depth >= _MOST_DEPTH).sum()) for lane in streams + threads)
    too_deep = [f"Not shown: {counted(deep, 'slice')} nested deeper than {_MOST_DEPTH} levels."] if deep else []
    streams, threads = ([lane.where(lane.depth < _MOST_DEPTH) for lane in lanes] for lanes in (streams, threads))
    return streams, threads, no_streams + no_threads + too_deep


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
    tables = dict(zip(_TITLES, (trace.regions, trace.frames, trace.operators, trace.runtime), strict=True))
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


def _inside(events: Table, window: tuple[int, int]) -> Array:
    """Return the rows of the events that take time in the window."""
    duration, start = events.duration_ns, events.start_ns
    return np.flatnonzero((duration > 0) & (start < window[1]) & (start + duration > window[0]))


def _thread_titles(trace: Trace, used: Collection[int]) -> dict[int, str]:
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


def _texts(
    source: TimelineSource, name: Array, work: Array, used: Array
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the texts of the slices that are shown one by one, and two columns of all slices.

    The texts are ``texts``, of which the first is empty; ``launches``, what launched GPU work, and its own name
    (``work``), as places in ``texts``; and ``causes``, for each cause of idle time in ``texts``, its place there
    and a sentence that explains it. The columns are ``name``, a place in ``texts`` and 0 if it is not needed, and
    ``about``, a place in the columns of ``launches`` and 0 for none.

    Args:
        source: what the timeline is made of.
        name: the name of each slice, as in `Lane`.
        work: its GPU work, as in `Lane`.
        used: the slices whose texts are needed.
    """
    rows, of_row = np.unique(work[used], return_inverse=True)
    columns = {key: np.append(0, column[rows]) for key, column in _launches(source).items()}
    numbers = np.unique(np.concatenate((name[used], *columns.values())))
    places = {key: np.searchsorted(numbers, column) for key, column in columns.items()}
    first, place = distinct(*places.values())
    of_slices = {"name": np.zeros(len(name), np.int64), "about": np.zeros(len(name), np.int64)}
    of_slices["name"][used] = np.searchsorted(numbers, name[used])
    of_slices["about"][used] = place[1:][of_row]
    strings, sentences = len(source.trace.strings), list(source.causes.values())
    texts = {
        "texts": [text_of(source, number) for number in numbers.tolist()],
        "launches": {key: column[first].tolist() for key, column in places.items()},
        "causes": [
            (place, sentences[number - strings])
            for place, number in enumerate(numbers.tolist())
            if number >= strings
        ],
    }
    return texts, of_slices


def text_of(source: TimelineSource, number: int) -> str:
    """Return a text by its number in the strings of the trace, which the causes of idle time follow."""
    strings = source.trace.strings
    if number >= len(strings):
        return list(source.causes)[number - len(strings)]
    return shown_name(strings[number].removeprefix(MODULE_PREFIX))


def _launches(source: TimelineSource) -> dict[str, Array]:
    """Return for each row of `TimelineSource.gpu`, and then for none, the numbers of the names of its launch."""
    gpu, trace = source.gpu, source.trace
    names = {
        "work": work_names(gpu),
        "call": linked(trace.runtime.name, gpu.launch, 0),
        "operator": linked(trace.operators.name, gpu.operator, 0),
        "region": linked(trace.regions.name, gpu.region, 0),
        "module": linked(trace.frames.name, gpu.module, 0),
    }
    return {key: np.append(codes, 0) for key, codes in names.items()}


_MOST_SLICES = 200_000
_FEW_STEPS = 2  # up to so many, all have the same detail
_LONGEST = 5  # of each lane


def timeline_of(source: TimelineSource, lanes: list[Lane], notes: Sequence[str]) -> dict[str, Any] | None:
    """Return the section of a page; None without lanes.

    Times are in ns from the origin. The levels are those of `packed`. The ``name`` of a slice is its
    place in ``texts`` times the number of classes, plus its place in ``classes``; its ``about`` is a place in the
    columns of ``launches``. The parts of the steps and the gaps of the GPUs are left empty.

    Args:
        source: what the timeline is made of.
        lanes: the lanes, those of a group one after the other.
        notes: sentences on what is left out.
    """
    if not lanes:
        return None
    trace, window, low = source.trace, source.window, source.origin_ns
    rows = rows_of_steps(trace)
    steps = trace.steps.where(rows)
    detailed = _detailed(steps)
    slices, name, work = _joined(lanes)
    zoom = zoom_levels(slices, window, _spans(source, rows[detailed]), _MOST_SLICES)
    single = np.concatenate([level.single for level in zoom.levels])
    texts, of_slices = _texts(source, name, work, single)
    of_slices["name"] = of_slices["name"] * len(CLASSES) + slices.kind
    times = steps.number, steps.start_ns - low, steps.duration_ns
    return {
        "id": "timeline",
        "type": "timeline",
        "title": "Timeline",
        "start_ns": window[0] - low,
        "end_ns": window[1] - low,
        "classes": CLASSES,
        "groups": [
            {"title": title, "lanes": [[lane.title, lane.rows] for lane in group]}
            for title, group in groupby(lanes, key=lambda lane: lane.group)
        ],
        "whole": zoom.whole,
        "detailed": [[start - low, end - low] for start, end in zoom.detailed],
        "levels": packed(slices, zoom, low, **of_slices),
        **texts,
        "steps": [[*row, *[None] * 4] for row in zip(*(column.tolist() for column in times), strict=True)],
        "gaps": [],
        "longest": [row for lane in lanes for row in _longest_rows(source, lane)],
        "notes": [*_hidden(zoom, steps.number[detailed].tolist()), *notes],
    }


def _joined(lanes: list[Lane]) -> tuple[Slices, Array, Array]:
    """Return the slices of all lanes, in one row for each depth of a lane, with their names and work."""
    above = np.cumsum([0, *(lane.rows for lane in lanes)]).tolist()
    row = np.concatenate([lane.depth + first for lane, first in zip(lanes, above, strict=False)])
    order = np.argsort(row, kind="stable")
    joined = (np.concatenate(columns)[order] for columns in zip(*(lane.columns for lane in lanes), strict=True))
    start, end, name, kind, work, _ = joined
    return Slices(row[order], start, end, kind), name, work


def rows_of_steps(trace: Trace) -> Array:
    """Return the rows of the steps of the thread that ran most of them."""
    thread = trace.steps.thread
    threads, counts = np.unique(thread, return_counts=True)
    return np.flatnonzero(thread == threads[np.argmax(counts)]) if len(threads) else np.empty(0, np.int64)


def _detailed(steps: Table) -> list[int]:
    """Return the step whose length is closest to the median, and the longest; none if there are few."""
    if len(steps) <= _FEW_STEPS:
        return []
    length = steps.duration_ns
    typical = int(np.argmin(np.abs(length - np.median(length))))
    return sorted({typical, int(np.argmax(length))})


def _spans(source: TimelineSource, rows: Array) -> list[tuple[int, int]]:
    """Return the times of these steps, each up to the end of the work that it launched."""
    gpu, steps, spans = source.gpu, source.trace.steps, []
    for row in rows.tolist():
        done = int(gpu.end_ns[gpu.step == row].max(initial=steps.end_ns[row]))
        spans.append((int(steps.start_ns[row]), done))
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    return [*zip(*(side.tolist() for side in merge_overlaps(starts, ends)), strict=True)]


def _longest_rows(source: TimelineSource, lane: Lane) -> list[list[Any]]:
    """Return the name, the lane, the length and the start of the longest slices of a lane."""
    length = lane.end_ns - lane.start_ns
    return [
        [
            text_of(source, int(lane.name[row])),
            f"{lane.group}, {lane.title}",
            int(length[row]),
            int(lane.start_ns[row]) - source.origin_ns,
        ]
        for row in np.argsort(-length, kind="stable")[:_LONGEST].tolist()
    ]


def _hidden(zoom: Zoom, detailed: list[int]) -> list[str]:
    """Return a sentence on the slices that no level shows one by one, if there are any."""
    rest = zoom.levels[zoom.whole - 1]
    if not len(rest.merged.row):
        return []
    whole = f"Slices shorter than {duration(rest.resolution_ns)} are shown merged"
    if zoom.detailed:
        numbers = " and ".join(map(str, detailed))
        whole += f" outside of {'step' if len(detailed) == 1 else 'steps'} {numbers}"
        finest = zoom.levels[-1]
        if len(finest.merged.row):
            whole += f", and those shorter than {duration(finest.resolution_ns)} everywhere"
    return [f"{whole}: open the trace in Perfetto to see each."]
