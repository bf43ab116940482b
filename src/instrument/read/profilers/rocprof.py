"""Reads rocprofv3's JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from ...base.errors import TraceError
from ..kineto.text import event_limit, read_blocks, text_limit
from ..tables.lanes import distinct, map_unique
from ..tables.links import assemble
from ..tables.table import Array, TooLargeError
from ..tables.trace import Device, ReadLosses, Trace
from .rocm import PROCESS_BIT, RocmColumns, process_unique_ids
from .rocprof_text import (
    DECODE_ERRORS,
    DamagedJsonError,
    JsonStream,
    UnexpectedJsonError,
    clip_integers,
    decode_record,
    sections,
    split_items,
)

_Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Time = Annotated[int, Meta(ge=0, le=1 << 62)]
_Length = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]


class _Part(Struct, gc=False, frozen=True): ...


class Handle(_Part, frozen=True):
    """The handle of an agent, a queue, a stream or a counter."""

    handle: _Int = -1


class CorrelationIds(_Part, frozen=True):
    """The id of the call that caused a record, and the id of the call around that one."""

    internal: _Int = -1
    ancestor: _Int = -1


class Lengths(_Part, frozen=True):
    """The sizes of the three dimensions, in work items."""

    x: _Length = 0
    y: _Length = 0
    z: _Length = 0


class DispatchInfo(_Part, frozen=True):
    """A launch: the kernel, its sizes, its agent and its queue."""

    agent: Handle = field(default=Handle(), name="agent_id")
    queue: Handle = field(default=Handle(), name="queue_id")
    kernel: _Int = field(default=-1, name="kernel_id")
    shared_bytes: _Int = field(default=-1, name="group_segment_size")
    workgroup: Lengths = field(default=Lengths(), name="workgroup_size")
    grid: Lengths = field(default=Lengths(), name="grid_size")


class Record(_Part, frozen=True):
    """A record with a start and an end; `COLUMNS` says where the value of each column is."""

    COLUMNS: ClassVar[dict[str, str]] = {
        "start_ns": "start",
        "end_ns": "end",
        "thread": "thread",
        "correlation": "correlation.internal",
    }

    start: _Time = field(name="start_timestamp")
    end: _Time = field(name="end_timestamp")
    thread: _Int = field(default=-1, name="thread_id")
    correlation: CorrelationIds = field(default=CorrelationIds(), name="correlation_id")

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError("it ends before it starts")


class Kernel(Record, frozen=True):
    """A kernel."""

    COLUMNS = Record.COLUMNS | {
        "agent": "info.agent.handle",
        "queue": "info.queue.handle",
        "stream": "stream.handle",
        "kernel": "info.kernel",
        "shared_bytes": "info.shared_bytes",
        **{axis: f"info.grid.{axis}" for axis in "xyz"},
        **{axis.upper(): f"info.workgroup.{axis}" for axis in "xyz"},
    }

    info: DispatchInfo = field(default=DispatchInfo(), name="dispatch_info")
    stream: Handle = field(default=Handle(), name="stream_id")


class Call(Record, frozen=True):
    """A call of an API, including rocTX, or an allocation."""

    COLUMNS = Record.COLUMNS | {"ancestor": "correlation.ancestor", "kind": "kind", "operation": "operation"}

    kind: _Int = -1
    operation: _Int = -1


class Copy(Call, frozen=True):
    """A memcpy."""

    COLUMNS = Call.COLUMNS | {
        "source": "source.handle",
        "target": "target.handle",
        "bytes": "bytes",
        "stream": "stream.handle",
    }

    source: Handle = field(default=Handle(), name="src_agent_id")
    target: Handle = field(default=Handle(), name="dst_agent_id")
    bytes: _Int = -1
    stream: Handle = field(default=Handle(), name="stream_id")


class CounterValue(_Part, frozen=True):
    """The value of one instance of a counter."""

    counter: Handle = field(default=Handle(), name="counter_id")
    value: float = 0.0


class Counted(_Part, frozen=True):
    """A kernel with the values of hardware counters, some with several instances."""

    COLUMNS: ClassVar[dict[str, str]] = {
        **{column: f"dispatch.{path}" for column, path in Kernel.COLUMNS.items()},
        "thread": "thread",
        "stream": "stream.handle",
    }

    dispatch: Kernel = field(name="dispatch_data")
    thread: _Int = field(default=-1, name="thread_id")
    stream: Handle = field(default=Handle(), name="stream_id")
    values: list[CounterValue] = field(default_factory=list, name="records")


class Symbol(_Part, frozen=True):
    """The symbol of a kernel; its formatted name is the demangled name without the linker's suffix."""

    id: _Int = field(name="kernel_id")
    formatted: str = field(default="", name="formatted_kernel_name")
    demangled: str = field(default="", name="demangled_kernel_name")
    name: str = field(default="", name="kernel_name")
    registers: _Int = field(default=-1, name="arch_vgpr_count")


