"""Writes databases like `nsys export`, and reads them with `nsys stats`."""

from __future__ import annotations

import csv
import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import nsys
from tests.support.programs import environment, run

HOST = 281474976710656  # the part of global ids that identifies the machine
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
NVTX = "NVTX_EVENTS"
METRICS = "GPU_METRICS"
REPORTS = {  # since 2023.4; before
    "cuda_gpu_kern_sum": "gpukernsum",
    "cuda_api_sum": "cudaapisum",
    "cuda_gpu_mem_time_sum": "gpumemtimesum",
    "cuda_gpu_mem_size_sum": "gpumemsizesum",
    "nvtx_sum": "nvtxsum",
    "nvtx_gpu_proj_trace": "nvtxgpuproj",
}
_PLACE = {"deviceId": 0, "contextId": 1, "streamId": 7}
_SHAPE = {"gridX": 4, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1, "gridId": 1}
_SPACE = dict.fromkeys(
    ("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal"), 0
)
REQUIRED: dict[str, dict[str, Any]] = {  # default values of rows
    KERNEL: _PLACE | _SHAPE | _SPACE | {"registersPerThread": 32},
    GRAPH: _PLACE | {"graphId": 1},
    MEMCPY: _PLACE | {"copyKind": 1, "srcKind": 0, "dstKind": 2},
    MEMSET: _PLACE | {"value": 0, "memKind": 2},
    SYNC: _PLACE | {"eventId": 0},
    RUNTIME: {"eventClass": 0, "returnValue": 0},
}


def thread(process: int, number: int) -> int:
    """Return the global id of a thread."""
    return HOST + (process << 24) + number


@dataclass
class Database:
    """Rows to write; missing tables are created with the columns of the rows."""

    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    strings: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, start: int | None = None, end: int | None = None, **columns: Any) -> None:
        """Add a row."""
        times = {} if start is None else {"start": start, "end": end}
        self.rows.append((table, {**REQUIRED.get(table, {}), **times, **columns}))

    def string(self, text: str) -> int:
        """Return the number of a shared string, above the numbers of a real report."""
        return self.strings.setdefault(text, 1_000_000 + len(self.strings))

    def kernel(self, name: str, start: int, end: int, **columns: Any) -> None:
        """Add a kernel."""
        self.add(KERNEL, start, end, demangledName=self.string(name), shortName=self.string(name), **columns)

    def call(self, name: str, start: int, end: int, tid: int, correlation: int) -> None:
        """Add a CUDA call."""
        self.add(RUNTIME, start, end, nameId=self.string(name), globalTid=tid, correlationId=correlation)

    def span(self, name: str, start: int, end: int | None, tid: int, **columns: Any) -> None:
        """Add an NVTX range, by default of push/pop."""
        kind = {"eventType": 59, "domainId": 0} | columns
        self.add(NVTX, start, end, textId=self.string(name), globalTid=tid, **kind)

    def sample(self, metric: str, gpu: int, time: int | None, value: int | None) -> None:
        """Add a sample of a metric, as ``--gpu-metrics-devices`` takes them."""
        about = {"typeId": 0x1234_0000 + gpu, "metricId": sum(metric.encode()), "metricName": metric}
        if ("TARGET_INFO_GPU_METRICS", about) not in self.rows:
            self.rows.append(("TARGET_INFO_GPU_METRICS", about))
        sampled = {name: about[name] for name in ("typeId", "metricId")}
        self.rows.append((METRICS, {"rawTimestamp": time, "timestamp": time, **sampled, "value": value}))

    def write(self, path: Path) -> Path:
        """Write all rows to a new or an existing database."""
        with closing(sqlite3.connect(path)) as connection, connection:
            there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            tables = {table: [row for name, row in self.rows if name == table] for table, _ in self.rows}
            tables["StringIds"] = [{"id": id, "value": text} for text, id in self.strings.items()]
            for table, rows in tables.items():
                if table not in there:
                    typed = [_typed(table, name) for name in _columns(rows)]
                    connection.execute(f"CREATE TABLE {table} ({', '.join(typed)})")
                for row in rows:
                    places = ", ".join(f'"{name}"' for name in row)
                    marks = ", ".join("?" * len(row))
                    connection.execute(f"INSERT INTO {table} ({places}) VALUES ({marks})", list(row.values()))
        return path


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row)) or ["id"]


def _typed(table: str, name: str) -> str:
    if table != METRICS and name in ("value", "text", "name", "jsonText", "utcTime"):
        return f'"{name}" TEXT'
    return f'"{name}" INTEGER' + " PRIMARY KEY" * (name == "id")


