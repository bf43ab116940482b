"""Reads Perfetto's binary traces of torch.profiler (2.14 and later), rocprofv3 and Triton's Proton.

The schema: protos/perfetto/trace in Perfetto. A slice is two packets, a begin and an end on a track; names and
categories may be numbers of texts that an earlier packet of the same sequence lists. The arguments of torch are
those of its JSON, so slices become events of that format, and its reader makes the trace.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import msgspec

from ...base.errors import TraceError
from ..kineto.kineto import read_kineto_ranks
from ..kineto.text import read_blocks
from ..tables.trace import ReadLosses, Trace
from .perfetto_gpu import STAGES, stage_event
from .protobuf_messages import Schema, parse, text_of

_SCHEMA: Schema = {
    **STAGES,
    "PerfettoTrace": {"packet": (1, "Packet*")},
    "Packet": {
        "timestamp": (8, "uint64"),
        "sequence": (10, "uint64"),
        "track_event": (11, "TrackEvent"),
        "interned": (12, "Interned"),
        "flags": (13, "uint64"),
        "counter": (52, "GpuCounter"),
        "render_stage": (53, "RenderStage"),
        "clock": (58, "uint64"),
        "defaults": (59, "Defaults"),
        "track": (60, "Track"),
    },
    "TrackEvent": {
        "category_iids": (3, "uint64*"),
        "annotations": (4, "Annotation*"),
        "type": (9, "uint64"),
        "name_iid": (10, "uint64"),
        "track": (11, "uint64"),
        "categories": (22, "bytes*"),
        "name": (23, "bytes"),
    },
    "Annotation": {
        "name_iid": (1, "uint64"),
        "bool_value": (2, "bool"),
        "uint_value": (3, "uint64"),
        "int_value": (4, "int64"),
        "double_value": (5, "double"),
        "string_value": (6, "bytes"),
        "name": (10, "bytes"),
        "array_values": (12, "Annotation*"),
        "string_iid": (17, "uint64"),
    },
    "Interned": {
        "categories": (1, "Text*"),
        "names": (2, "Text*"),
        "annotations": (3, "Text*"),
        "stages": (24, "Text*"),
        "strings": (29, "Text*"),
        "counters": (47, "CounterNames*"),
        "launch_arguments": (1001, "Text*"),
    },
    "GpuCounter": {"values": (2, "CounterValue*"), "iid": (4, "uint64")},
    "CounterValue": {"number": (1, "uint64"), "int_value": (2, "int64"), "double_value": (3, "double")},
    "CounterNames": {"iid": (1, "uint64"), "names": (2, "CounterSpecs"), "gpu": (3, "uint64")},
    "CounterSpecs": {"specs": (1, "CounterSpec*")},
    "CounterSpec": {"number": (1, "uint64"), "name": (2, "bytes")},
    "Defaults": {"clock": (58, "uint64")},
    "Text": {"iid": (1, "uint64"), "name": (2, "bytes")},
    "Track": {
        "uuid": (1, "uint64"),
        "name": (2, "bytes"),
        "process": (3, "Process"),
        "thread": (4, "Thread"),
        "parent": (5, "uint64"),
        "static_name": (10, "bytes"),
    },
    "Process": {"pid": (1, "int64"), "name": (6, "bytes")},
    "Thread": {"pid": (1, "int64"), "tid": (2, "int64"), "name": (5, "bytes")},
}
_TEXTS = ("categories", "names", "annotations", "stages", "strings", "launch_arguments")
_BEGIN, _END = 1, 2
_CLEARED = 1  # a flag: the texts of the sequence so far are void, and their numbers are given anew
_LAST_CLOCK = 63  # the last of those that give absolute times in ns
_VALUES = ("string_value", "int_value", "uint_value", "double_value", "bool_value")
_OF_ROCPROF = {"kernel_dispatch": "kernel", "memory_copy": "gpu_memcpy", "marker_api": "user_annotation"}
_LANE = re.compile(r"(?:COMPUTE|COPY to) \w+ \[(\d+)\] (?:STREAM|QUEUE|THREAD) \[(\d+)\]")
_AT_ONCE = 10_000  # events in a block of JSON


def read_perfetto(path: Path) -> Trace:
    """Read the slices of a file, plain or gzip.

    Raises:
        TraceError: protobuf is not installed, the file is damaged, or it has no slice, or times that are not
            absolute.
        TooLargeError: the file holds more than a trace of its size can.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        content = b"".join(read_blocks(path, file, ReadLosses()))
    reader = _Reader()
    for packet in parse(path, _SCHEMA, "PerfettoTrace", content).packet:
        if max(packet.clock, packet.defaults.clock) > _LAST_CLOCK:
            raise TraceError(path, "its times are of clocks of its own, such as differences, which are not read")
        reader.take(packet)
    if not reader.slices and not reader.stages:
        raise TraceError(path, "it has no slices of a program: give a trace of torch.profiler or rocprofv3")
    (trace, *more) = read_kineto_ranks(path, texts=reader.texts())
    if more:
        raise TraceError(path, f"it holds the traces of {len(more) + 1} ranks")
    trace.format, trace.look_up = "perfetto", None  # which looks for JSON
    if reader.unnamed:
        trace.lost.left_out["GPU events without a name, in render stages"] = reader.unnamed
    return trace


