"""Writes recordings as rocprofv3 does: its JSON, and its databases in schemas 3 and 4."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

KINDS = {
    "NONE": [],
    "HSA_CORE_API": ["hsa_init", "hsa_signal_store_screlease"],
    "HIP_RUNTIME_API": ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize"],
    "RCCL_API": ["ncclAllReduce"],
    "MARKER_CORE_RANGE_API": ["roctxMarkA", "roctxThreadRangeA", "roctxProcessRangeA"],
    "MARKER_CONTROL_API": ["roctxProfilerPause", "roctxProfilerResume"],
    "MEMORY_COPY": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_DEVICE"],
    "KERNEL_DISPATCH": ["KERNEL_DISPATCH_NONE", "KERNEL_DISPATCH_COMPLETE"],
    "MEMORY_ALLOCATION": ["MEMORY_ALLOCATION_ALLOCATE"],
}
CPU, GPU0, GPU1 = 0, 1, 2
"""Agents; their handles in the JSON are higher by 5000."""


class Call(NamedTuple):
    kind: str
    operation: str
    start: int
    end: int
    correlation: int
    ancestor: int = 0
    text: str = ""
    tid: int = 101


class Kernel(NamedTuple):
    name: str
    start: int
    end: int
    correlation: int
    grid: tuple[int, int, int] = (1024, 1, 1)
    workgroup: tuple[int, int, int] = (256, 1, 1)
    shared_bytes: int = 0
    registers: int = 32
    agent: int = GPU0
    queue: int = 1
    stream: int = 0
    tid: int = 101
    counters: tuple[tuple[str, float], ...] = ()


class Copy(NamedTuple):
    operation: str
    start: int
    end: int
    correlation: int
    bytes: int
    source: int = CPU
    target: int = GPU0
    stream: int = 0
    tid: int = 101


class Allocation(NamedTuple):
    start: int
    end: int
    bytes: int
    tid: int = 101


class Recording(NamedTuple):
    calls: Sequence[Call] = ()
    kernels: Sequence[Kernel] = ()
    copies: Sequence[Copy] = ()
    allocations: Sequence[Allocation] = ()
    pid: int = 100
    environment: Mapping[str, str] = MappingProxyType({})


_RANGE = "MARKER_CORE_RANGE_API"
STEP = Recording(
    calls=[
        Call(_RANGE, "roctxThreadRangeA", 100, 9000, 1, text="ProfilerStep#3"),
        Call(_RANGE, "roctxThreadRangeA", 200, 5000, 2, text="forward"),
        Call("HIP_RUNTIME_API", "hipLaunchKernel", 300, 400, 3),
        Call("HSA_CORE_API", "hsa_signal_store_screlease", 350, 360, 4, ancestor=3),
        Call("HIP_RUNTIME_API", "hipMemcpyAsync", 500, 600, 5),
        Call(_RANGE, "roctxMarkA", 700, 700, 6, text="saved"),
        Call("MARKER_CONTROL_API", "roctxProfilerPause", 710, 720, 7),
        Call("RCCL_API", "ncclAllReduce", 800, 1000, 8),
        Call("HIP_RUNTIME_API", "hipLaunchKernel", 850, 900, 9, ancestor=8, tid=102),
    ],
    kernels=[
        Kernel("gemm", 1000, 2000, 4, grid=(1000, 3, 1), shared_bytes=64, registers=96, stream=2),
        Kernel("allreduce", 1500, 3000, 9, grid=(512, 2, 2), workgroup=(64, 2, 1), agent=GPU1, stream=5, tid=102),
        Kernel("before", 50, 90, 77),
    ],
    copies=[
        Copy("MEMORY_COPY_HOST_TO_DEVICE", 2000, 2500, 5, 4096, stream=2),
        Copy("MEMORY_COPY_DEVICE_TO_DEVICE", 2600, 2700, 0, 8, source=GPU1, target=GPU0),
    ],
    allocations=[Allocation(10, 20, 77)],
)


def as_json(recordings: Sequence[Recording], *, dispatches: bool = True) -> dict[str, Any]:
    """Return the content of the JSON file; without dispatches, kernels occur with their counters only."""
    return {"rocprofiler-sdk-tool": [_process(recording, dispatches) for recording in recordings]}


def write_json(path: Path, recordings: Sequence[Recording]) -> Path:
    path.write_text(json.dumps(as_json(recordings), indent=1))
    return path


def _handle(number: int) -> dict[str, int]:
    return {"handle": number}


def _axes(sizes: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip("xyz", sizes, strict=True))


def _agent(number: int) -> dict[str, Any]:
    gpu = number != CPU
    return {
        "id": _handle(5000 + number),
        "type": 2 if gpu else 1,
        "cu_count": 304 if gpu else 64,
        "wave_front_size": 64,
        "max_waves_per_cu": 32,
        "name": "gfx942" if gpu else "EPYC",
        "product_name": "AMD Instinct MI300X" if gpu else "EPYC",
        "node_id": number,
        "logical_node_type_id": number - 1 if gpu else 0,
        "mem_banks": [{"size_in_bytes": 1 << 30}, {"size_in_bytes": 2 << 30}],
        "hive_id": (1 << 64) - 1,
    }


def _record(kind: str, operation: str, item: Any) -> dict[str, Any]:
    correlation = getattr(item, "correlation", 0)
    ids = {"internal": correlation, "external": (1 << 64) - 1, "ancestor": getattr(item, "ancestor", 0)}
    return {
        "size": 88,
        "kind": list(KINDS).index(kind),
        "operation": KINDS[kind].index(operation),
        "thread_id": item.tid,
        "correlation_id": ids,
        "start_timestamp": item.start,
        "end_timestamp": item.end,
    }


def _dispatch(number: int, kernel: Kernel) -> dict[str, Any]:
    info = {
        "agent_id": _handle(5000 + kernel.agent),
        "queue_id": _handle(kernel.queue),
        "kernel_id": number + 1,
        "dispatch_id": number + 1,
        "private_segment_size": 0,
        "group_segment_size": kernel.shared_bytes,
        "workgroup_size": _axes(kernel.workgroup),
        "grid_size": _axes(kernel.grid),
    }
    record = _record("KERNEL_DISPATCH", "KERNEL_DISPATCH_COMPLETE", kernel)
    return record | {"dispatch_info": info, "stream_id": _handle(kernel.stream)}


def _copy(copy: Copy) -> dict[str, Any]:
    return _record("MEMORY_COPY", copy.operation, copy) | {
        "src_agent_id": _handle(5000 + copy.source),
        "dst_agent_id": _handle(5000 + copy.target),
        "bytes": copy.bytes,
        "stream_id": _handle(copy.stream),
    }


def _process(recording: Recording, dispatches: bool) -> dict[str, Any]:
    counters = sorted({name for kernel in recording.kernels for name, _ in kernel.counters})
    counted = [
        {
            "thread_id": kernel.tid,
            "dispatch_data": _dispatch(number, kernel),
            "records": [{"counter_id": _handle(counters.index(n)), "value": v} for n, v in kernel.counters],
        }
        for number, kernel in enumerate(recording.kernels)
        if kernel.counters
    ]
    calls = {
        name: [_record(c.kind, c.operation, c) for c in recording.calls if c.kind.startswith(prefix)]
        for name, prefix in (("hip_api", "HIP"), ("hsa_api", "HSA"), ("rccl_api", "RCCL"), ("marker_api", "MARK"))
    }
    allocations = [
        _record("MEMORY_ALLOCATION", "MEMORY_ALLOCATION_ALLOCATE", item)
        | {"address": "0x00007f0000000000", "allocation_size": item.bytes}
        for item in recording.allocations
    ]
    return {
        "metadata": {"pid": recording.pid, "command": ["python", "train.py"]},
        "agents": [_agent(number) for number in (CPU, GPU0, GPU1)],
        "counters": [{"id": _handle(number), "name": name} for number, name in enumerate(counters)],
        "strings": {
            "buffer_records": [{"kind": kind, "operations": list(names)} for kind, names in KINDS.items()],
            "marker_api": [{"key": call.correlation, "value": call.text} for call in recording.calls if call.text],
        },
        "kernel_symbols": [
            {
                "kernel_id": number + 1,
                "kernel_name": f"_Z{kernel.name}.kd",
                "arch_vgpr_count": kernel.registers,
                "formatted_kernel_name": kernel.name,
                "demangled_kernel_name": f"{kernel.name} [clone .kd]",
            }
            for number, kernel in enumerate(recording.kernels)
        ],
        "callback_records": {"counter_collection": counted},
        "buffer_records": {
            "kernel_dispatch": [_dispatch(*item) for item in enumerate(recording.kernels)] if dispatches else [],
            "memory_copy": [_copy(copy) for copy in recording.copies],
            **calls,
            "memory_allocation": allocations,
            "scratch_memory": [],
        },
    }


_TABLES = {
    "string": "string",
    "metadata": "tag value",
    "info_node": "machine_id hostname",
    "info_process": "nid ppid pid init fini start end command environment extdata",
    "info_thread": "nid pid tid name",
    "info_agent": "nid pid type absolute_index logical_index type_index name product_name extdata",
    "info_stream": "nid pid name",
    "info_queue": "nid pid name",
    "info_kernel_symbol": "nid pid kernel_name display_name arch_vgpr_count",
    "info_pmc": "nid pid agent_id name symbol",
    "track": "nid pid tid name_id",
    "event": "category_id stack_id parent_stack_id correlation_id extdata",
    "region": "nid pid tid start end name_id event_id",
    "sample": "track_id timestamp event_id",
    "pmc_event": "event_id pmc_id value",
    "kernel_dispatch": "nid pid tid agent_id kernel_id dispatch_id queue_id stream_id start end "
    "group_segment_size workgroup_size_x workgroup_size_y workgroup_size_z "
    "grid_size_x grid_size_y grid_size_z event_id",
    "memory_copy": "nid pid tid start end name_id dst_agent_id src_agent_id size queue_id stream_id event_id",
    "memory_allocate": "nid pid tid agent_id type level start end address size event_id",
}

_EVENT = "JOIN rocpd_event E ON E.id = X.event_id AND E.guid = X.guid "
_CATEGORY = "(SELECT string FROM rocpd_string WHERE id = E.category_id AND guid = E.guid) AS category"
_WHERE_AND_WHEN = (
    "X.id, X.guid, X.nid, (SELECT pid FROM rocpd_info_process P WHERE P.id = X.pid AND P.guid = X.guid) AS pid, "
    "(SELECT tid FROM rocpd_info_thread T WHERE T.id = X.tid AND T.guid = X.guid) AS tid, "
    f"X.[start], X.[end], X.[end] - X.[start] AS duration, {_CATEGORY}, E.stack_id, E.parent_stack_id, "
)
_NAME = "(SELECT string FROM rocpd_string S WHERE S.id = X.name_id AND S.guid = X.guid) AS name"


def _sides() -> str:
    return ", ".join(
        f"(SELECT {column} FROM rocpd_info_agent A WHERE A.id = X.{side}_agent_id AND A.guid = X.guid) "
        f"AS {side}_agent_{column}"
        for side in ("src", "dst")
        for column in ("type", "type_index")
    )


def _views(schema: int) -> dict[str, str]:
    """Return the views of a schema; column names differ between 3 and 4."""
    shared, registers, external = (
        ("lds_size", "vgpr_count", "corr_id")
        if schema == 3
        else ("lds_block_size", "arch_vgpr_count", "correlation_id")
    )
    when = f"{_WHERE_AND_WHEN} E.correlation_id AS {external}, X.event_id, "
    sizes = ", ".join(f"grid_size_{a} AS grid_{a}, workgroup_size_{a} AS workgroup_{a}" for a in "xyz")
    counters = (
        "SELECT K.guid, K.pid, K.tid, K.dispatch_id, K.[start], K.[end], "
        + (
            "I.name AS counter_name, sum(X.value) AS value "
            if schema == 3
            else "I.name AS pmc_name, X.value AS pmc_value "
        )
        + "FROM rocpd_pmc_event X JOIN rocpd_info_pmc I ON I.id = X.pmc_id AND I.guid = X.guid "
        "JOIN kernels K ON K.event_id = X.event_id AND K.guid = X.guid "
        + ("GROUP BY K.guid, K.dispatch_id, I.name" if schema == 3 else "")
    )
    return {
        "processes": "SELECT N.id AS nid, N.hostname, P.guid, P.ppid, P.pid, P.init, P.fini, P.command "
        "FROM rocpd_info_process P JOIN rocpd_info_node N ON N.id = P.nid AND N.guid = P.guid",
        "threads": "SELECT P.guid, P.pid, T.tid, T.name FROM rocpd_info_thread T "
        "JOIN rocpd_info_process P ON P.id = T.pid AND P.guid = T.guid",
        "regions": f"SELECT {when} {_NAME}, E.extdata FROM rocpd_region X {_EVENT}",
        "samples": f"SELECT X.id, X.guid, {_CATEGORY}, {_NAME.replace('X.', 'T.')}, T.nid, T.pid, "
        "T.tid, X.timestamp, X.event_id, E.stack_id, E.parent_stack_id, E.extdata FROM rocpd_sample X "
        f"{_EVENT} JOIN rocpd_track T ON T.id = X.track_id AND T.guid = X.guid",
        "kernels": f"SELECT {when} K.display_name AS name, A.type_index AS agent_type_index, "
        f"A.type AS agent_type, X.kernel_id, X.dispatch_id, X.stream_id, X.queue_id, {sizes}, "
        f"X.group_segment_size AS {shared}, K.arch_vgpr_count AS {registers} "
        f"FROM rocpd_kernel_dispatch X {_EVENT} "
        "JOIN rocpd_info_agent A ON A.id = X.agent_id AND A.guid = X.guid "
        "JOIN rocpd_info_kernel_symbol K ON K.id = X.kernel_id AND K.guid = X.guid",
        "memory_copies": f"SELECT {when} {_NAME}, X.stream_id, X.queue_id, X.size, {_sides()} "
        f"FROM rocpd_memory_copy X {_EVENT}",
        "memory_allocations": f"SELECT {when} X.type, X.level, X.address, X.size "
        f"FROM rocpd_memory_allocate X {_EVENT}",
        "counters_collection" if schema == 3 else "kernel_pmc_events": counters,
    }


def write_rocpd(path: Path, recordings: Sequence[Recording], schema: int = 3) -> Path:
    """Write a database of one process, or of several merged ones, each with its own tables."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        for number, recording in enumerate(recordings):
            _Writer(connection, f"guid-{number}", recording).write()
        for table in _TABLES:
            each = " UNION ALL ".join(f"SELECT * FROM rocpd_{table}_{n}" for n in range(len(recordings)))
            connection.execute(f"CREATE VIEW rocpd_{table} AS {each}")
        for view, query in _views(schema).items():
            connection.execute(f"CREATE VIEW {view} AS {query}")
    return path


