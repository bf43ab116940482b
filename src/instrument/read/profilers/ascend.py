"""Reads ``trace_view.json`` of torch_npu's profiler: operators of PyTorch and the work of an Ascend NPU."""

from __future__ import annotations

import json
import mmap
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct

from ...base.errors import TraceError
from ..kineto.text import event_limit, json_object, text_limit
from ..tables.counters import counter_name
from ..tables.links import assemble, link_coverage
from ..tables.nest import NestedRanges
from ..tables.steps import StepIndex
from ..tables.table import COLUMNS, KERNEL, MEMCPY, Interner, Strings, Tables, TooLargeError, natural
from ..tables.trace import Device, ReadLosses, Thread, Trace

HARDWARE = b"Ascend Hardware"
"""The name of the process that holds the work of the NPU."""

_HOST, _CANN = "Python", "CANN"
_COLLECTIVES = {"HCCL", "Communication"}  # the process, before and since CANN 8
_GROUP = re.compile(r"^Group \d+ Communication$")
_COPIES = {"PCIE_DMA_SQE", "SDMA_SQE"}
_COMPUTE = re.compile(r"^(?:AI_CORE|AI_CPU|AI_VECTOR_CORE|MIX_AIC|MIX_AIV|DSA_SQE|HCCL_AI_CPU|KERNEL_\w+)$")
_LAYER = re.compile(r"^\w+@")  # "AscendCL@", "Node@", "Hccl@"
_COLLECTIVE = re.compile(r"^hcom_([A-Za-z]+)_")
_TO_NPU = "async_npu"  # the category of arrows from an operator to the work that it asked for
_BETWEEN = re.compile(r";\s*")
_TIME = re.compile(r"(\d{1,16})(?:\.(\d+))?")
_LATEST_US = 2.3e15  # in ns, sums and differences fit into 64 bits


class _Event(Struct, gc=False):
    """The fields of an event. Times are in us, as text with three decimals."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: str | float = 0.0
    dur: str | float = 0.0
    id: str | int | float = ""
    args: Raw = Raw(b"{}")


class _WorkArgs(Struct, gc=False):
    connection_id: int | str = -1
    task: str = msgspec.field(default="", name="Task Type")
    dtype: str = msgspec.field(default="", name="data_type")
    count: int | str = -1


class _OperatorArgs(Struct, gc=False):
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    shapes: str = msgspec.field(default="", name="Input Dims")
    types: str = msgspec.field(default="", name="Input type")


class _NameArgs(Struct, gc=False):
    name: str = ""


_decode = msgspec.json.Decoder(list[_Event]).decode


def names_ascend(path: Path) -> bool:
    """Return whether a file, which is not empty, names an Ascend NPU anywhere."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(HARDWARE) >= 0


def read_ascend(path: Path) -> Trace:
    """Read a trace of an Ascend NPU: its kernels and memcpys are GPU work, its collectives are kernels.

    An operator asks for work on the thread of the program, and CANN launches it on another: work is linked to the
    CANN call that launched it, and to the operator, region and step in which it was asked for. The parts of a
    collective, and other tasks of the hardware, are in `Trace.others`.

    Raises:
        TraceError: the file is damaged.
        TooLargeError: the file holds more than a trace of its size can.
        OSError: the file cannot be opened.
    """
    try:
        events = _decode(path.read_bytes())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(path, f"it is damaged: {error}") from None
    if len(events) > event_limit(path):
        raise TooLargeError(f"it holds more than {event_limit(path):,} events, too many for its size")
    reader = _Reader(events, Strings(text_limit(path)))
    columns = reader.columns()
    trace = assemble(
        path,
        "ascend",
        columns,
        reader.strings,
        [Thread(*place, reader.thread_names.get(place, "")) for place in reader.threads],
        devices=[Device(0, "Ascend NPU")],
        metadata={},
        lost=reader.lost,
        look_up=partial(_look_up, path),
    )
    _link_requests(trace, reader.requests)
    return trace


def _look_up(path: Path, event: int) -> dict[str, Any]:
    return json_object(bytes(_decode(path.read_bytes())[event].args))


