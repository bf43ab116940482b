"""The tables of an Nsight Systems report as numpy columns, and the threads, GPUs and rank of their rows."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...base.errors import TraceError
from ..tables.lanes import map_unique, map_unique_pairs
from ..tables.table import Array, Interner, Strings, natural
from ..tables.trace import Device, ReadLosses, Thread
from .database import DATABASE_ERRORS, is_database, open_database, query_small, row_limit, text_limit

MISSING = -(1 << 63)
"""Stands for a missing value, or for a value that is not a number, in columns of numbers."""

LATEST = 1 << 61
"""The latest valid time, and its negative the earliest: differences stay 64-bit integers."""

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
MEMCPYS = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS = "CUPTI_ACTIVITY_KIND_MEMSET"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
RANGES = "NVTX_EVENTS"
SAMPLES = "GPU_METRICS"
LIBRARIES = {"OSRT_API": "osrt", "CUDNN_EVENTS": "cudnn", "CUBLAS_EVENTS": "cublas"}

_EVENTS = (KERNELS, GRAPHS, MEMCPYS, MEMSETS, CALLS, SYNCS, RANGES, *LIBRARIES, SAMPLES)
_ROWS = 1 << 40  # an event is the number of its table, times this, plus its row
_EXPORT_SECONDS = 600
_VERSION_SECONDS = 20
_VALUE = "CASE typeof({0}) WHEN 'text' THEN CAST({0} AS BLOB) WHEN 'blob' THEN CAST(hex({0}) AS BLOB) ELSE {0} END"
_UNSIGNED = (  # SQLite has no unsigned numbers
    f"CASE WHEN typeof({{0}}) = 'integer' AND {{0}} < 0 THEN CAST(printf('%llu', {{0}}) AS BLOB) ELSE {_VALUE} END"
)
_STRINGS = ("nameId", "textId", "jsonTextId", "demangledName", "shortName", "mangledName")
_KNOWN_TABLES = (
    "StringIds",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_",
    "TARGET_INFO_",
    "META_DATA_",
    "EXPORT_META_DATA",
)


class NsightReport:
    """An open report.

    Any column of an SQLite database may hold any value, and releases of nsys add and drop columns and tables:
    missing values are returned as `MISSING` or as the empty string.

    Args:
        connection: the connection to the database.
        path: the database, whose size limits the number of its rows.

    Attributes:
        strings: all strings that were read.
        lost: what could not be read.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.strings = Strings(text_limit(path))
        self.lost = ReadLosses()
        self._connection = connection
        self._row_limit = row_limit(path)  # a damaged tree with cycles has no end
        self._strings: dict[int, str] = {}
        connection.execute("PRAGMA writable_schema = ON")  # otherwise a file that is cut off cannot be read
        connection.create_function("string_number", 1, self._string_number)
        names = list(query_small(connection, "SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 10000"))
        self.tables = {
            name: frozenset(row[1] for row in self._query(name, f"PRAGMA table_info({_quoted(name)})", small=True))
            for (name,) in names
            if isinstance(name, str)
        }

    def rows(self, table: str, numbers: Sequence[str], where: str = "", /, **texts: Sequence[str]) -> Array:
        """Return the rows of a table.

        Args:
            table: the name of the table; a missing table has no rows.
            numbers: columns that become 64-bit integers.
            where: a clause of SQL that chooses rows.
            texts: columns that become numbers of `strings`; of each tuple, the first that is not NULL.

        Returns:
            A structured array with ``rowid``, the ``numbers`` and the ``texts``.
        """
        fields = np.dtype([(name, "i8") for name in ("rowid", *numbers, *texts)])
        if table not in self.tables:
            return np.empty(0, fields)
        rowid = self._rowid(table)
        written = [f"string_number({self._first(table, columns)})" for columns in texts.values()]
        # The second way takes twice as long, and is needed only if there is text among the numbers.
        for number in ("ifnull({0}, {1})", "CASE typeof({0}) WHEN 'integer' THEN {0} ELSE {1} END"):
            read = [number.format(self._column(table, name), MISSING) for name in numbers]
            try:
                return np.fromiter(
                    self._query(table, self._select(table, [rowid, *read, *written], where)), fields
                )
            except (TypeError, ValueError, OverflowError):
                continue
        self.lost.add(f"{table}: columns of unexpected types")
        return np.empty(0, fields)

    def events(self, table: str, numbers: Sequence[str], **texts: Sequence[str]) -> Array:
        """Return the rows of a table with valid times, as `rows` does, with ``start`` and ``end``."""
        rows = self.rows(table, ("start", "end", *numbers), "", **texts)
        return self.drop_invalid_times(table, rows)

    def drop_invalid_times(self, table: str, rows: Array) -> Array:
        """Return the rows with valid times; the others are counted as lost."""
        start, end = rows["start"], rows["end"]
        good = (start > -LATEST) & (end >= start) & (end < LATEST)
        if not good.all():
            self.lost.add(f"{table}: without a start, or with an end before it", events=int((~good).sum()))
            rows = rows[good]
        return rows

    def texts(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return columns of a small table as Python values; None for missing ones."""
        if table not in self.tables:
            return []
        chosen = (self._column(table, name) for name in columns)
        return list(self._query(table, self._select(table, chosen), small=True))

    def string(self, number: int) -> str:
        """Return a shared string by its number; a missing string is ``#`` and the number."""
        if number == MISSING:
            return ""
        if number not in self._strings:
            there = "StringIds" in self.tables
            query = self._select("StringIds", ["value"], "WHERE id = ?")
            rows = list(self._query("StringIds", query, number)) if there else []
            if not rows:
                self.lost.add("names that are not in StringIds")
            self._strings[number] = str(rows[0][0]) if rows else f"#{number}"
        return self._strings[number]

    def row(self, event: int) -> dict[str, Any]:
        """Return the row of an event without NULL values, with shared strings in place of their numbers."""
        table, rowid = _EVENTS[event // _ROWS], event % _ROWS
        if not (columns := sorted(self.tables.get(table, ()))):
            return {}
        query = self._select(table, map(_quoted, columns), f"WHERE {self._rowid(table)} = ?")
        for values in self._query(table, query, rowid):
            given = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
            return given | {
                name: self.string(given[name]) for name in _STRINGS if isinstance(given.get(name), int)
            }
        return {}

    def _rowid(self, table: str) -> str:
        """Return SQLite's name for the number of a row that no column has taken."""
        taken = {name.lower() for name in self.tables[table]}
        return next((name for name in ("rowid", "_rowid_", "oid") if name not in taken), "-1")

    def _column(self, table: str, name: str) -> str:
        return _quoted(name) if name in self.tables[table] else "NULL"

    def _first(self, table: str, columns: Sequence[str]) -> str:
        """Return an expression for `_string_number`: text as bytes, blobs as hexadecimal digits, or a number."""
        written = [
            (_UNSIGNED if name == "uint64Value" else _VALUE).format(_quoted(name))
            for name in columns
            if name in self.tables[table]
        ]
        return f"coalesce({', '.join([*written, 'NULL', 'NULL'])})"

    def _string_number(self, value: bytes | float | None) -> int:
        if value is None:
            return 0
        return self.strings[value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)]

    def _query(self, table: str, query: str, *values: int, small: bool = False) -> Iterator[Any]:
        try:
            yield from query_small(self._connection, query) if small else self._connection.execute(query, values)
        except DATABASE_ERRORS as error:
            self.lost.add(f"{table}: {error}")

    def _select(self, table: str, columns: Iterable[str], where: str = "") -> str:
        return f"SELECT {', '.join(columns)} FROM {_quoted(table)} {where} LIMIT {self._row_limit}"


def event_columns(table: str, rows: Array) -> dict[str, Array]:
    """Return the columns that every table of a trace has, except the name."""
    duration_ns = rows["end"] - rows["start"]
    return {"start_ns": rows["start"], "duration_ns": duration_ns, "event": event_numbers(table, rows)}


def event_numbers(table: str, rows: Array) -> Array:
    """Return the number of each event, with which `NsightReport.row` finds it."""
    numbers: Array = _EVENTS.index(table) * _ROWS + rows["rowid"] % _ROWS
    return numbers


def minus_one_for_missing(values: Array) -> Array:
    """Return the numbers with -1 in place of `MISSING`."""
    return np.where(values == MISSING, -1, values)


@contextmanager
def open_report(path: Path) -> Iterator[NsightReport]:
    """Open a ``.sqlite`` that nsys exported, or a ``.nsys-rep`` or ``.qdrep``, which nsys exports first.

    Nothing is written beside the file: the export is temporary.

    Raises:
        TraceError: the file is not a report, or nsys is needed and is not installed or fails.
        OSError: the file cannot be opened.
    """
    if not path.stat().st_size:
        raise TraceError(path, "the file is empty")
    with ExitStack() as stack:
        database = path
        if path.suffix in (".nsys-rep", ".qdrep"):
            database = _export(path, stack.enter_context(TemporaryDirectory(prefix="instrument-")))
        elif not is_database(path):
            raise TraceError(path, "not an SQLite database")
        report = NsightReport(stack.enter_context(open_database(path, database)), database)
        if not any(name.startswith(_KNOWN_TABLES) for name in report.tables):
            named = f"the tables {', '.join(islice(report.tables, 3))}" if report.tables else "no table"
            raise TraceError(path, f"an SQLite database with {named}, and none of Nsight Systems or rocprofv3")
        yield report


def _export(path: Path, folder: str) -> Path:
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(
            path,
            "reading reports needs Nsight Systems, which is not installed; where it is installed, "
            f"nsys export --type sqlite {path.name} makes a .sqlite that can be read without it",
        )
    database = Path(folder, "report.sqlite")
    command = [nsys, "export", "--quiet=true", "--type=sqlite", f"--output={database}", str(path.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_EXPORT_SECONDS, cwd=folder)
    except subprocess.TimeoutExpired:
        raise TraceError(path, f"nsys export took more than {_EXPORT_SECONDS} s") from None
    if done.returncode or not database.exists():
        said = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace").splitlines()
        failed = f"nsys export failed: {said[-1] if said else f'exit code {done.returncode}'}"
        newer = f"If the report is newer than the nsys here ({_version(nsys)}), export it where it was recorded"
        raise TraceError(path, f"{failed}. {newer}: nsys export --type sqlite {path.name}")
    return database


def _version(nsys: str) -> str:
    try:
        done = subprocess.run([nsys, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # it only adds to an error
        return "of an unknown version"
    return match[0] if (match := re.search(r"\d+\.\d+[\d.]*", done.stdout)) else "of an unknown version"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


_PROCESS = ~0xFFFFFF  # of a global thread id, whose lowest 24 bits are the thread
_ID = 0xFFFFFFFF
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


class Origins:
    """Numbers the threads, processes and GPUs of a report.

    Attributes:
        devices: the GPUs that the report lists.
    """

    def __init__(self, report: NsightReport) -> None:
        self._report = report
        self._threads: Interner[int] = Interner()
        # Rows without a process belong to the first one, which is usually the only one.
        self._processes: Interner[int] = Interner({MISSING: 0})
        self.devices = list(_gpus(report).values())
        self._sms = {device.id: device.sms for device in self.devices}
        seen = report.texts("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId")
        self._gpu_of = {(pid, cuda): gpu for pid, cuda, gpu in seen if isinstance(gpu, int)}

    def threads_of(self, global_ids: Array) -> Array:
        """Return the numbers of threads; -1 for none."""
        return map_unique(global_ids, lambda tid: -1 if tid == MISSING else self._threads[tid])

    def processes_of(self, global_ids: Array) -> Array:
        """Return the numbers of the processes of threads, or of processes."""
        ids = np.where(global_ids == MISSING, MISSING, global_ids & _PROCESS)
        return map_unique(ids, lambda pid: self._processes[pid] - (pid != MISSING))

    def correlations(self, global_ids: Array, numbers: Array) -> Array:
        """Return correlation ids that are unique among all processes: nsys counts per process."""
        return np.where(numbers == MISSING, -1, (self.processes_of(global_ids) << 32) + (numbers & _ID))

    def gpus_of(self, global_ids: Array, numbers: Array) -> Array:
        """Return the ids of GPUs, which a process that sees only some GPUs numbers differently."""
        if not self._gpu_of:
            return minus_one_for_missing(numbers)
        return map_unique_pairs(
            global_ids >> 24 & 0xFFFFFF,
            minus_one_for_missing(numbers),
            lambda pid, number: self._gpu_of.get((pid, number), number),
        )

    def sms_of(self, devices: Array) -> Array:
        """Return the number of multiprocessors of each GPU; 0 if unknown."""
        return map_unique(devices, lambda device: self._sms.get(device, 0))

    def threads(self) -> list[Thread]:
        """Return the threads, in the order of their numbers."""
        named = self._report.texts("ThreadNames", "globalTid", "nameId")
        names = {tid: name for tid, name in named if isinstance(name, int)}
        return [
            Thread(tid >> 24 & 0xFFFFFF, tid & 0xFFFFFF, self._report.string(names.get(tid, MISSING)))
            for tid in self._threads
        ]

    def process_names(self) -> dict[int, str]:
        """Return the names of the processes with threads in the trace, by process id."""
        own = {tid & _PROCESS for tid in self._threads}
        rows = self._report.texts("PROCESSES", "globalPid", "pid", "name")
        return {pid: str(name) for process, pid, name in rows if process in own}


def metadata(report: NsightReport) -> dict[str, str]:
    """Return the metadata of the report, its export and the machine.

    The environment of the program is excluded, because it may hold secrets.
    """
    values: dict[str, str] = {}
    for table in ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "EXPORT_META_DATA", "META_DATA_EXPORT"):
        for name, value in report.texts(table, "name", "value"):
            if value is not None and "environment" not in str(name).lower():
                values[str(name)] = str(value)
    return values


def epoch_ns(report: NsightReport) -> int:
    """Return the start of the session, which is the 0 of all times, in ns since 1970; 0 if unknown."""
    starts = (start for (start,) in report.texts("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"))
    return next((start for start in starts if isinstance(start, int)), 0)


def rank_and_world(report: NsightReport) -> tuple[int | None, int | None]:
    """Return the rank and the number of ranks, from the variables of torchrun, MPI or Slurm."""
    rows = report.texts("TARGET_INFO_SYSTEM_ENV", "name", "value")
    text = next((str(value) for name, value in rows if name == "DeviceEnvironment"), "")
    environment = dict(line.partition("=")[::2] for line in text.split("\0"))
    for rank, world in _RANKS:
        if (number := natural(environment.get(rank))) >= 0:
            size = natural(environment.get(world))
            return number, size if size >= 0 else None
    return None, None


def _gpus(report: NsightReport) -> dict[int, Device]:
    columns = ("id", "name", "smCount", "maxWarpsPerSm", "threadsPerWarp", "totalMemory")
    return {
        id: Device(id, str(name or ""), _count(sms), _count(warps) * _count(threads), _count(memory))
        for id, name, sms, warps, threads, memory in report.texts("TARGET_INFO_GPU", *columns)
        if isinstance(id, int)
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
