"""Writes what stays as a trace of torch.profiler: its events, in an order that compresses, its metadata."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw, Struct

from ...base.trace_marks import COMMAND, CORES, DETAIL, MACHINE, OPENED_BY, SAMPLES, SLIM, STEPS
from ...read.kineto.chunks import EventIndex
from ...read.kineto.insert_events import microseconds
from ...read.tables.lanes import group_rows
from ...read.tables.notes import about_ranks, note_losses, note_of
from ...read.tables.table import Array, Interner
from ...read.tables.trace import Trace
from .choice import ALL_ARGS, EVENT_IDS, EXTERNAL, FLOW_IN, FLOW_OUT, MEMORY_ARGS, Keys, Part
from .names import LaneNames, Names, Place, json_object

_METADATA = (
    *("baseTimeNanoseconds", "deviceProperties", "distributedInfo"),
    *("record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"),
    *("cuda_runtime_version", "cuda_driver_version", "CudaDriverVersion", "hip_runtime_version"),
    *(STEPS, DETAIL, OPENED_BY, MACHINE, SLIM, CORES, COMMAND, SAMPLES),
)
_DEVICE = ("id", "name", "numSms", "maxThreadsPerMultiprocessor", "totalGlobalMem")


def index_of(trace: Trace) -> EventIndex:
    """Return where the events of a trace are in its file.

    Raises:
        ValueError: the trace comes from another profiler, or is a merged one.
    """
    if about_ranks(trace.metadata):
        raise ValueError(f'"trace" must be the trace of one rank, not a merged one: {trace.path}')
    if trace.format != "kineto" or not isinstance(trace.look_up, EventIndex):
        raise ValueError(
            f'"trace" must be a trace of torch.profiler (.json, .json.gz), not of {trace.format}: {trace.path}'
        )
    return trace.look_up


def trace_bytes(
    trace: Trace,
    parts: Mapping[str, Part],
    names: Names,
    *,
    renumber: bool,
    packed: bool,
    steps: Mapping[str, int] | None = None,
) -> Iterator[bytes]:
    """Return the content of a new file in parts.

    Args:
        trace: the trace.
        parts: the events that stay, by table.
        names: which names are written.
        renumber: whether correlation ids get small numbers.
        packed: whether the content is gzip.
        steps: what the note says of the steps, if only some stay.

    Raises:
        OSError: the file of the trace cannot be read.
    """
    lanes = LaneNames(trace.threads, names)
    texts = EventTexts(index_of(trace), parts, lanes, names, renumber=renumber)
    about = json_text(names.metadata(_metadata(trace, lanes, steps)))
    document = _document(about[1:-1], chain(map(json_text, lanes.events()), texts))
    return _packed(document) if packed else map(str.encode, document)


def _document(about: str, events: Iterable[str]) -> Iterator[str]:
    yield f'{{{about},"traceEvents":['
    separator = "\n"
    for event in events:
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _packed(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield gzip; Z_FILTERED, which prefers single digits to short matches, saves 8 %."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31, 8, zlib.Z_FILTERED)
    for text in texts:
        yield packer.compress(text.encode())
    yield packer.flush()


def _metadata(trace: Trace, lanes: LaneNames, steps: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the metadata that stays: what is read, with a note on the file that the slim trace is made from."""
    kept = {name: trace.metadata[name] for name in _METADATA if name in trace.metadata}
    if isinstance(devices := kept.get("deviceProperties"), list):
        kept["deviceProperties"] = [
            {name: each[name] for name in _DEVICE if isinstance(each, dict) and name in each} for each in devices
        ]
    if trace.steps and not trace.steps_from:  # the reader drops a last step in which nothing begins
        kept.setdefault(STEPS, f"{trace.steps.number.min()}-{trace.steps.number.max()}")
    note: dict[str, Any] = {"events": index_of(trace).events} | dict(note_of(trace.metadata))
    before = note.get("lanes")
    more = {
        "lost": note_losses(trace.lost) if trace.lost else None,
        "lanes": [*(before if isinstance(before, list) else []), *lanes.lanes],
        "steps": steps,
    }
    return kept | {SLIM: note | {name: value for name, value in more.items() if value}}


