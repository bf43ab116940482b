"""Reads the JSON that rocprofv3 writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from ..errors import TraceError
from .links import assemble
from .rocm import PROCESS, Collected, each, of_process
from .rocprof_records import (
    Agent,
    Call,
    Copy,
    Counted,
    Counter,
    Kernel,
    Process,
    Record,
    Symbol,
    Text,
)
from .rocprof_text import UNREADABLE, bounded, decoded_file, whole
from .table import Array
from .trace import Device, Lost, Trace

_APIS = ("hip_api", "hsa_api", "rccl_api", "rocdecode_api", "rocjpeg_api")
_MEMORY = ("memory_allocation", "scratch_memory")
_LISTS = ("kernel_dispatch", "memory_copy", "marker_api", *_APIS, *_MEMORY, "counter_collection")
_LIST = 40  # the bit of an event's number where that of its list begins
_GPU = 2

_T = TypeVar("_T")


def read_rocprof(path: Path) -> Trace:
    """Read the JSON of rocprofv3, gzip or plain, of one or more processes.

    Where the file is cut off or damaged, the records before that place are read; see `Trace.lost`.

    Raises:
        TraceError: if it is not such a file.
        OSError: if it cannot be opened.
    """
    lost = Lost()
    collected, devices, metadata = _collect(path, lost)  # the text is gone when the tables are made
    return assemble(
        path,
        "rocprof",
        collected.tables(),
        collected.words,
        collected.threads({}),
        devices=devices,
        metadata=metadata,
        lost=lost,
        look_up=partial(_look_up, path),
    )


def _collect(path: Path, lost: Lost) -> tuple[Collected, list[Device], dict[str, Any]]:
    processes = decoded_file(path, lost)
    most = (1 << 63 - PROCESS) - 1
    if len(processes) > most:
        raise TraceError(path, f"it holds {len(processes):,} processes; up to {most:,} are read")
    collected = Collected()
    devices: dict[int, Device] = {}
    for number, process in enumerate(processes):
        _Reader(number, process, collected, devices, lost).read()
    metadata = {"processes": [process.metadata for process in processes]}
    return collected, [devices[number] for number in sorted(devices)], metadata


class _Reader:
    """Adds what one process recorded."""

    def __init__(
        self, number: int, process: Process, collected: Collected, devices: dict[int, Device], lost: Lost
    ) -> None:
        pid = process.metadata.get("pid", number)
        self._number = number
        self._pid = pid if isinstance(pid, int) else str(pid)
        self._process = process
        self._lists = process.lists()
        self._collected = collected
        self._lost = lost
        self._gpus: dict[int, Device] = {}  # by the handle of the agent
        for agent in self._decoded(process.agents, Agent):
            if agent.type == _GPU:
                device = self._gpus[agent.id.handle] = _device(agent, len(self._gpus))
                devices.setdefault(device.id, device)

    def read(self) -> None:
        counted = list(_records(self._list("counter_collection"), Counted, self._lost))
        kernels = self._part("kernel_dispatch", Kernel)
        dispatches = self._columns("counter_collection", counted)
        self._add_kernels(kernels if len(kernels["event"]) else dispatches)
        self._add_counters(counted, dispatches)
        self._add_copies(self._part("memory_copy", Copy))
        self._add_markers(self._part("marker_api", Call))
        for name in _APIS:
            self._collected.add_calls(self._part(name, Call))
        for name in _MEMORY:
            part = self._part(name, Call)
            part["category"] = np.full(len(part["event"]), self._collected.words[name])
            self._collected.add("others", part)

    def _list(self, name: str) -> list[Raw]:
        return self._lists.get(name, [])

    def _decoded(self, raws: list[Raw], kind: type[_T]) -> Iterator[_T]:
        return (record for _, record in _records(raws, kind, self._lost))

    def _part(self, name: str, kind: type[Record]) -> dict[str, Array]:
        part = self._columns(name, _records(self._list(name), kind, self._lost), kind)
        if "operation" in part:
            self._name(part)
        return part

    def _columns(
        self, name: str, records: Iterable[tuple[int, Record | Counted]], kind: type[Record] = Kernel
    ) -> dict[str, Array]:
        names = ("event", *kind.COLUMNS)
        flat = np.fromiter(chain.from_iterable((i, *record.row()) for i, record in records), np.int64)
        part = dict(zip(names, flat.reshape(-1, len(names)).T, strict=True))
        part["event"] = part["event"] + ((self._number << PROCESS) + (_LISTS.index(name) << _LIST))
        part["thread"] = self._collected.thread(self._pid, part["thread"])
        part["internal"] = part["correlation"]
        for column in ("correlation", "ancestor"):
            if column in part:
                part[column] = of_process(part[column], self._number, lowest=1)
        for column in ("queue", "stream"):
            if column in part:
                part[column] = of_process(part[column], self._number)
        return part

    def _name(self, part: dict[str, Array]) -> None:
        """Turn the numbers of kinds and operations into words."""
        kinds, words = self._process.strings.kinds, self._collected.words

        def kind(number: int) -> int:
            return words[kinds[number].kind] if 0 <= number < len(kinds) else 0

        def operation(pair: int) -> int:
            number, place = pair >> 32, pair & (1 << 32) - 1
            names = kinds[number].operations if number < len(kinds) else []
            return words[names[place] if place < len(names) else f"operation {place} of kind {number}"]

        pair = ((part["kind"] & (1 << 31) - 1) << 32) | (part["operation"] & (1 << 32) - 1)
        part["name"] = part["operation"] = each(pair, operation)
        part["kind"] = each(part["kind"], kind)

    def _gpu(self, agents: Array) -> Array:
        """The numbers of GPUs; -1 is a CPU."""
        return each(agents, lambda handle: self._gpus[handle].id if handle in self._gpus else -1)

    def _add_kernels(self, part: dict[str, Array]) -> None:
        words, used = self._collected.words, set(np.unique(part["kernel"]).tolist())
        names, registers = {}, {}
        for symbol in self._decoded(self._process.symbols, Symbol):
            if symbol.id in used:
                names[symbol.id] = words[symbol.formatted or symbol.demangled or symbol.name]
                registers[symbol.id] = symbol.registers
        part["name"] = each(part["kernel"], lambda kernel: names.get(kernel) or words[f"kernel {kernel}"])
        part["registers"] = each(part["kernel"], lambda kernel: registers.get(kernel, -1))
        part["device"] = self._gpu(part["agent"])
        part["sms"] = each(part["agent"], lambda handle: self._gpus[handle].sms if handle in self._gpus else 0)
        part["grid"] = np.stack([part[axis] for axis in "xyz"], axis=1)
        part["workgroup"] = np.stack([part[axis] for axis in "XYZ"], axis=1)
        self._collected.add_kernels(part)

    def _add_copies(self, part: dict[str, Array]) -> None:
        source, target = self._gpu(part["source"]), self._gpu(part["target"])
        part["device"] = np.where(source >= 0, source, target)
        self._collected.add_copies(part)

    def _add_markers(self, part: dict[str, Array]) -> None:
        texts = {text.key: text.value for text in self._decoded(self._process.strings.texts, Text)}
        part["text"] = each(part["internal"], lambda call: self._collected.words[texts.get(call, "")])
        self._collected.add_markers(part)

    def _add_counters(self, counted: list[tuple[int, Counted]], dispatches: dict[str, Array]) -> None:
        """Add the values of each kernel; instances of one counter are added up."""
        words = self._collected.words
        names = {counter.id.handle: counter.name for counter in self._decoded(self._process.counters, Counter)}
        sums: dict[tuple[int, int], float] = {}
        for row, (_, record) in enumerate(counted):
            for value in record.values:
                handle = value.counter.handle
                key = row, words[names.get(handle, f"counter {handle}")]
                sums[key] = sums.get(key, 0.0) + value.value
        rows = np.array([row for row, _ in sums], np.int64)
        part = {column: dispatches[column][rows] for column in ("start_ns", "duration_ns", "thread", "event")}
        part["name"] = np.array([name for _, name in sums], np.int64)
        part["value"] = np.array(list(sums.values()))
        self._collected.add("counters", part)


def _device(agent: Agent, index: int) -> Device:
    return Device(
        agent.number if agent.number >= 0 else index,  # of versions that did not count GPUs apart from CPUs
        agent.product or agent.name,
        agent.sms,
        agent.waves_per_sm * agent.threads_per_wave,
        sum(bank.size_in_bytes for bank in agent.memory),
    )


def _records(raws: list[Raw], kind: type[_T], lost: Lost) -> Iterator[tuple[int, _T]]:
    """The records that can be read, with their places in the list."""
    decode = msgspec.json.Decoder(kind).decode
    for place, raw in enumerate(raws):
        try:
            yield place, decode(raw)
        except UNREADABLE as error:
            try:
                record = msgspec.convert(bounded(whole(raw)), kind)
            except UNREADABLE:
                lost.add(f"{kind.__name__.lower()}: {error}", events=1, size=memoryview(raw).nbytes)
            else:
                lost.repaired += 1
                lost.add(f"{kind.__name__.lower()}, mended: {error}")
                yield place, record


def _look_up(path: Path, event: int) -> dict[str, Any]:
    if event < 0:
        return {}
    process = decoded_file(path, Lost())[event >> PROCESS]
    name = _LISTS[event >> _LIST & (1 << PROCESS - _LIST) - 1]
    found: dict[str, Any] = whole(process.lists()[name][event & (1 << _LIST) - 1])
    return found
