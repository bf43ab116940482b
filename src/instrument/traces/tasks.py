"""Finds the region around each region of an asyncio task: tasks interleave on a thread, where time misleads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..trace_marks import TASKS
from .nest import NestedRanges
from .table import Array, Table
from .trace_data import Thread


class _Tasks(msgspec.Struct):
    """As `RecordingNotes` has them."""

    thread: int
    switches: list[tuple[str, int, int, int]]


def parents_in_tasks(
    regions: Table, metadata: Mapping[str, Any], threads: Sequence[Thread], texts: Sequence[str]
) -> Array:
    """Return the parent of each region: that in its own task or, of its outermost regions, in the task's creator.

    Args:
        regions: the regions, in order of start, with their parents by time, which those outside of tasks keep.
        metadata: that of the trace, which says where tasks changed.
        threads: the threads of the trace.
        texts: its strings.
    """
    try:
        tasks = msgspec.convert(metadata[TASKS], _Tasks)
    except (KeyError, msgspec.ValidationError):
        return regions.parent
    above = {task: creator for _, _, task, creator in tasks.switches}
    task = _tasks_of(regions, tasks, threads, texts)
    keys = np.unique(np.stack((regions.thread, task)), axis=1, return_inverse=True)
    lanes = {(int(thread), int(number)): lane for lane, (thread, number) in enumerate(keys[0].T)}
    nest = NestedRanges(regions.start_ns, regions.end_ns, keys[1].reshape(-1))
    parents = np.where(task > 0, nest.parents, regions.parent)
    rows = np.flatnonzero((task > 0) & (parents < 0))
    number = task[rows]
    while len(rows):
        number = np.array([above.get(each, 0) for each in number.tolist()], np.int64)
        lane = [lanes.get(key, -1) for key in zip(regions.thread[rows].tolist(), number.tolist(), strict=True)]
        around = np.where(np.array(lane) >= 0, nest.innermost_at(regions.start_ns[rows], np.array(lane)), -1)
        while (
            short := (around >= 0) & ((regions.end_ns[around] < regions.end_ns[rows]) | (around >= rows))
        ).any():
            around[short] = nest.parents[around[short]]
        parents[rows] = around
        more = (around < 0) & (number > 0)
        rows, number = rows[more], number[more]
    return parents


def _tasks_of(regions: Table, tasks: _Tasks, threads: Sequence[Thread], texts: Sequence[str]) -> Array:
    """Return the number of the task that opened each region; 0 for none."""
    found = np.zeros(len(regions), np.int64)
    numbers = [number for number, thread in enumerate(threads) if str(thread.thread) == str(tasks.thread)]
    rows = np.flatnonzero(np.isin(regions.thread, numbers))
    by_name: dict[str, list[int]] = {}
    for place, code in enumerate(regions.name[rows].tolist()):
        by_name.setdefault(texts[code], []).append(place)
    starts = {
        by_name[name][before]: task
        for name, before, task, _ in tasks.switches
        if before < len(by_name.get(name, ()))
    }
    places = np.array(sorted(starts), np.int64)
    last = np.searchsorted(places, np.arange(len(rows)), "right") - 1
    task = np.array([starts[place] for place in places.tolist()] or [0], np.int64)
    found[rows] = np.where(last >= 0, task[last], 0)
    return found
