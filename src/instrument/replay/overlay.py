"""Writes a copy of a torch.profiler trace with a lane that shows the critical path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..traces.insert_events import FIRST_LANE, check_copy, event_text, insert_events, microseconds, taken_lanes
from ..traces.main_threads import main_thread
from ..traces.trace import Trace
from .critical_path import CriticalPath

CATEGORY = "critical_path"
"""The category of the added events."""


def add_critical_path(trace: Trace, path: CriticalPath, out: Path) -> int:
    """Write a copy of the file of a trace with a lane for its critical path, and return the number of its parts.

    The lane belongs to the process of the loop. A copy is gzipped if ``out`` ends in ".gz"; an existing file is
    replaced once the copy is complete.

    Args:
        trace: the trace that `read_trace` returned; its file must not have changed.
        path: the critical path of the steps as they were recorded.
        out: the path of the copy.

    Raises:
        ValueError: the trace comes from another profiler, or has such a lane already; its file is missing; or
            ``out`` is the same file or cannot be replaced.
        OSError: the file cannot be read, or ``out`` cannot be written.
    """
    check_copy(trace, out, CATEGORY)
    insert_events(trace, out, _events(trace, path))
    return len(path.segments)


def _events(trace: Trace, path: CriticalPath) -> Iterator[str]:
    """Yield the events of the lane as JSON; a part ends at the latest where the next begins."""
    process, number = trace.threads[main_thread(trace)].process, FIRST_LANE
    while (process, number) in taken_lanes(trace):
        number += 1
    place = {"pid": process, "tid": number}
    since = microseconds(path.segments[0].start_ns if path.segments else 0)
    yield event_text({"ph": "M", "name": "thread_name"} | place, since, {"name": "critical path"})
    yield event_text({"ph": "M", "name": "thread_sort_index"} | place, since, {"sort_index": -1})
    following = [part.start_ns for part in path.segments[1:]]
    for part, start in zip(path.segments, [*following, None], strict=True):
        length = part.duration_ns if start is None else min(part.duration_ns, max(start - part.start_ns, 0))
        about = {"ph": "X", "cat": CATEGORY, "name": part.name or part.kind} | place
        times = f'{microseconds(part.start_ns)}, "dur": {microseconds(length)}'
        yield event_text(about, times, {"class": part.kind, "region": " > ".join(part.region)})
