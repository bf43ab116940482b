"""Decodes the ``args`` of Kineto events into columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct, field

from ..tables.table import KERNEL, MEMCPY, MEMSET, TRANSFERS, Array, Interner, Strings, natural
from .text import json_object

_TIMED = frozenset("XBEiIRC")
LATEST_US = 2.3e15
"""In ns, sums and differences of times fit into 64 bits."""
_MAX_RATIO = 1e9  # blocks per multiprocessor, or percent; larger values are errors
_GPU = {"gpu_memcpy": MEMCPY, "memcpy": MEMCPY, "gpu_memset": MEMSET, "memset": MEMSET}


class TraceEvent(Struct, gc=False):
    """The fields of all events; ``ts`` and ``dur`` are in us."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str | float | None = ""  # the fields are in Kineto's order, which decodes fastest
    tid: int | str | float | None = ""
    ts: float = math.nan
    dur: float = 0.0
    args: Raw = Raw(b"{}")
    bind_id: Any = None  # of a flow, version 2 of the format: slim traces link work to its launch by it

    def in_time(self) -> bool:
        """Return whether the event has a time, if its phase needs one, and its times fit into 64 bits of ns."""
        if math.isnan(self.ts):
            return self.ph not in _TIMED and abs(self.dur) < LATEST_US
        return abs(self.ts) < LATEST_US and abs(self.dur) < LATEST_US


class _Ids(Struct, gc=False):
    correlation: int = -1
    external: int = field(default=-1, name="External id")
    external_2021: int = field(default=-1, name="external id")


class _OperatorArgs(_Ids, gc=False):
    sequence: int = field(default=-1, name="Sequence number")
    shapes: Raw = field(default_factory=Raw, name="Input Dims")
    types: Raw = field(default_factory=Raw, name="Input type")
    scalars: Raw = field(default_factory=Raw, name="Concrete Inputs")
    group: str = field(default="", name="Process Group Name")
    source: int = field(default=-1, name="Src Rank")
    destination: int = field(default=-1, name="Dst Rank")


class _GpuArgs(_Ids, gc=False):
    device: int = -1
    stream: int = -1
    bytes: int = -1
    size: int = -1  # MTIA's name
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int = field(default=-1, name="registers per thread")
    shared_bytes: int = field(default=-1, name="shared memory")
    blocks_per_sm: float = field(default=math.nan, name="blocks per SM")
    occupancy_percent: float = field(default=math.nan, name="est. achieved occupancy %")
    collective: str = field(default="", name="Collective name")
    group: str = field(default="", name="Process Group Name")
    elements_in: int = field(default=-1, name="In msg nelems")
    elements_out: int = field(default=-1, name="Out msg nelems")
    dtype: str = ""


class _MemoryArgs(Struct, gc=False):
    bytes: int = field(default=0, name="Bytes")
    address: int = field(default=-1, name="Addr")
    device_type: int = field(default=-1, name="Device Type")
    device: int = field(default=-1, name="Device Id")
    allocated_bytes: int = field(default=-1, name="Total Allocated")
    reserved_bytes: int = field(default=-1, name="Total Reserved")


class _JaxArgs(Struct, gc=False):
    step: int | str = field(default=-1, name="step_num")
    correlation: int | str = field(default=-1, name="correlation_id")


class _NameArgs(Struct, gc=False):
    name: str = ""
    labels: str = ""


_Args = TypeVar("_Args", bound=Struct)
_DECODERS: dict[type[Struct], Callable[[bytes], Any]] = {
    kind: msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
    for kind in (_Ids, _OperatorArgs, _GpuArgs, _MemoryArgs, _JaxArgs, _NameArgs)
}


def _read(kind: type[_Args], raws: Sequence[Raw]) -> list[_Args]:
    """Decode the args of many events at once or, if that fails, one by one."""
    try:
        decoded: list[_Args] = _DECODERS[kind](b"[" + b",".join(raws) + b"]")
        return decoded
    except (ValueError, RecursionError):
        return [_read_unusual(kind, raw) for raw in raws]


def _read_unusual(kind: type[_Args], raw: Raw) -> _Args:
    """Decode the valid fields of the args; the others are taken as missing."""
    args, content = kind(), json_object(bytes(raw))
    for info in msgspec.structs.fields(kind):
        if info.encode_name in content:
            value = content[info.encode_name]
            with suppress(ValueError):
                if info.type is Raw:
                    setattr(args, info.name, Raw(json.dumps(value).encode()))
                else:
                    setattr(args, info.name, msgspec.convert(value, info.type, strict=False))
    return args


def names(raws: Sequence[Raw]) -> list[str]:
    """Return the ``name``, or the ``labels``, in the args of each event."""
    return [args.name or args.labels for args in _read(_NameArgs, raws)]


def values(raws: Sequence[Raw]) -> tuple[list[int], list[str], list[float]]:
    """Return the numbers in the args of counters: the indexes of the events, the series and the values."""
    rows, series, numbers = [], [], []
    for row, raw in enumerate(raws):
        for name, value in json_object(bytes(raw), parse_int=float).items():
            if isinstance(value, float) and abs(value) < math.inf:
                rows.append(row)
                series.append(name)
                numbers.append(value)
    return rows, series, numbers


def _column(args: Sequence[Struct], name: str) -> Array:
    """Return integers; values beyond 64 bits are taken as missing."""
    get = attrgetter(name)
    try:
        return np.fromiter(map(get, args), np.int64, len(args))
    except OverflowError:
        return np.array([value if abs(value) < 2**63 else -1 for value in map(get, args)], np.int64)


