"""Moves events that overlap others on their thread without being nested to lanes, as viewers drop them."""

from __future__ import annotations

import numpy as np

from ..traces.lanes import group_rows
from ..traces.table import Array

_MAX_LANES = 8  # of a thread; what overlaps more stays


def lanes_without_overlaps(thread: Array, start_ns: Array, end_ns: Array, frame: Array) -> Array:
    """Return the lane of each event: 0 for its own thread, else 1 to 8.

    torch.profiler records `ProfilerStep#N` from within a Python function that ends soon after; Perfetto then drops
    the step. Of two events that overlap, the Python function moves, else the one that begins later.

    Args:
        thread: the number of the thread of each event.
        start_ns: the start.
        end_ns: the end.
        frame: whether it is a Python function.
    """
    lanes = np.zeros(len(thread), np.int64)
    for _, rows in group_rows(thread):
        rows = rows[np.lexsort((-end_ns[rows], start_ns[rows]))]
        if np.all(start_ns[rows][1:] >= np.maximum.accumulate(end_ns[rows])[:-1]):
            continue  # one after the other
        for lane in range(_MAX_LANES):
            moved = _overlapping(start_ns[rows].tolist(), end_ns[rows].tolist(), frame[rows].tolist())
            if not moved:
                break
            rows = rows[moved]
            lanes[rows] = lane + 1
    return lanes


def _overlapping(starts: list[int], ends: list[int], frames: list[bool]) -> list[int]:
    """Return the places of the events to move, so that the others nest; they are in order of their start."""
    moved, open_ = [], list[int]()
    for place, (start, end, frame) in enumerate(zip(starts, ends, frames, strict=True)):
        while open_ and ends[open_[-1]] <= start:
            open_.pop()
        while open_ and end > ends[open_[-1]] and frames[open_[-1]] and not frame:
            moved.append(open_.pop())
        if open_ and end > ends[open_[-1]]:
            moved.append(place)
        else:
            open_.append(place)
    return sorted(moved)
