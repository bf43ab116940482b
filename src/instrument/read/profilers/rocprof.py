"""Reads rocprofv3's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct

from ...base.errors import TraceError
from ..kineto.text import event_limit, read_blocks, text_limit
from ..tables.lanes import map_unique
from ..tables.links import assemble
from ..tables.table import Array, TooLargeError
from ..tables.trace import Device, ReadLosses, Trace
from .rocm import PROCESS_BIT, RocmColumns, process_unique_ids
from .rocprof_records import (
    Agent,
    ApiCall,
    CountedDispatch,
    HardwareCounter,
    KernelDispatch,
    KernelSymbol,
    MarkerText,
    MemoryCopy,
    Record,
    RecordKind,
)
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

_APIS = ("hip_api", "hsa_api", "rccl_api", "rocdecode_api", "rocjpeg_api")
_MEMORY = ("memory_allocation", "scratch_memory")
_LISTS = ("kernel_dispatch", "memory_copy", "marker_api", *_APIS, *_MEMORY, "counter_collection")
_LIST = 40  # the bit of an event's number at which the number of its list begins
_GPU = 2
_MAX_PROCESSES = (1 << 63 - PROCESS_BIT) - 1
_RECORDS: dict[str, type[Record]] = {
    "kernel_dispatch": KernelDispatch,
    "memory_copy": MemoryCopy,
}  # all other lists hold calls
_COUNTED = "counter_collection"
_LABELS: dict[type[Struct], str] = {
    Agent: "agent",
    ApiCall: "call",
    CountedDispatch: "counted",
    HardwareCounter: "counter",
    KernelDispatch: "kernel",
    KernelSymbol: "symbol",
    MarkerText: "label",
    MemoryCopy: "copy",
    RecordKind: "kind",
}
"""What `ReadLosses.reasons` calls the records."""

_T = TypeVar("_T", bound=Struct)


def read_rocprof(path: Path) -> Trace:
    """Read the JSON of rocprofv3 1.0 and later, gzip or plain, of one or more processes.

    If a file is cut off or damaged, the records before the damage are read; see `Trace.lost`. Only a part of the
    text is in memory at a time.

    Raises:
        TraceError: the file is not such JSON, or was written by an earlier version.
        OSError: the file cannot be opened.
    """
    lost = ReadLosses()
    collected, devices, metadata = _collect(path, lost)
    return assemble(
        path,
        "rocprof",
        collected.tables(),
        collected.strings,
        collected.threads({}),
        devices=devices,
        metadata=metadata,
        lost=lost,
        look_up=partial(_look_up, path),
    )


def _collect(path: Path, lost: ReadLosses) -> tuple[RocmColumns, list[Device], dict[str, Any]]:
    collected = RocmColumns(text_limit(path))
    devices: dict[int, Device] = {}
    about: list[dict[str, Any]] = []
    parts = _RecordReader(path, lost)
    with path.open("rb") as file:
        text = JsonStream(read_blocks(path, file, lost))
        if not text.peek():
            raise TraceError(path, next(iter(lost.reasons), "it is empty"))
        try:
            for number, key, inner in sections(text):
                if key:
                    parts.take(text, key, inner)
                elif number >= _MAX_PROCESSES:
                    raise TraceError(path, f"it holds more than {_MAX_PROCESSES:,} processes")
                else:
                    about += parts.finish(collected, devices)
                    parts.begin(number)
            if text.peek():
                lost.add("text after the end of the JSON", size=text.rest())
        except UnexpectedJsonError as error:
            raise TraceError(path, f"it is not what rocprofv3 writes: {error}") from None
        except DamagedJsonError as error:
            if not parts.items:
                raise TraceError(path, f"it is not JSON of rocprofv3: {error}") from None
            lost.add(f"the text is cut off or damaged: {error}", size=text.rest())
    about += parts.finish(collected, devices)
    return collected, [devices[number] for number in sorted(devices)], {"processes": about}


class _RecordReader:
    """Reads the records of one process after the other, in the order of the text.

    Args:
        path: the file.
        lost: records what cannot be read.

    Attributes:
        items: the number of list items in all processes so far.
    """

    def __init__(self, path: Path, lost: ReadLosses) -> None:
        self._path = path
        self._record_limit = event_limit(path)
        self._lost = lost
        self.items = 0
        self._process: _ProcessRecords | None = None

    def begin(self, number: int) -> None:
        """Begin the next process."""
        self._process = _ProcessRecords(number)

    def finish(self, collected: RocmColumns, devices: dict[int, Device]) -> list[dict[str, Any]]:
        """Add the records of the current process, if any, and return its metadata."""
        if self._process is None:
            return []
        process, self._process = self._process, None
        _ColumnBuilder(process, collected, devices).add()
        return [process.metadata]

    def take(self, text: JsonStream, key: str, inner: str) -> None:
        """Read the value of a key.

        Raises:
            DamagedJsonError: the value is damaged.
            UnexpectedJsonError: the value has another type.
            TooLargeError: the file has too many items for its size.
            TraceError: the file was written by a version before 1.0.
        """
        process = self._process
        assert process
        match key, inner:
            case "metadata", "":
                process.metadata = _object(text.value(key))
            case "agents", "":
                process.agents += chain.from_iterable(self._decoded(text, key, Agent))
                if any(agent.type == _GPU and agent.number < 0 for agent in process.agents):
                    raise TraceError(
                        self._path,
                        "it was written by rocprofv3 before 1.0, whose JSON is not supported: its GPUs have no "
                        '"logical_node_type_id"',
                    )
            case "counters", "":
                found = chain.from_iterable(self._decoded(text, key, HardwareCounter))
                process.counters.update((counter.id.handle, counter.name) for counter in found)
            case "kernel_symbols", "":
                for symbols in self._decoded(text, key, KernelSymbol):
                    process.add_symbols(symbols)
            case "strings", "buffer_records":
                process.kinds += chain.from_iterable(self._decoded(text, inner, RecordKind))
            case "strings", "marker_api":
                labels = chain.from_iterable(self._decoded(text, inner, MarkerText))
                process.labels.update((label.key, label.value) for label in labels)
            case (("callback_records" | "buffer_records"), name) if name in _LISTS and name not in process.rows:
                self._take_records(process, text, name)
            case _:
                text.skip()

    def _take_records(self, process: _ProcessRecords, text: JsonStream, name: str) -> None:
        rows: list[Array] = []
        try:
            if name == _COUNTED:
                for number, counted in self._records(text, name, CountedDispatch):
                    process.add_values(counted, sum(map(len, rows)))
                    rows.append(_rows(number, counted))
            else:
                for number, records in self._records(text, name, _RECORDS.get(name, ApiCall)):
                    rows.append(_rows(number, records))
        finally:  # keeps the records before any damage
            if rows:
                process.rows[name] = rows

    def _decoded(self, text: JsonStream, name: str, kind: type[_T]) -> Iterator[list[_T]]:
        return (records for _, records in self._records(text, name, kind))

    def _records(self, text: JsonStream, name: str, kind: type[_T]) -> Iterator[tuple[Sequence[int], list[_T]]]:
        """Yield the readable records, some at a time, and their indexes in the list."""
        decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        count = 0
        for items in text.items(name):
            wrong = ""
            places: Sequence[int]
            try:
                records = decode(b"[" + items + b"]")
                size = len(records)
                places = range(count, count + size)
            except DECODE_ERRORS:
                raws, wrong = split_items(items)
                size = len(raws)
                read = list(_one_by_one(raws, kind, self._lost))
                places, records = [count + place for place, _ in read], [record for _, record in read]
            count += size
            self.items += size
            if self.items > self._record_limit:
                raise TooLargeError(f"it holds more than {self._record_limit:,} records, too many for its size")
            if records:
                yield places, records
            if wrong:
                raise DamagedJsonError(wrong)


class _ProcessRecords:
    """The records of one process, with numbers for names that may come later in the file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.metadata: dict[str, Any] = {}
        self.agents: list[Agent] = []
        self.counters: dict[int, str] = {}
        self.symbols: dict[int, tuple[str, int]] = {}  # name and registers
        self.kinds: list[RecordKind] = []
        self.labels: dict[int, str] = {}
        self.rows: dict[str, list[Array]] = {}  # records by list, as `_rows` makes them
        self.values: list[tuple[Array, Array]] = []  # row and counter; value

    def add_symbols(self, symbols: list[KernelSymbol]) -> None:
        """Add the names of kernels; the last name of an id counts."""
        for symbol in symbols:
            self.symbols[symbol.id] = symbol.formatted or symbol.demangled or symbol.name, symbol.registers

    def add_values(self, counted: list[CountedDispatch], first: int) -> None:
        """Add the counter values of kernels, the first of which has the index ``first``."""
        found = [
            (row, v.counter.handle, v.value)
            for row, dispatch in enumerate(counted, first)
            for v in dispatch.values
        ]
        rows, handles, values = zip(*found, strict=True) if found else ((), (), ())
        self.values.append((np.array([rows, handles], np.int64), np.array(values, np.float64)))


