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
    strings, threads, columns = Strings(text_limit(path)), Interner[Thread](), Tables()
    events, epoch_ns = _events(path, strings, threads)
    processes = {thread.process: str(thread.process) for thread in threads}
    if count := len(events["start_ns"]):
        columns["others"] = events | {"event": np.arange(count), "category": np.zeros(count, np.int64)}
        del events  # sorting them takes most of the memory
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


def _events(path: Path, strings: Strings, threads: Interner[Thread]) -> tuple[dict[str, Array], int]:
    """Return the columns of all events, and the time since 1970 that theirs count from, or 0.

    Args:
        path: the file.
        strings: the numbers of names; those of events are added.
        threads: the numbers of threads; the lines are added.
    """
    planes = list(parse(path, _SCHEMA, "XSpace", path.read_bytes()).planes)
    parts: list[dict[str, Array]] = [dict.fromkeys(_COLUMNS, np.empty(0, np.int64))]
    count, limit = 0, event_limit(path)
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
    events = join_parts(_COLUMNS, parts)
    begin = min((line.timestamp_ns for plane in planes for line in plane.lines if line.events), default=0)
    if begin <= _SINCE_1970:
        return events, max(_said(planes, b"profile_start_time"), 0)
    events["start_ns"] -= begin
    return events, begin


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
    kinds, offset, duration = columns = np.zeros((3, len(ends)), np.int64)
    stats = {column: np.full(len(ends), -1) for column in wanted.values()}
    for rows, number, value, size in fields(data, np.append(0, ends[:-1]), ends):
        if number in (_KIND, _OFFSET, _DURATION):
            columns[number - 1][rows] = value
        elif number == _STATS_OF_EVENT and wanted:
            key, said = _stats(data, value, value + size)
            for own, name in wanted.items():
                chosen = key == own
                stats[name][rows[chosen]] = said[chosen]
    start, end = offset // 1000, (offset + duration) // 1000
    return {"start_ns": start, "duration_ns": np.maximum(end - start, 0), "name": kinds} | stats


def _stats(data: Array, begins: Array, ends: Array) -> tuple[Array, Array]:
    """Return for each stat the number of its name, and its value, which is -1 if it is not an integer."""
    key, said = np.zeros(len(begins), np.int64), np.full(len(begins), -1)
    for rows, number, value, _ in fields(data, begins, ends):
        if number == 1:
            key[rows] = value
        elif number in (3, 4):
            said[rows] = value
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