class MemoryBank(_Part, frozen=True):
    """A memory bank of a GPU."""

    size_in_bytes: _Int = 0


class Agent(_Part, frozen=True):
    """A processor; `type` 2 is a GPU."""

    id: Handle = Handle()
    type: int = 0
    number: _Int = field(default=-1, name="logical_node_type_id")
    name: str = ""
    product: str = field(default="", name="product_name")
    sms: _Int = field(default=0, name="cu_count")
    waves_per_sm: _Int = field(default=0, name="max_waves_per_cu")
    threads_per_wave: _Int = field(default=0, name="wave_front_size")
    memory: list[MemoryBank] = field(default_factory=list, name="mem_banks")


class Counter(_Part, frozen=True):
    """The name of a hardware counter."""

    id: Handle = Handle()
    name: str = ""


class Label(_Part, frozen=True):
    """The argument of a rocTX call, by the id of the call."""

    key: _Int
    value: str


class Kind(_Part, frozen=True):
    """The name of a kind of record, and the names of its operations."""

    kind: str = ""
    operations: list[str] = field(default_factory=list)


_APIS = ("hip_api", "hsa_api", "rccl_api", "rocdecode_api", "rocjpeg_api")
_MEMORY = ("memory_allocation", "scratch_memory")
_COUNTED = "counter_collection"
_RECORDS: dict[str, type[Record | Counted]] = {
    "kernel_dispatch": Kernel,
    "memory_copy": Copy,
    **dict.fromkeys(("marker_api", *_APIS, *_MEMORY), Call),
    _COUNTED: Counted,
}
"""What the lists of events hold; their order numbers the events."""
_RECORD_KEYS = ("callback_records", "buffer_records")
_ABOUT: dict[tuple[str, str], type[Struct]] = {
    ("agents", ""): Agent,
    ("counters", ""): Counter,
    ("kernel_symbols", ""): Symbol,
    ("strings", "buffer_records"): Kind,
    ("strings", "marker_api"): Label,
}
"""What the other lists hold."""
_LIST = 40  # the bit of an event's number at which the number of its list begins
_GPU = 2
_MAX_PROCESSES = (1 << 63 - PROCESS_BIT) - 1
_VALUE = np.dtype([("row", "i8"), ("counter", "i8"), ("value", "f8")])


def read_rocprof(path: Path) -> Trace:
    """Read the JSON of rocprofv3 1.0 and later, gzip or plain, of one or more processes.

    If a file is cut off or damaged, the records before the damage are read; see `Trace.lost`. Only a part of the
    text is in memory at a time.

    Raises:
        TraceError: the file is not such JSON, or was written by an earlier version.
        OSError: the file cannot be opened.
    """
    lost = ReadLosses()
    reader = _Reader(path, lost)
    with path.open("rb") as file:
        reader.read(JsonStream(read_blocks(path, file, lost)))
    return assemble(
        path,
        "rocprof",
        reader.columns.tables(),
        reader.columns.strings,
        reader.columns.threads({}),
        devices=[device for _, device in sorted(reader.devices.items())],
        metadata={"processes": reader.processes},
        lost=lost,
        look_up=partial(_look_up, path),
    )


