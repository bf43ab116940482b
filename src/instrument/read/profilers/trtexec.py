"""Reads the times of queries that TensorRT's ``trtexec --exportTimes`` writes, in ms of one clock.

The rows become events of torch's JSON, and its reader makes the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...base.errors import TraceError
from ...base.trace_marks import STEP_PREFIX
from ..kineto.kineto import read_kineto_ranks
from ..kineto.text import read_json
from ..tables.trace import Trace

# category, name and stream, and how the keys of its start and its end go on; "In" and "Out" in TensorRT 7
_PARTS = (
    ("cuda_runtime", "enqueue", 0, ("EnqMs",)),
    ("gpu_memcpy", "Memcpy HtoD", 1, ("H2dMs", "InMs")),
    ("kernel", "inference", 2, ("ComputeMs",)),
    ("gpu_memcpy", "Memcpy DtoH", 3, ("D2hMs", "OutMs")),
)
_MOST_MS = 1e12


def read_trtexec_times(path: Path) -> Trace:
    """Read a file: each query is a step, with the call that enqueues it, its copies and its work.

    Raises:
        TraceError: the file is damaged, or has no query with times.
        TooLargeError: the file holds more than a trace of its size can.
        OSError: the file cannot be opened.
    """
    rows = read_json(path)
    if rows is None:
        raise TraceError(path, "it is cut off or damaged")
    events = list(_events([row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []))
    if not events:
        raise TraceError(path, "it has no query with times")
    (trace,) = read_kineto_ranks(path, texts=iter([b'{"traceEvents": ', msgspec.json.encode(events), b"}"]))
    trace.format, trace.look_up = "trtexec", None  # which looks for events in the file
    return trace


def _events(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the parts of each query, and the steps: each lasts until the next one, the last to its end."""
    steps = []
    for number, row in enumerate(rows, 1):
        start, end = math.inf, 0.0
        for category, name, stream, keys in _PARTS:
            times = next((times for key in keys if (times := _times(row, key))), None)
            if times is None:
                continue
            where = {"device": 0, "stream": stream} if stream else {}
            args = {"correlation": number} | where
            place = {"pid": 0, "tid": stream} if stream else {"pid": 1, "tid": 1}
            yield {"ph": "X", "cat": category, "name": name, "args": args} | place | times
            start, end = min(start, times["ts"]), max(end, times["ts"] + times["dur"])
        if end:
            steps.append((start, end))
    steps.sort()
    for number, (start, end) in enumerate(steps):
        until = steps[number + 1][0] if number + 1 < len(steps) else end
        step = {"ts": start, "dur": until - start, "pid": 1, "tid": 1}
        yield {"ph": "X", "cat": "user_annotation", "name": f"{STEP_PREFIX}{number}"} | step


def _times(row: dict[str, Any], key: str) -> dict[str, float] | None:
    """Return start and duration in us; None without them, or if nothing was done, as with --noDataTransfers."""
    match row.get(f"start{key}"), row.get(f"end{key}"):
        case int() | float() as start, int() | float() as end if 0 <= start < end < _MOST_MS:
            return {"ts": start * 1000.0, "dur": (end - start) * 1000.0}
    return None