class _ColumnBuilder:
    """Adds the records of one process to the columns of a trace."""

    def __init__(self, process: _ProcessRecords, collected: RocmColumns, devices: dict[int, Device]) -> None:
        pid = process.metadata.get("pid", process.number)
        self._pid = pid if isinstance(pid, int) else str(pid)
        self._process = process
        self._collected = collected
        self._gpus: dict[int, Device] = {}  # by the handle of the agent
        for agent in process.agents:
            if agent.type == _GPU:
                device = self._gpus[agent.id.handle] = _device(agent)
                devices.setdefault(device.id, device)

    def add(self) -> None:
        """Add all records."""
        if not self._process.rows:  # 0.5 ms for each process otherwise
            return
        kernels, dispatches = (
            self._columns("kernel_dispatch", KernelDispatch),
            self._columns(_COUNTED, KernelDispatch),
        )
        self._add_counters(dispatches)
        self._add_kernels(kernels if len(kernels["event"]) else dispatches)
        self._add_memcpys(self._part("memory_copy", MemoryCopy))
        self._add_markers(self._part("marker_api", ApiCall))
        for name in _APIS:
            self._collected.add_calls(self._part(name, ApiCall))
        for name in _MEMORY:
            part = self._part(name, ApiCall)
            part["category"] = np.full(len(part["event"]), self._collected.strings[name])
            self._collected.add("others", part)

    def _part(self, name: str, kind: type[Record]) -> dict[str, Array]:
        part = self._columns(name, kind)
        self._name(part)
        return part

    def _columns(self, name: str, kind: type[Record]) -> dict[str, Array]:
        names, number = ("event", *kind.COLUMNS), self._process.number
        rows = np.concatenate([np.empty((0, len(names)), np.int64), *self._process.rows.pop(name, [])])
        part = dict(zip(names, rows.T, strict=True))
        part["event"] = part["event"] + ((number << PROCESS_BIT) + (_LISTS.index(name) << _LIST))
        part["thread"] = self._collected.thread(self._pid, part["thread"])
        part["internal"] = part["correlation"]
        for column in ("correlation", "ancestor"):
            if column in part:
                part[column] = process_unique_ids(part[column], number, lowest=1)
        for column in ("queue", "stream"):
            if column in part:
                part[column] = process_unique_ids(part[column], number)
        return part

    def _name(self, part: dict[str, Array]) -> None:
        """Replace the numbers of kinds and operations by numbers of strings."""
        kinds, strings = self._process.kinds, self._collected.strings

        def kind(number: int) -> int:
            return strings[kinds[number].kind] if 0 <= number < len(kinds) else 0

        def operation(pair: int) -> int:
            number, place = pair >> 32, pair & (1 << 32) - 1
            names = kinds[number].operations if number < len(kinds) else []
            return strings[names[place] if place < len(names) else f"operation {place} of kind {number}"]

        pair = ((part["kind"] & (1 << 31) - 1) << 32) | (part["operation"] & (1 << 32) - 1)
        part["name"] = part["operation"] = map_unique(pair, operation)
        part["kind"] = map_unique(part["kind"], kind)

    def _gpu(self, agents: Array) -> Array:
        """Return the numbers of GPUs; -1 for CPUs."""
        return map_unique(agents, lambda handle: self._gpus[handle].id if handle in self._gpus else -1)

    def _add_kernels(self, part: dict[str, Array]) -> None:
        strings, symbols = self._collected.strings, self._process.symbols

        def name(kernel: int) -> int:
            known = symbols.get(kernel, ("", -1))[0]
            return strings[known or f"kernel {kernel}"]

        part["name"] = map_unique(part["kernel"], name)
        part["registers"] = map_unique(part["kernel"], lambda kernel: symbols.get(kernel, ("", -1))[1])
        part["device"] = self._gpu(part["agent"])
        part["sms"] = map_unique(
            part["agent"], lambda handle: self._gpus[handle].sms if handle in self._gpus else 0
        )
        part["grid"] = np.stack([part[axis] for axis in "xyz"], axis=1)
        part["workgroup"] = np.stack([part[axis] for axis in "XYZ"], axis=1)
        self._collected.add_kernels(part)

    def _add_memcpys(self, part: dict[str, Array]) -> None:
        source, target = self._gpu(part["source"]), self._gpu(part["target"])
        part["device"] = np.where(source >= 0, source, target)
        self._collected.add_memcpys(part)

    def _add_markers(self, part: dict[str, Array]) -> None:
        labels = self._process.labels
        part["text"] = map_unique(part["internal"], lambda call: self._collected.strings[labels.get(call, "")])
        self._collected.add_markers(part)

    def _add_counters(self, dispatches: dict[str, Array]) -> None:
        """Add the counters of each kernel, summed over their instances."""
        strings, names = self._collected.strings, self._process.counters
        keys = np.concatenate([np.empty((2, 0), np.int64), *(keys for keys, _ in self._process.values)], axis=1)
        values = np.concatenate([np.empty(0), *(values for _, values in self._process.values)])
        keys[1] = map_unique(keys[1], lambda handle: strings[names.get(handle, f"counter {handle}")])
        different, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        order = np.argsort(first)  # in the order of the file
        sums = np.bincount(which.reshape(-1), values, different.shape[1])[order]
        rows, name = different[:, order]
        part = {column: dispatches[column][rows] for column in ("start_ns", "duration_ns", "thread", "event")}
        self._collected.add("counters", part | {"name": name, "value": sums})