class _Reader:
    """Reads the records of one process after the other, in the order of the text.

    Attributes:
        columns: the columns of all processes.
        devices: their GPUs by number.
        processes: the metadata of each.
    """

    def __init__(self, path: Path, lost: ReadLosses) -> None:
        self.columns = RocmColumns(text_limit(path))
        self.devices: dict[int, Device] = {}
        self.processes: list[dict[str, Any]] = []
        self._path = path
        self._lost = lost
        self._record_limit = event_limit(path)
        self._items = 0  # of all lists so far

    def read(self, text: JsonStream) -> None:
        """Read the text.

        Raises:
            TraceError: it is not JSON of rocprofv3, or that of a version before 1.0.
            TooLargeError: it has too many items for its size.
        """
        if not text.peek():
            raise TraceError(self._path, next(iter(self._lost.reasons), "it is empty"))
        process: _Process | None = None
        try:
            for number, key, inner in sections(text):
                if process is None or not key:
                    self._finish(process)
                    process = _Process(number)
                else:
                    self._take(process, text, key, inner)
            if text.peek():
                self._lost.add("text after the end of the JSON", size=text.rest())
        except UnexpectedJsonError as error:
            raise TraceError(self._path, f"it is not what rocprofv3 writes: {error}") from None
        except DamagedJsonError as error:
            if not self._items:
                raise TraceError(self._path, f"it is not JSON of rocprofv3: {error}") from None
            self._lost.add(f"the text is cut off or damaged: {error}", size=text.rest())
        self._finish(process)

    def _finish(self, process: _Process | None) -> None:
        if process is None:
            return
        if process.number >= _MAX_PROCESSES:
            raise TraceError(self._path, f"it holds more than {_MAX_PROCESSES:,} processes")
        self.processes.append(process.metadata)
        process.add_to(self.columns, self.devices)

    def _take(self, process: _Process, text: JsonStream, key: str, inner: str) -> None:
        """Read the value of a key."""
        kind, about = _RECORDS.get(inner), _ABOUT.get((key, inner))
        if key == "metadata":
            process.metadata = _object(text.value(key))
        elif about is not None:
            for _, items in self._records(text, inner or key, about):
                process.about[about] += items
            if any(agent.type == _GPU and agent.number < 0 for agent in process.about[Agent]):
                raise TraceError(
                    self._path,
                    "it was written by rocprofv3 before 1.0, whose JSON is not supported: its GPUs have no "
                    '"logical_node_type_id"',
                )
        elif key in _RECORD_KEYS and kind is not None and inner not in process.rows:
            for places, records in self._records(text, inner, kind):
                process.add(inner, kind, places, records)
        else:
            text.skip()

    def _records(self, text: JsonStream, name: str, kind: type[Any]) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield the readable records, some at a time, and their indexes in the list."""
        decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        count = 0
        for items in text.items(name):
            try:
                records = decode(b"[" + items + b"]")
            except DECODE_ERRORS:
                records = [self._one(item, kind) for item in split_items(items)]
            places = [place for place, record in enumerate(records, count) if record is not None]
            count += len(records)
            self._items += len(records)
            if self._items > self._record_limit:
                raise TooLargeError(f"it holds more than {self._record_limit:,} records, too many for its size")
            if places:
                yield places, [record for record in records if record is not None]

    def _one(self, item: bytes, kind: type[Any]) -> Any:
        """Return a record, repaired if necessary; None if it cannot be read."""
        try:
            return msgspec.json.decode(item, type=kind)
        except DECODE_ERRORS as error:
            name = kind.__name__.lower()
            try:
                record = msgspec.convert(clip_integers(decode_record(item)), kind)
            except DECODE_ERRORS:
                self._lost.add(f"{name}: {error}", events=1, size=len(item))
                return None
            self._lost.repaired += 1
            self._lost.add(f"{name}, repaired: {error}")
            return record


class _Process:
    """The records of one process, with numbers for names that may come later in the file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.metadata: dict[str, Any] = {}
        self.about: dict[type[Struct], list[Any]] = defaultdict(list)  # what is in the lists of `_ABOUT`
        self.rows: dict[str, list[Array]] = {}  # for each record its place in the list, and its values
        self._values: list[Array] = []  # of counters

    def add(self, name: str, kind: type[Record | Counted], places: list[int], records: list[Any]) -> None:
        """Add records of a list."""
        rows = self.rows.setdefault(name, [])
        if kind is Counted:
            first = sum(map(len, rows))
            values = [
                (row, each.counter.handle, each.value)
                for row, dispatch in enumerate(records, first)
                for each in dispatch.values
            ]
            self._values.append(np.array(values, _VALUE))
        flat = chain.from_iterable(map(attrgetter(*kind.COLUMNS.values()), records))
        table = np.fromiter(flat, np.int64, len(records) * len(kind.COLUMNS))
        rows.append(np.column_stack((places, table.reshape(len(records), -1))))

    def add_to(self, columns: RocmColumns, devices: dict[int, Device]) -> None:
        """Add all records to the columns of the trace, and the GPUs to its devices."""
        gpus = {agent.id.handle: _device(agent) for agent in self.about[Agent] if agent.type == _GPU}
        for device in gpus.values():
            devices.setdefault(device.id, device)
        if not self.rows:  # 0.5 ms for each process otherwise
            return
        pid = self.metadata.get("pid", self.number)
        parts = {
            name: self._columns(name, columns, pid if isinstance(pid, int) else str(pid)) for name in _RECORDS
        }
        kernels, counted, copies = parts["kernel_dispatch"], parts[_COUNTED], parts["memory_copy"]
        self._add_counters(counted, columns)
        self._add_kernels(kernels if len(kernels["event"]) else counted, columns, gpus)

        source, target = (_numbers(gpus, copies[side]) for side in ("source", "target"))
        columns.add_memcpys(copies | {"device": np.where(source >= 0, source, target)})
        labels = {label.key: label.value for label in self.about[Label]}
        texts = map_unique(parts["marker_api"]["internal"], lambda call: columns.strings[labels.get(call, "")])
        columns.add_markers(parts["marker_api"] | {"text": texts})
        for name in _APIS:
            columns.add_calls(parts[name])
        for name in _MEMORY:
            category = np.full(len(parts[name]["event"]), columns.strings[name])
            columns.add("others", parts[name] | {"category": category})

    def _columns(self, name: str, columns: RocmColumns, pid: int | str) -> dict[str, Array]:
        names = ("place", *_RECORDS[name].COLUMNS)
        rows = np.concatenate([np.empty((0, len(names)), np.int64), *self.rows.pop(name, [])])
        part = dict(zip(names, rows.T, strict=True))
        part["event"] = part["place"] + ((self.number << PROCESS_BIT) + (list(_RECORDS).index(name) << _LIST))
        part["duration_ns"] = part["end_ns"] - part["start_ns"]
        part["thread"] = columns.thread(pid, part["thread"])
        part["internal"] = part["correlation"]
        for column, lowest in (("correlation", 1), ("ancestor", 1), ("queue", 0), ("stream", 0)):
            if column in part:
                part[column] = process_unique_ids(part[column], self.number, lowest)
        if "kind" in part:
            self._name(part, columns)
        return part

    def _name(self, part: dict[str, Array], columns: RocmColumns) -> None:
        """Replace the numbers of kinds and operations by numbers of strings."""
        kinds, strings = self.about[Kind], columns.strings

        def kind(number: int) -> int:
            return strings[kinds[number].kind] if 0 <= number < len(kinds) else 0

        def operation(pair: int) -> int:
            number, place = pair >> 32, pair & (1 << 32) - 1
            names = kinds[number].operations if number < len(kinds) else []
            return strings[names[place] if place < len(names) else f"operation {place} of kind {number}"]

        pair = ((part["kind"] & (1 << 31) - 1) << 32) | (part["operation"] & (1 << 32) - 1)
        part["name"] = part["operation"] = map_unique(pair, operation)
        part["kind"] = map_unique(part["kind"], kind)

    def _add_kernels(self, part: dict[str, Array], columns: RocmColumns, gpus: dict[int, Device]) -> None:
        # the last name of an id counts
        symbols = {symbol.id: symbol for symbol in self.about[Symbol]}
        none = Symbol(-1)

        def name(kernel: int) -> int:
            symbol = symbols.get(kernel, none)
            return columns.strings[symbol.formatted or symbol.demangled or symbol.name or f"kernel {kernel}"]

        more = {
            "name": map_unique(part["kernel"], name),
            "registers": map_unique(part["kernel"], lambda kernel: symbols.get(kernel, none).registers),
            "device": _numbers(gpus, part["agent"]),
            "sms": map_unique(part["agent"], lambda handle: gpus[handle].sms if handle in gpus else 0),
        }
        columns.add_kernels(part | more)

    def _add_counters(self, dispatches: dict[str, Array], columns: RocmColumns) -> None:
        """Add the counters of each kernel, summed over their instances."""
        names = {counter.id.handle: counter.name for counter in self.about[Counter]}
        values = np.concatenate([np.empty(0, _VALUE), *self._values])
        strings = columns.strings
        name = map_unique(values["counter"], lambda handle: strings[names.get(handle, f"counter {handle}")])
        first, which = distinct(values["row"], name)
        order = np.argsort(first)  # in the order of the file
        sums = np.bincount(which, values["value"], len(first))[order]
        rows = values["row"][first[order]]
        part = {column: dispatches[column][rows] for column in ("start_ns", "duration_ns", "thread", "event")}
        columns.add("counters", part | {"name": name[first[order]], "value": sums})


