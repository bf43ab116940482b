"""The timeline of a trace: its steps, and what the GPUs and the threads did meanwhile, by zoom level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ..page.lanes import Slices, Zoom, packed, zoom_levels
from ..units import duration
from .intervals import merge_overlaps
from .table import Array, Table
from .timeline_lanes import CLASSES, Lane, TimelineSource
from .timeline_texts import TimelineTexts, text_of
from .trace_data import TraceData

_MOST_SLICES = 200_000
_FEW_STEPS = 2  # up to so many, all have the same detail
_LONGEST = 5  # of each lane


def timeline_of(source: TimelineSource, lanes: list[Lane], notes: Sequence[str]) -> dict[str, Any] | None:
    """Return the section of a page; None without lanes.

    Times are in ns from the origin. The levels are those of `instrument.page.lanes.packed`. The ``name`` of a
    slice is its place in ``texts`` times the number of classes, plus its place in ``classes``; its ``about`` is a
    place in the columns of ``launches``. The parts of the steps and the gaps of the GPUs are left empty.

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
    texts = TimelineTexts(source, name, work, single)
    levels = packed(slices, zoom, low, name=texts.name * len(CLASSES) + slices.kind, about=texts.about)
    return {
        "id": "timeline",
        "type": "timeline",
        "title": "Timeline",
        "start_ns": window[0] - low,
        "end_ns": window[1] - low,
        "classes": CLASSES,
        "groups": _groups(lanes),
        "whole": zoom.whole,
        "detailed": [[start - low, end - low] for start, end in zoom.detailed],
        "levels": levels,
        "texts": texts.texts,
        "launches": texts.launches,
        "causes": texts.causes,
        "steps": _step_rows(steps, low),
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


def _groups(lanes: list[Lane]) -> list[dict[str, Any]]:
    """Return the groups with their lanes, each with its number of rows."""
    return [
        {"title": title, "lanes": [[lane.title, lane.rows] for lane in group]}
        for title, group in groupby(lanes, key=lambda lane: lane.group)
    ]


def rows_of_steps(trace: TraceData) -> Array:
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


def _step_rows(steps: Table, low: int) -> list[list[int | None]]:
    """Return the number, start and length of each step, and None for each part of it."""
    times = (steps.number, steps.start_ns - low, steps.duration_ns)
    return [[*row, *[None] * 4] for row in zip(*(column.tolist() for column in times), strict=True)]


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