_VARYING = frozenset(
    (*EVENT_IDS, *EXTERNAL, "Sequence number", *MEMORY_ARGS[2:])
)  # args that differ from event to event

_PLACED_BY_LANE = ("mtia_ccp_events", "gpu_user_annotation")  # the reader takes device and stream from the lane
_FLOWS = frozenset((*FLOW_IN, *FLOW_OUT))
_SCOPES = ("g", "p", "t")  # of an instant event: global, process, thread
_CORRELATION = re.compile(f'("(?:{"|".join(EVENT_IDS)})":)([1-9]\\d*)')


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | float | None = ""
    tid: int | str | float | None = ""
    s: str = ""
    args: Raw = Raw(b"{}")
    bind_id: Any = None
    flow_in: Any = None
    flow_out: Any = None


class _Head(NamedTuple):
    """What many events have in common."""

    phase: str
    category: str | None
    name: str
    place: Place
    scope: str
    flow: str
    args: str


_decode = msgspec.json.Decoder(_Event).decode
_decode_args = msgspec.json.Decoder(dict[str, Raw]).decode


class EventTexts:
    """The texts of the events that stay.

    Events with the same name and the same constant args follow each other, in order of their duration, because
    gzip then finds most of an event in the event before it. Events of a table that begin and end together stay in
    the order of the file, on which their nesting depends.

    Args:
        index: the events of the file.
        parts: the events that stay, by table.
        lanes: collects the names of threads and processes.
        names: gives the names that are written.
        renumber: whether correlation ids get small numbers, in the order in which the events are written.
    """

    def __init__(
        self, index: EventIndex, parts: Mapping[str, Part], lanes: LaneNames, names: Names, *, renumber: bool
    ) -> None:
        self._lanes, self._names, self._renumber = lanes, names, renumber
        self._tables = list(parts)
        self._ids: Interner[str] = Interner()
        self._event, self._start, self._duration, self._name = (
            np.concatenate([each.rows[column] for each in parts.values()])
            for column in ("event", "start_ns", "duration_ns", "name")
        )
        self._table = np.repeat(np.arange(len(parts)), [len(each.rows) for each in parts.values()])
        self._heads: Interner[_Head] = Interner()
        self._head = np.zeros(len(self._event), np.int64)
        self._varying: dict[int, str] = {}
        self._flow: dict[int, str] = {}
        self._compacted: dict[bytes, str] = {}
        self._read(index, [each.keys[kind] for each in parts.values() for kind in each.which.tolist()])
        self._move_overlaps()

    def __iter__(self) -> Iterator[str]:
        heads = [(self._before(head), head.args, head.phase == "X") for head in self._heads]
        order = self._order()
        columns = (column[order].tolist() for column in (self._head, self._start, self._duration))
        for row, number, start, duration in zip(order.tolist(), *columns, strict=True):
            before, args, lasts = heads[number]
            after = f',"dur":{microseconds(duration)}' if lasts else ""
            if varying := self._varying.get(row, ""):
                varying = _CORRELATION.sub(lambda match: match[1] + self._new_id(match[2]), varying)
                after += f',"args":{{{args}{"," * bool(args)}{varying}}}'
            elif args:
                after += f',"args":{{{args}}}'
            if flow := self._flow.get(row):
                after += f',"bind_id":{self._new_id(flow)}'
            yield f'{before},"ts":{microseconds(start)}{after}}}'

    def _new_id(self, number: str) -> str:
        return str(self._ids[number] + 1) if self._renumber else number

    def _before(self, head: _Head) -> str:
        """Return the beginning of an event, up to its times."""
        fields: dict[str, Any] = {"ph": head.phase, "cat": head.category, "name": head.name, "s": head.scope}
        given = {name: value for name, value in fields.items() if value}
        process, thread = map(self._names.lane, head.place)
        flow = {head.flow: True} if head.flow else {}
        return json_text(given | {"pid": process, "tid": thread} | flow)[:-1]

    def _order(self) -> Array:
        by_time = np.lexsort((self._duration, self._start, self._table))
        same = np.zeros(len(by_time), bool)
        same[1:] = np.all(
            [np.diff(column[by_time]) == 0 for column in (self._table, self._start, self._duration)], axis=0
        )
        tied = np.zeros(len(by_time), bool)
        tied[by_time] = same | np.append(same[1:], False)
        keys = (np.where(tied, 0, column) for column in (self._start, self._duration, self._head, self._name))
        order: Array = np.lexsort((self._event, *keys, tied, self._table))
        return order

    def _read(self, index: EventIndex, keys: list[Keys]) -> None:
        order = np.argsort(self._event, kind="stable")
        events = self._event[order]
        for first, texts in index.texts():
            begin, end = np.searchsorted(events, (first, first + len(texts))).tolist()
            for row, event in zip(order[begin:end].tolist(), events[begin:end].tolist(), strict=True):
                self._take(row, _decode(texts[event - first]), keys[row])
            self._lanes.take(texts)

    def _move_overlaps(self) -> None:
        """Move events that overlap others on their thread to lanes of their own."""
        heads, places = list(self._heads), Interner[Place]()
        place = np.array([places[head.place] for head in heads], np.int64)[self._head]
        lasting = np.array([head.phase == "X" and head.category not in _PLACED_BY_LANE for head in heads])
        rows = np.flatnonzero(lasting[self._head])
        frame = np.array([head.category == "python_function" for head in heads])[self._head[rows]]
        ends = self._start[rows] + self._duration[rows]
        lanes = lanes_without_overlaps(place[rows], self._start[rows], ends, frame)
        for row, lane in zip(rows[lanes > 0].tolist(), lanes[lanes > 0].tolist(), strict=True):
            head = heads[self._head[row]]
            self._head[row] = self._heads[head._replace(place=self._lanes.lane(head.place, lane))]

    def _take(self, row: int, event: _Event, keys: Keys) -> None:
        args = _members(event.args) if keys else {}
        constant, varying = self._chosen(args, keys)
        place = self._lanes.place(event.pid, event.tid)
        table, phase, category = self._tables[self._table[row]], event.ph, event.cat
        name = self._names.event(table, event.name)
        if table == "regions" and (
            phase == "B" or category
        ):  # ranges of other programs are regions beside ends only
            category = "user_annotation"
        if phase == "B":
            phase = "X"
        category = self._names.category(category)
        flow = next((key for key in keys if key in _FLOWS), "")
        bind_id = event.bind_id if type(event.bind_id) is int else 0
        if keys == ALL_ARGS and bind_id:
            flow = FLOW_IN[0] if event.flow_in else FLOW_OUT[0]
        scope = event.s if event.s in _SCOPES else ""
        self._head[row] = self._heads[_Head(phase, category, name, place, scope, flow, constant)]
        if varying:
            self._varying[row] = varying
        if flow:
            self._flow[row] = str(bind_id) if bind_id else self._text(args["correlation"])

    def _chosen(self, args: Mapping[str, bytes], keys: Keys) -> tuple[str, str]:
        """Return the args that many events have in common, and those that differ, as members of a JSON object."""
        parts: tuple[list[str], list[str]] = ([], [])
        for key in args if keys == ALL_ARGS else keys:
            if key in args:
                name = self._names.value(json_text(key)) if keys == ALL_ARGS else json_text(key)
                parts[key in _VARYING].append(f"{name}:{self._text(args[key])}")
        return ",".join(parts[0]), ",".join(parts[1])

    def _text(self, raw: bytes) -> str:
        if raw not in self._compacted:
            self._compacted[raw] = self._names.value(compact(raw))
        return self._compacted[raw]


def _members(raw: Raw) -> Mapping[str, bytes]:
    try:
        return {key: bytes(value) for key, value in _decode_args(raw).items()}
    except (ValueError, RecursionError):
        return {key: json.dumps(value).encode() for key, value in json_object(raw).items()}


def compact(raw: bytes) -> str:
    """Return JSON text without spaces between its values."""
    text = raw.decode("utf-8", "replace")
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def json_text(value: Any) -> str:
    """Return a value as compact JSON."""
    return msgspec.json.encode(value).decode()


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