def _numbers(gpus: dict[int, Device], agents: Array) -> Array:
    """Return the numbers of GPUs; -1 for CPUs."""
    return map_unique(agents, lambda handle: gpus[handle].id if handle in gpus else -1)


def _object(text: bytes) -> dict[str, Any]:
    try:
        content = decode_record(text)
    except DECODE_ERRORS as error:
        raise DamagedJsonError(str(error)) from None
    if not isinstance(content, dict):
        raise UnexpectedJsonError("Expected an object as metadata")
    return content


def _device(agent: Agent) -> Device:
    return Device(
        agent.number,
        agent.product or agent.name,
        agent.sms,
        agent.waves_per_sm * agent.threads_per_wave,
        sum(bank.size_in_bytes for bank in agent.memory),
    )


def _look_up(path: Path, event: int) -> dict[str, Any]:
    if event < 0:
        return {}
    wanted = event >> PROCESS_BIT, list(_RECORDS)[event >> _LIST & (1 << PROCESS_BIT - _LIST) - 1]
    place = event & (1 << _LIST) - 1
    with path.open("rb") as file:
        text = JsonStream(read_blocks(path, file, ReadLosses()))
        for number, key, inner in sections(text):
            if key in _RECORD_KEYS and (number, inner) == wanted:
                for items in text.items(inner):
                    records = split_items(items)
                    if place < len(records):
                        record: dict[str, Any] = decode_record(records[place])
                        return record
                    place -= len(records)
            elif key:
                text.skip()
    return {}