class _Reader:
    """Sorts the events of a file into the columns of tables.

    Attributes:
        strings: the numbers of strings.
        threads: the numbers of pairs of process and thread.
        thread_names: the names of threads.
        requests: for the start of work in ns, the time and the thread of the operator that asked for it.
        lost: the events that could not be read.
    """

    def __init__(self, events: Sequence[_Event], strings: Strings) -> None:
        self.strings = strings
        self.threads: Interner[tuple[Any, Any]] = Interner()
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.requests: dict[int, tuple[int, int]] = {}
        self.lost = ReadLosses()
        self._events = events
        self._processes: dict[int | str, str] = {}
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def columns(self) -> Tables:
        """Return the columns of each table."""
        for event in self._events:
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                name = _args(_NameArgs, event).name
                if event.name == "process_name":
                    self._processes[event.pid] = name
                else:
                    self.thread_names[event.pid, event.tid] = name
        host = next((pid for pid, name in self._processes.items() if name == _HOST), 0)
        for number, event in enumerate(self._events):
            if event.ph == "X":
                self._add(number, event, host)
            elif event.ph == "C":
                self._count(number, event)
            elif event.ph == "s" and event.cat == _TO_NPU:
                self.requests[natural(event.id)] = _ns(event.ts) or 0, self.threads[event.pid, event.tid]
        return {
            table: {
                name: np.array([row.get(name, missing) for row in rows])
                for name, (_, missing) in COLUMNS[table].items()
                if name in names
            }
            for table, rows in self._rows.items()
            for names in [set().union(*rows)]
        }

    def _add(self, number: int, event: _Event, host: int | str) -> None:
        process, start, duration = self._processes.get(event.pid, ""), _ns(event.ts), _ns(event.dur)
        if start is None or duration is None:
            self.lost.add("times that are not microseconds", events=1)
            return
        row = {
            "start_ns": start,
            "duration_ns": max(duration, 0),
            "name": self.strings[event.name],
            "event": number,
            "thread": self.threads[event.pid, event.tid],
        }
        if event.cat == "cpu_op":
            args = _args(_OperatorArgs, event)
            lists = {"shapes": _lists(args.shapes, numbers=True), "types": _lists(args.types, numbers=False)}
            texts = {name: self.strings[text] for name, text in lists.items()}
            self._rows["operators"].append(row | texts | {"sequence": args.sequence})
        elif event.cat in ("user_annotation", "python_function"):
            self._rows["regions" if event.cat == "user_annotation" else "frames"].append(row)
        elif process == _CANN:  # a process of the viewer: its threads are the program's
            name, thread = self.strings[_LAYER.sub("", event.name)], self.threads[host, event.tid]
            about = {"name": name, "thread": thread, "category": self.strings["cann"]}
            correlation = natural(_args(_WorkArgs, event).connection_id)
            self._rows["runtime"].append(row | about | {"correlation": correlation})
        elif work := self._work(event, process):
            self._rows["gpu"].append(row | work)
        else:
            self._rows["others"].append(row | {"category": self.strings[event.cat or process]})

    def _count(self, number: int, event: _Event) -> None:
        """Add a row for each series of a counter."""
        args, start = _args(dict, event), _ns(event.ts)
        for series, value in args.items() if start is not None else ():
            if isinstance(value, (int, float)) and abs(value) < sys.float_info.max:
                name = self.strings[counter_name(event.name, series)]
                where = {"event": number, "thread": self.threads[event.pid, event.tid]}
                self._rows["counters"].append({"start_ns": start, "name": name, "value": value} | where)

    def _work(self, event: _Event, process: str) -> dict[str, int] | None:
        """Return the columns of work on the NPU; None for other tasks, such as events and parts of collectives."""
        args = _args(_WorkArgs, event)
        work = {"device": 0, "stream": natural(event.tid), "correlation": natural(args.connection_id)}
        if process == HARDWARE.decode():
            if _COMPUTE.match(args.task):
                return work | {"category": KERNEL}
            return work | {"category": MEMCPY} if args.task in _COPIES else None
        if process in _COLLECTIVES and _GROUP.match(self.thread_names.get((event.pid, event.tid), "")):
            collective = _COLLECTIVE.match(event.name)
            return work | {
                "category": KERNEL,
                "stream": -1,
                "collective": self.strings[collective[1].lower() if collective else event.name],
                "dtype": self.strings[args.dtype],
                "elements_in": natural(args.count),
            }
        return None


def _args(kind: type[Any], event: _Event) -> Any:
    try:
        return msgspec.json.decode(event.args, type=kind)
    except (msgspec.MsgspecError, RecursionError):
        return kind()


def _ns(us: str | float) -> int | None:
    """Return nanoseconds, exact also for text with the microseconds since 1970; None for what is no time."""
    if not isinstance(us, str):
        return round(us * 1000) if abs(us) < _LATEST_US else None
    time = _TIME.fullmatch(us)
    return int(time[1]) * 1000 + round(int((time[2] or "0").ljust(6, "0")[:6]) / 1000) if time else None


def _lists(text: str, *, numbers: bool) -> str:
    """Return lists that ";" separates as JSON, as torch.profiler writes them: "[[8, 3], []]"."""
    if not text:
        return ""
    parts = _BETWEEN.split(text)
    if not numbers:
        return json.dumps(parts)
    return json.dumps([[int(size) for size in part.split(",") if size.strip().isdecimal()] for part in parts])


def _link_requests(trace: Trace, requests: dict[int, tuple[int, int]]) -> None:
    """Link work to the operator, region and step in which it was asked for."""
    gpu = trace.gpu
    rows = np.array([row for row, start in enumerate(gpu.start_ns.tolist()) if start in requests], np.int64)
    if not len(rows):
        return
    at, thread = np.array([requests[start] for start in gpu.start_ns[rows].tolist()], np.int64).T
    for link, table in (("operator", trace.operators), ("region", trace.regions)):
        gpu[link][rows] = NestedRanges(table.start_ns, table.end_ns, table.thread).innermost_at(at, thread)
    gpu.step[rows] = StepIndex(trace).rows_at(at, thread) if trace.steps else -1
    trace.coverage = {link: link_coverage(gpu, link) for link in trace.coverage}