def one_of_each_kind() -> Database:
    """Return a report with one event of each kind, on one thread."""
    tid, database = thread(42, 43), Database()
    where = {"globalPid": HOST + (42 << 24), "streamId": 7}
    database.add("TARGET_INFO_GPU", id=0, name="NVIDIA H100", smCount=132, maxWarpsPerSm=64, threadsPerWarp=32)
    database.rows[-1][1].update(totalMemory=80 << 30)
    database.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000)
    database.add("ThreadNames", nameId=database.string("python"), globalTid=tid)
    database.add("PROCESSES", globalPid=HOST + (42 << 24), pid=42, name="train.py")
    database.span("region", 100, 900, tid)
    database.add(NVTX, 150, 250, eventType=59, text="unregistered", globalTid=tid, color=-1)
    database.call("cudaLaunchKernel_v7000", 110, 120, tid, 1)
    database.kernel("void gemm<float>(int)", 200, 300, correlationId=1, **where)
    database.rows[-1][1].update(
        gridX=66, gridY=4, blockX=64, blockY=2, staticSharedMemory=16, dynamicSharedMemory=8
    )
    database.call("cudaMemcpyAsync_v3020", 130, 140, tid, 2)
    database.add(MEMCPY, 300, 350, bytes=4096, correlationId=2, **where)
    database.call("cuMemsetD8Async", 160, 170, tid, 3)
    database.add(MEMSET, 350, 360, bytes=512, correlationId=3, **where)
    database.call("cudaGraphLaunch_v10000", 180, 190, tid, 4)
    database.add(GRAPH, 400, 500, correlationId=4, graphId=9, **where)
    database.call("cudaStreamSynchronize_v3020", 510, 520, tid, 5)
    database.add(SYNC, 510, 515, syncType=3, correlationId=5, **where)
    database.add("OSRT_API", 600, 700, nameId=database.string("poll"), globalTid=tid)
    database.span("step", 0, 1000, tid, eventType=60, domainId=2, int64Value=17)
    database.add(NVTX, 0, None, eventType=75, text="instrument", domainId=2, globalTid=tid)
    database.sample("SMs Active [Throughput %]", 0, 250, 80)
    return database


def random_database(seed: int) -> Database:
    """Return two processes of two threads, each with nested ranges, calls and the GPU work that they launch."""
    dice = random.Random(seed)
    database = Database()
    last = 0
    for process in (1001, 1002):
        first = thread(process, 1)
        database.add(NVTX, 1, None, eventType=75, text="lib", domainId=3, globalTid=first)
        database.add(NVTX, 2, None, eventType=33, text="hot", domainId=3, category=5, globalTid=first)
        correlation = iter(range(1, 10_000))  # each process has its own ids
        for number in (1, 2):
            tid, time = thread(process, number), dice.randrange(10, 1000)
            for _ in range(6):
                time = _nested(database, dice, tid, time, correlation, 0)
            last = max(last, time)
        # Unlinked, and a range that another thread ends.
        database.kernel("orphan", 50, 90, correlationId=99_999, globalPid=HOST + (process << 24))
        database.span("cross", 20, 400, first, eventType=60, endGlobalTid=thread(process, 2))
        database.span("open", last // 2, None, first, eventType=60, domainId=3)
    database.add(NVTX, last + 1_000_000, None, eventType=34, text="the end", domainId=0, globalTid=thread(1001, 1))
    for metric in ("SMs Active [Throughput %]", "GPC Clock Frequency [MHz]"):
        for time in range(0, last, 100):
            database.sample(metric, 0, time, dice.randrange(100))
    return database


def _nested(database: Database, dice: random.Random, tid: int, time: int, correlation: Any, depth: int) -> int:
    """Add a range with calls and inner ranges; return the time after it."""
    begin = time
    for _ in range(dice.randrange(4)):
        time += dice.randrange(0, 50)
        if depth < 3 and dice.random() < 0.5:
            time = _nested(database, dice, tid, time, correlation, depth + 1)
        else:
            time = _launch(database, dice, tid, time, next(correlation))
    end = time + dice.randrange(0, 30)
    database.span(f"range {depth} {dice.randrange(3)}", begin, end, tid, domainId=dice.choice((0, 3)))
    return end + dice.randrange(0, 5)


def _launch(database: Database, dice: random.Random, tid: int, time: int, correlation: int) -> int:
    end = time + dice.randrange(1, 40)
    start = time + dice.randrange(0, 500)
    where = {
        "correlationId": correlation,
        "globalPid": tid & ~0xFFFFFF,
        "streamId": dice.choice((7, 13)),
        "deviceId": dice.choice((0, 1)),
    }
    kind = dice.randrange(6)
    if kind == 0:
        database.add(MEMCPY, start, start + dice.randrange(100), bytes=dice.randrange(1 << 20), **where)
        database.rows[-1][1].update(copyKind=dice.choice((1, 2, 8, 10)), srcKind=1)
        database.call("cudaMemcpyAsync_v3020", time, end, tid, correlation)
    elif kind == 1:
        database.add(MEMSET, start, start + dice.randrange(100), bytes=dice.randrange(1 << 20), **where)
        database.call("cudaMemsetAsync_v3020", time, end, tid, correlation)
    elif kind == 2:
        for number in range(dice.randrange(5)):
            database.kernel(
                f"node_{number}", start + 10 * number, start + 10 * number + 25, graphNodeId=1, **where
            )
        database.call("cudaGraphLaunch", time, end, tid, correlation)
    elif kind == 3:
        database.call("cuStreamSynchronize", time, end, tid, correlation)
        database.add(SYNC, start, start + 10, syncType=3, **where)
    else:
        database.kernel(f"kernel<{dice.randrange(4)}>", start, start + dice.randrange(200), **where)
        database.call("cudaLaunchKernel_v7000", time, end, tid, correlation)
    return end


def stats(report: str, path: Path) -> list[dict[str, str]]:
    """Return the rows of a report of `nsys stats`; none if the report is empty."""
    name = report if nsys.version() >= (2023, 4) else REPORTS[report]
    base = path.with_suffix("")
    command = [
        nsys.nsys(),
        "stats",
        "--report",
        name,
        "--format",
        "csv",
        "--output",
        base,
        "--force-overwrite=true",
    ]
    run([*command, path], environment())
    output = base.with_name(f"{base.name}_{name}.csv")
    with output.open(newline="") as file:
        return list(csv.DictReader(file))
