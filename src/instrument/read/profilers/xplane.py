"""Reads XPlane (``.xplane.pb``), the first output of JAX's and TensorFlow's profiler: hosts, GPUs and TPUs.

The schema: tsl/profiler/protobuf/xplane.proto. An event has the number of its name, which its plane lists, and a
start in picoseconds after that of its line, which is a thread of the program or a stream of a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..kineto.kineto import sort_events, unread_devices
from ..kineto.text import event_limit, text_limit
from ..tables.lanes import map_unique
from ..tables.links import assemble
from ..tables.table import Array, Interner, Strings, Tables, TooLargeError, join_parts
from ..tables.trace import ReadLosses, Thread, Trace
from .protobuf_messages import PADDING, Schema, fields, parse, text_of

_SCHEMA: Schema = {
    "XSpace": {"planes": (1, "XPlane*")},
    "XPlane": {
        "name": (2, "bytes"),
        "lines": (3, "XLine*"),
        "event_names": (4, "EventName*"),
        "stat_names": (5, "StatName*"),
        "stats": (6, "XStat*"),
    },
    "XLine": {
        "id": (1, "int64"),
        "name": (2, "bytes"),
        "timestamp_ns": (3, "int64"),
        "events": (4, "bytes*"),
        "display_name": (11, "bytes"),
    },
    "XStat": {"metadata_id": (1, "int64"), "uint64": (3, "uint64"), "int64": (4, "int64")},
    "EventName": {"key": (1, "int64"), "value": (2, "Name")},
    "StatName": {"key": (1, "int64"), "value": (2, "Name")},
    "Name": {"name": (2, "bytes"), "display_name": (4, "bytes")},
}
_STATS = {b"step_num": "number", b"correlation_id": "correlation"}
_COLUMNS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("start_ns", "duration_ns", "name"), ("i8", 0)),
    **dict.fromkeys(("thread", "number", "correlation"), ("i8", -1)),
}
_AT_ONCE = 1 << 15  # events, whose columns a cache of the CPU holds
_SINCE_1970 = 1 << 56  # ns; times of lines below count from the start of the recording
_KIND, _OFFSET, _DURATION, _STATS_OF_EVENT = 1, 2, 3, 4  # the fields of XEvent, of which a file has millions


def read_xplane(path: Path) -> Trace:
    """Read a file of one host: the tables are those of the ``.trace.json.gz`` beside it, with all events.

    Raises:
        TraceError: protobuf is not installed, or the file is damaged.
        TooLargeError: the file holds more than a trace of its size can.
        OSError: the file cannot be opened.
    """
    planes = list(parse(path, _SCHEMA, "XSpace", path.read_bytes()).planes)
    strings, threads, limit = Strings(text_limit(path)), Interner[Thread](), event_limit(path)
    parts: list[dict[str, Array]] = []
    count = 0
    for plane, line, names, wanted in _lines(planes, strings):
        thread = threads[Thread(text_of(plane.name), line.id, text_of(line.display_name or line.name))]
        for first in range(0, len(line.events), _AT_ONCE):
            part = _columns(line.events[first : first + _AT_ONCE], wanted)
            part["start_ns"] += line.timestamp_ns
            part["name"] = map_unique(part["name"], partial(_or_empty, names))
            parts.append(part | {"thread": np.full(len(part["name"]), thread)})
            count += len(part["name"])
        if count > limit:
            raise TooLargeError(f"it holds more than {limit:,} events, too many for its size")
    begin = min((line.timestamp_ns for plane in planes for line in plane.lines if line.events), default=0)
    epoch_ns = begin if begin > _SINCE_1970 else max(_said(planes, b"profile_start_time"), 0)
    processes = {thread.process: str(thread.process) for thread in threads}
    columns: Tables = {}
    if count:
        unknown = {name: np.full(count, -1) for name in _STATS.values()}
        others = unknown | join_parts(_COLUMNS, parts) | {"event": np.arange(count)}
        others["start_ns"] -= begin if begin > _SINCE_1970 else 0
        columns["others"] = others | {"category": np.zeros(count, np.int64)}
        sort_events(columns, strings, list(threads), processes)
    trace = assemble(
        path,
        "xplane",
        columns,
        strings,
        list(threads),
        devices=[],
        metadata={},
        lost=ReadLosses(),
        epoch_ns=epoch_ns,
    )
    if not trace.gpu:
        trace.unread_devices = unread_devices(trace, processes)
    return trace


def _lines(planes: list[Any], strings: Strings) -> Iterator[tuple[Any, Any, dict[int, int], dict[int, str]]]:
    """Yield each plane and line, the strings of the names of its events, and the columns of its stats."""
    for plane in planes:
        names = {
            each.key: strings[text_of(each.value.display_name or each.value.name)] for each in plane.event_names
        }
        wanted = {each.key: _STATS[name] for each in plane.stat_names if (name := each.value.name) in _STATS}
        for line in plane.lines:
            yield plane, line, names, wanted


def _or_empty(names: Mapping[int, int], kind: int) -> int:
    return names.get(kind, 0)


def _columns(events: list[bytes], wanted: Mapping[int, str]) -> dict[str, Array]:
    """Return the columns of events: starts without that of their line, as names the numbers in the file.

    Args:
        events: messages XEvent.
        wanted: the column of each stat that has one, by the number of its name.
    """
    ends = np.cumsum(np.fromiter(map(len, events), np.int64, len(events)))
    data = np.frombuffer(b"".join([*events, PADDING]), np.uint8)
    kinds, offset, duration = np.zeros((3, len(ends)), np.int64)
    stats = {column: np.full(len(ends), -1) for column in wanted.values()}
    for rows, number, value, size in fields(data, np.append(0, ends[:-1]), ends):
        for column, which in ((kinds, _KIND), (offset, _OFFSET), (duration, _DURATION)):
            chosen = number == which
            column[rows[chosen]] = value[chosen]
        if wanted and (chosen := number == _STATS_OF_EVENT).any():
            key, said = _stats(data, value[chosen], value[chosen] + size[chosen])
            for own, name in wanted.items():
                stats[name][rows[chosen][key == own]] = said[key == own]
    start, end = offset // 1000, (offset + duration) // 1000
    return {"start_ns": start, "duration_ns": np.maximum(end - start, 0), "name": kinds} | stats


def _stats(data: Array, begins: Array, ends: Array) -> tuple[Array, Array]:
    """Return for each stat the number of its name, and its value, which is -1 if it is not an integer."""
    key, said = np.zeros(len(begins), np.int64), np.full(len(begins), -1)
    for rows, number, value, _ in fields(data, begins, ends):
        for column, which in ((key, number == 1), (said, (number == 3) | (number == 4))):
            column[rows[which]] = value[which]
    return key, said


def _said(planes: list[Any], name: bytes) -> int:
    """Return a number that a plane says of the recording, or -1."""
    values = (
        stat.int64 or stat.uint64
        for plane in planes
        for each in plane.stat_names
        if each.value.name == name
        for stat in plane.stats
        if stat.metadata_id == each.key
    )
    return next(values, -1)