@dataclass
class _Slice:
    """A slice, whose end comes later in the file."""

    event: Any
    begin_ns: int
    texts: Mapping[str, Mapping[int, str]]
    end_ns: int = -1


@dataclass
class _Reader:
    """Pairs the begins and ends of slices.

    On a track, an end closes the innermost slice. But torch writes all begins of a kind and then all ends, in the
    same order: so its tracks are not in order of time, and neither are these ends, or the first ones come before
    the last begins, or with them.
    """

    slices: list[_Slice] = field(default_factory=list)
    tracks: dict[int, Any] = field(default_factory=dict)
    counters: list[dict[str, Any]] = field(default_factory=list)
    stages: list[_Slice] = field(default_factory=list)
    unnamed: int = 0
    _counter_names: dict[tuple[int, int], tuple[str, dict[int, str]]] = field(default_factory=dict)
    _texts: dict[int, dict[str, dict[int, str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    _ends: dict[int, list[_Slice | int]] = field(default_factory=lambda: defaultdict(list))

    def take(self, packet: Any) -> None:
        """Take the next packet."""
        if packet.flags & _CLEARED:  # earlier slices keep the texts that they began with
            self._texts.pop(packet.sequence, None)
        texts = self._texts[packet.sequence]
        if packet.HasField("interned"):
            for kind in _TEXTS:
                texts[kind].update((text.iid, text_of(text.name)) for text in getattr(packet.interned, kind))
            for own in packet.interned.counters:
                names = {spec.number: text_of(spec.name) for spec in own.names.specs}
                self._counter_names[packet.sequence, own.iid] = f"GPU {own.gpu} Counters", names
        if packet.HasField("track"):
            self.tracks[packet.track.uuid] = packet.track
        if packet.HasField("counter"):
            self._count(packet)
        if packet.HasField("render_stage"):
            stage, at = packet.render_stage, packet.timestamp
            if stage.name_iid or stage.stage_iid:
                self.stages.append(_Slice(stage, at, texts, at + stage.duration))
            else:
                self.unnamed += 1
        if packet.HasField("track_event"):
            event = packet.track_event
            if event.type == _BEGIN:
                self.slices.append(_Slice(event, packet.timestamp, texts))
                self._ends[event.track].append(self.slices[-1])
            elif event.type == _END:
                self._ends[event.track].append(packet.timestamp)

    def _count(self, packet: Any) -> None:
        """Take values of counters, as torch writes them: the names of a GPU's counters came before."""
        process, names = self._counter_names.get((packet.sequence, packet.counter.iid), ("", {}))
        for each in packet.counter.values:
            if each.number in names:
                value = each.double_value if each.HasField("double_value") else each.int_value
                event = {"ph": "C", "name": names[each.number], "pid": process, "args": {"": value}}
                self.counters.append(event | {"ts": packet.timestamp})

    def texts(self) -> Iterator[bytes]:
        """Yield the slices as the JSON of torch.profiler."""
        by_time = all(map(_in_time, self._ends.values()))
        for packets in self._ends.values():
            _pair(packets, by_time=by_time)
        begin = min(each.begin_ns for each in chain(self.slices, self.stages))
        yield b'{"baseTimeNanoseconds": %d, "traceEvents": [' % begin
        yield b",".join(map(msgspec.json.encode, self._names()))
        events = chain(
            (self._event(each) | _times(each, begin) for each in self.slices if each.end_ns >= each.begin_ns),
            (stage_event(each.event, each.texts) | _times(each, begin) for each in self.stages),
            (each | {"ts": (each["ts"] - begin) / 1000} for each in self.counters),
        )
        while some := list(islice(events, _AT_ONCE)):
            yield b"".join(b"," + msgspec.json.encode(each) for each in some)
        yield b"]}"

    def _names(self) -> Iterator[dict[str, Any]]:
        for uuid, track in self.tracks.items():
            pid, tid = self._place(uuid)
            kind, own = (
                ("thread_name", track.thread) if track.HasField("thread") else ("process_name", track.process)
            )
            yield {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text_of(own.name)}}

    def _place(self, uuid: int) -> tuple[int, int | str]:
        """Return the process and the thread of a track; its number, if it has none."""
        track = self.tracks.get(uuid)
        if track is None:
            return 0, uuid & (1 << 31) - 1
        if track.HasField("thread"):
            return track.thread.pid, track.thread.tid
        return track.process.pid, text_of(track.name or track.static_name) or uuid & (1 << 31) - 1

    def _event(self, each: _Slice) -> dict[str, Any]:
        event, texts = each.event, each.texts
        args = dict(_arguments(event.annotations, texts))
        name = text_of(event.name) or texts["names"].get(event.name_iid, "")
        said = [
            *map(text_of, event.categories),
            *(texts["categories"].get(iid, "") for iid in event.category_iids),
        ]
        category = said[0] if said else _category(name, args)
        pid, tid = self._place(event.track)
        if category.endswith("_api") or category in _OF_ROCPROF:
            args |= {"correlation": args.get("corr_id", -1), "bytes": args.get("copy_bytes", -1)}
            if lane := _LANE.match(str(tid)):
                args |= {"device": int(lane[1]), "stream": int(lane[2])}
            category = _OF_ROCPROF.get(category, "cuda_runtime")
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args}


def _times(each: _Slice, begin: int) -> dict[str, float]:
    return {"ts": (each.begin_ns - begin) / 1000, "dur": (each.end_ns - each.begin_ns) / 1000}


def _in_time(packets: Iterable[_Slice | int]) -> bool:
    times = [each if isinstance(each, int) else each.begin_ns for each in packets]
    return times == sorted(times)


def _pair(packets: Iterable[_Slice | int], *, by_time: bool) -> None:
    """Set the ends of the slices of a track, each time that ends follow begins.

    Args:
        packets: the begins and the ends.
        by_time: whether all tracks are in order of time.
    """
    open_: list[_Slice] = []
    begun: list[_Slice] = []
    for is_end, some in groupby(packets, lambda each: isinstance(each, int)):
        if not is_end:
            begun = [each for each in some if isinstance(each, _Slice)]
            open_ += begun
            continue
        ends = [each for each in some if isinstance(each, int)]
        nested = ends == sorted(ends) and ends[0] > max((each.begin_ns for each in begun), default=-1)
        if 1 < len(begun) == len(ends) and not (by_time or nested):
            closed = begun
            del open_[-len(begun) :]
        else:
            closed = [open_.pop() for _ in ends if open_]
        for each, end_ns in zip(closed, ends, strict=False):
            each.end_ns = end_ns
        begun = []


def _arguments(annotations: Iterable[Any], texts: Mapping[str, Mapping[int, str]]) -> Iterator[tuple[str, Any]]:
    for each in annotations:
        name = text_of(each.name) or texts["annotations"].get(each.name_iid, "")
        yield name, _value(each, texts)


def _value(annotation: Any, texts: Mapping[str, Mapping[int, str]]) -> Any:
    if annotation.array_values:
        return [_value(each, texts) for each in annotation.array_values]
    if annotation.HasField("string_iid"):
        return texts["strings"].get(annotation.string_iid, "")
    value = next((getattr(annotation, name) for name in _VALUES if annotation.HasField(name)), None)
    return text_of(value) if isinstance(value, bytes) else value


def _category(name: str, args: Mapping[str, Any]) -> str:
    """Return the category that torch's JSON has for a slice, where the slice has none."""
    if "grid" in args:
        return "kernel"
    if "stream" in args and name.startswith(("Memcpy", "Memset")):
        return f"gpu_{name[:6].lower()}"
    if "cbid" in args:
        return "cuda_runtime"
    return "cpu_op" if "::" in name or "Sequence number" in args else "user_annotation"