def _object(text: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(text.decode("utf-8", "replace"))
    except DECODE_ERRORS as error:
        raise DamagedJsonError(str(error)) from None
    if not isinstance(content, dict):
        raise UnexpectedJsonError("Expected an object as metadata")
    return content


def _rows(places: Sequence[int], records: Sequence[Record | CountedDispatch]) -> Array:
    """Return one row per record: its index in the list, and the values of its `COLUMNS`."""
    width = 1 + len(records[0].COLUMNS)
    flat = chain.from_iterable((place, *record.row()) for place, record in zip(places, records, strict=True))
    return np.fromiter(flat, np.int64, len(records) * width).reshape(-1, width)


def _device(agent: Agent) -> Device:
    return Device(
        agent.number,
        agent.product or agent.name,
        agent.sms,
        agent.waves_per_sm * agent.threads_per_wave,
        sum(bank.size_in_bytes for bank in agent.memory),
    )


def _one_by_one(raws: list[Raw], kind: type[_T], lost: ReadLosses) -> Iterator[tuple[int, _T]]:
    """Yield the readable records with their indexes."""
    decode: Callable[[Raw], _T] = msgspec.json.Decoder(kind).decode
    for place, raw in enumerate(raws):
        try:
            yield place, decode(raw)
        except DECODE_ERRORS as error:
            try:
                record = msgspec.convert(clip_integers(decode_record(raw)), kind)
            except DECODE_ERRORS:
                lost.add(f"{_LABELS[kind]}: {error}", events=1, size=memoryview(raw).nbytes)
            else:
                lost.repaired += 1
                lost.add(f"{_LABELS[kind]}, repaired: {error}")
                yield place, record


def _look_up(path: Path, event: int) -> dict[str, Any]:
    if event < 0:
        return {}
    wanted = event >> PROCESS_BIT, _LISTS[event >> _LIST & (1 << PROCESS_BIT - _LIST) - 1]
    place = event & (1 << _LIST) - 1
    with path.open("rb") as file:
        text = JsonStream(read_blocks(path, file, ReadLosses()))
        for number, key, inner in sections(text):
            if key in ("callback_records", "buffer_records") and (number, inner) == wanted:
                for items in text.items(inner):
                    raws, _ = split_items(items)
                    if place < len(raws):
                        found: dict[str, Any] = decode_record(raws[place])
                        return found
                    place -= len(raws)
            elif key:
                text.skip()
    return {}