class _Writer:
    def __init__(self, connection: sqlite3.Connection, guid: str, recording: Recording) -> None:
        self._connection = connection
        self._guid = guid
        self._suffix = guid.removeprefix("guid-")
        self._recording = recording
        self._strings: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        for table, columns in _TABLES.items():
            names = ", ".join(f"[{column}]" for column in columns.split())
            connection.execute(
                f"CREATE TABLE rocpd_{table}_{self._suffix} (id INTEGER PRIMARY KEY, guid, {names})"
            )

    def _add(self, table: str, **values: Any) -> int:
        values["guid"] = self._guid
        names, marks = ", ".join(f"[{name}]" for name in values), ", ".join("?" * len(values))
        query = f"INSERT INTO rocpd_{table}_{self._suffix} ({names}) VALUES ({marks})"
        return self._connection.execute(query, tuple(values.values())).lastrowid or 0

    def _string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = self._add("string", string=text)
        return self._strings[text]

    def _place(self, tid: int) -> dict[str, int]:
        pid = self._recording.pid
        if tid not in self._threads:
            self._threads[tid] = self._add("info_thread", nid=1, pid=pid, tid=tid, name=f"thread {tid}")
        return {"nid": 1, "pid": pid, "tid": self._threads[tid]}

    def _event(self, category: str, item: Any) -> dict[str, int]:
        text = getattr(item, "text", "")
        event = self._add(
            "event",
            category_id=self._string(category),
            stack_id=getattr(item, "correlation", 0),
            parent_stack_id=getattr(item, "ancestor", 0),
            correlation_id=0,
            extdata=json.dumps({"message": text} if text else {}),
        )
        return {"event_id": event}

    def write(self) -> None:
        recording = self._recording
        self._add("info_node", machine_id="m", hostname="node")
        self._add("metadata", tag="schema_version", value="3")
        environment = json.dumps(dict(recording.environment))
        self._add("info_process", id=recording.pid, nid=1, pid=recording.pid, environment=environment)
        for number in (CPU, GPU0, GPU1):
            agent = _agent(number)
            kind = "CPU" if number == CPU else "GPU"
            named = {name: agent[name] for name in ("name", "product_name")}
            index = agent["logical_node_type_id"]
            self._add("info_agent", id=number, type=kind, type_index=index, extdata=json.dumps(agent), **named)
        for call in recording.calls:
            self._call(call)
        for kernel in recording.kernels:
            self._kernel(kernel)
        for copy in recording.copies:
            self._add(
                "memory_copy",
                **self._place(copy.tid) | self._event("MEMORY_COPY", copy) | _span(copy),
                name_id=self._string(copy.operation),
                src_agent_id=copy.source,
                dst_agent_id=copy.target,
                size=copy.bytes,
                stream_id=copy.stream,
            )
        for item in recording.allocations:
            place = self._place(item.tid) | self._event("MEMORY_ALLOCATION", item) | _span(item)
            self._add("memory_allocate", **place, type="ALLOC", level="REAL", size=item.bytes)

    def _call(self, call: Call) -> None:
        place, event = self._place(call.tid), self._event(call.kind, call)
        if call.start != call.end:
            name = self._string(call.operation)
            self._add("region", id=call.correlation, **place | event | _span(call), name_id=name)
        else:
            track = self._add("track", nid=1, pid=place["pid"], tid=call.tid, name_id=self._string(call.kind))
            self._add("sample", id=call.correlation, track_id=track, timestamp=call.start, **event)

    def _kernel(self, kernel: Kernel) -> None:
        symbol = self._add("info_kernel_symbol", display_name=kernel.name, arch_vgpr_count=kernel.registers)
        event = self._event("KERNEL_DISPATCH", kernel)
        sizes = {f"grid_size_{axis}": size for axis, size in _axes(kernel.grid).items()}
        sizes |= {f"workgroup_size_{axis}": size for axis, size in _axes(kernel.workgroup).items()}
        self._add(
            "kernel_dispatch",
            **self._place(kernel.tid) | event | _span(kernel) | sizes,
            agent_id=kernel.agent,
            kernel_id=symbol,
            dispatch_id=symbol,
            queue_id=kernel.queue,
            stream_id=kernel.stream,
            group_segment_size=kernel.shared_bytes,
        )
        for name, value in kernel.counters:
            self._add("pmc_event", **event, pmc_id=self._add("info_pmc", name=name, symbol=name), value=value)