def _correlation(args: Sequence[_Ids], events: Sequence[TraceEvent]) -> Array:
    """Return CUPTI's correlation ids, whose 0 means none, or the ids of flows where there are none."""
    ids = _column(args, "correlation")
    ids = np.where(ids == 0, -1, ids)
    for row in np.flatnonzero(ids < 0).tolist():
        if type(flow := events[row].bind_id) is int and 0 < flow < 2**63:
            ids[row] = flow
    return ids


def _external(args: Sequence[_Ids]) -> Array:
    today = _column(args, "external")
    return today if np.all(today >= 0) else np.where(today >= 0, today, _column(args, "external_2021"))


def _operators(strings: Strings, _: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    args = _read(_OperatorArgs, [event.args for event in events])
    texts = {name: _texts(strings, args, name) for name in ("shapes", "types")}
    scalars = np.zeros(len(args), np.int32)
    rows = [row for row, event in enumerate(events) if "convolution" in event.name or event.name in TRANSFERS]
    scalars[rows] = _texts(strings, [args[row] for row in rows], "scalars")
    group, peer = np.zeros(len(args), np.int32), np.full(len(args), -1)
    rows = [row for row, event in enumerate(events) if event.name == "record_param_comms"]
    calls = [args[row] for row in rows]
    group[rows] = [strings[call.group] for call in calls]
    peer[rows] = np.maximum(_column(calls, "source"), _column(calls, "destination")).clip(-1)
    columns = {"external": _external(args), "sequence": _column(args, "sequence"), "scalars": scalars}
    return columns | texts | {"group": group, "peer": peer}


def _texts(strings: Strings, args: Sequence[Struct], name: str) -> Array:
    """Return the numbers of JSON texts; most texts occur many times and are decoded once."""
    numbers: Interner[bytes] = Interner()
    rows = [numbers[text] for text in map(bytes, map(attrgetter(name), args))]
    return np.array([strings[text.decode("utf-8", "replace")] for text in numbers], np.int32)[rows]


def _categories(strings: Strings, _: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    """Return the categories and, for JAX's events, which have none, the number of the step and the correlation."""
    categories = (strings[(event.cat or "").lower()] for event in events)
    args = _read(_JaxArgs, [event.args for event in events])
    return {
        "category": np.fromiter(categories, np.int32, len(events)),
        "number": np.array([natural(item.step) for item in args], np.int64),
        "correlation": np.array([natural(item.correlation) for item in args], np.int64),
    }


def _calls(strings: Strings, category: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    args = _read(_Ids, [event.args for event in events])
    return {
        "correlation": _correlation(args, events),
        "external": _external(args),
        "category": np.full(len(events), strings[category], np.int32),
    }


def _place(category: str, args: Sequence[_GpuArgs], events: Sequence[TraceEvent]) -> dict[str, Array]:
    """Return device and stream; some categories have them as process and thread."""
    if category in ("gpu_user_annotation", "mtia_ccp_events"):
        return {"device": _ids(event.pid for event in events), "stream": _ids(event.tid for event in events)}
    return {"device": _column(args, "device"), "stream": _column(args, "stream")}


def _ids(places: Iterable[Any]) -> Array:
    return np.array([place if isinstance(place, int) and abs(place) < 2**31 else -1 for place in places], np.int64)


def _marks(strings: Strings, category: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    args = _read(_GpuArgs, [event.args for event in events])
    return _place(category, args, events) | _calls(strings, category, events)


def _gpu(strings: Strings, category: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    args = _read(_GpuArgs, [event.args for event in events])
    size = _column(args, "bytes")
    kind = np.full(len(events), _GPU.get(category, KERNEL), np.int32)
    if "dma_request" in strings:  # MTIA's
        kind[[event.name == "dma_request" for event in events]] = MEMCPY
    columns = {
        "category": kind,
        "correlation": _correlation(args, events),
        "external": _external(args),
        "bytes": np.where(size >= 0, size, _column(args, "size")),
        "blocks": _volumes(args, "grid", 2**62),
        "block_threads": _volumes(args, "block", 2**31),
    }
    for name in ("registers", "shared_bytes", "elements_in", "elements_out"):
        columns[name] = _column(args, name)
    for name in ("blocks_per_sm", "occupancy_percent"):
        values = np.fromiter(map(attrgetter(name), args), np.float64, len(args))
        columns[name] = np.where((values >= 0) & (values < _MAX_RATIO), values, math.nan)
    for name in ("collective", "group", "dtype"):
        columns[name] = np.fromiter(map(strings.__getitem__, map(attrgetter(name), args)), np.int32, len(args))
    return columns | _place(category, args, events)


def _volumes(args: Sequence[_GpuArgs], name: str, limit: int) -> Array:
    numbers: Interner[tuple[int, ...]] = Interner()
    rows = np.fromiter(map(numbers.__getitem__, map(attrgetter(name), args)), np.int64, len(args))
    sizes = [math.prod(shape) if shape else -1 for shape in numbers]
    return np.array([size if -1 <= size < limit else -1 for size in sizes], np.int64)[rows]


def _memory(_: Strings, __: str, events: Sequence[TraceEvent]) -> dict[str, Array]:
    args = _read(_MemoryArgs, [event.args for event in events])
    return {info.name: _column(args, info.name) for info in msgspec.structs.fields(_MemoryArgs)}


READERS: dict[str, Callable[[Strings, str, Sequence[TraceEvent]], dict[str, Array]]] = {
    "operators": _operators,
    "regions": lambda _, __, events: {"external": _external(_read(_Ids, [event.args for event in events]))},
    "frames": lambda *_: {},
    "runtime": _calls,
    "gpu": _gpu,
    "gpu_regions": _marks,
    "syncs": _marks,
    "memory": _memory,
    "others": _categories,
}
"""For each table, a function from strings, category and events to the columns in the args."""