def _span(item: Any) -> dict[str, int]:
    return {"start": item.start, "end": item.end}


# The CSV files of a process

CSV_KERNELS = (
    '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id",'
    '"Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count",'
    '"Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"\n'
    '"KERNEL_DISPATCH","Agent 4",17,2,101,1,49,"void add<float>(float*, int)",7,2000,2900,'
    "512,0,8,0,16,64,1,1,1024,4,1\n"
)
_CSV_CALLS = (
    '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
    '"HIP_RUNTIME_API","hipLaunchKernel",101,101,7,1000,1100\n'
    '"HIP_RUNTIME_API","hipMemcpyAsync",101,101,8,1200,1300\n'
)
_CSV_MARKERS = _CSV_CALLS.partition("\n")[0] + (
    '\n"MARKER_CORE_RANGE_API","forward",101,101,5,900,1500\n"MARKER_CORE_API","roctxGetThreadId",101,101,6,1600,1601\n'
)
_CSV_COPIES = (
    '"Kind","Direction","Stream_Id","Source_Agent_Id","Destination_Agent_Id","Correlation_Id","Start_Timestamp",'
    '"End_Timestamp"\n"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE",2,"Agent 0","Agent 4",8,3000,3400\n'
)
_CSV_AGENTS = (
    '"Logical_Node_Id","Agent_Type","Wave_Front_Size","Cu_Count","Max_Waves_Per_Cu","Product_Name"\n'
    '0,"CPU",0,0,0,"EPYC"\n4,"GPU",64,304,32,"AMD Instinct MI300X"\n'
)
CSV_FILES = {
    "kernel_trace": CSV_KERNELS,
    "hip_api_trace": _CSV_CALLS,
    "marker_api_trace": _CSV_MARKERS,
    "memory_copy_trace": _CSV_COPIES,
    "agent_info": _CSV_AGENTS,
}
