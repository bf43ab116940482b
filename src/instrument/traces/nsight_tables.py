"""Reads the tables of an Nsight Systems report as numpy columns; tables and values may be missing."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import TraceError
from .database import DATABASE_ERRORS, is_database, open_database, query_small, row_limit, text_limit
from .table import Array, Strings
from .trace import ReadLosses

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
LIBRARIES = {"OSRT_API": "osrt", "CUDNN_EVENTS": "cudnn", "CUBLAS_EVENTS": "cublas"}

_EVENTS = (KERNELS, GRAPHS, MEMCPYS, MEMSETS, CALLS, SYNCS, RANGES, *LIBRARIES)
_ROWS = 1 << 40  # an event is the number of its table, times this, plus its row
_EXPORT_SECONDS = 600
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
        self.tables = {name: self._columns_of(name) for (name,) in names if isinstance(name, str)}

    def rows(self, table: str, numbers: Sequence[str], **texts: Sequence[str]) -> Array:
        """Return the rows of a table.

        Args:
            table: the name of the table; a missing table has no rows.
            numbers: columns that become 64-bit integers.
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
                return np.fromiter(self._query(table, ", ".join([rowid, *read, *written])), fields)
            except (TypeError, ValueError, OverflowError):
                continue
        self.lost.add(f"{table}: columns of unexpected types")
        return np.empty(0, fields)

    def events(self, table: str, numbers: Sequence[str], **texts: Sequence[str]) -> Array:
        """Return the rows of a table with valid times, as `rows` does, with ``start`` and ``end``."""
        rows = self.rows(table, ("start", "end", *numbers), **texts)
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
        chosen = ", ".join(self._column(table, name) for name in columns)
        found: list[tuple[Any, ...]] = []
        try:
            found.extend(query_small(self._connection, self._select(table, chosen)))
        except DATABASE_ERRORS as error:
            self.lost.add(f"{table}: {error}")
        return found

    def string(self, number: int) -> str:
        """Return a shared string by its number; a missing string is ``#`` and the number."""
        if number == MISSING:
            return ""
        if number not in self._strings:
            found: list[tuple[Any]] = []
            if "StringIds" in self.tables:
                found = list(self._query("StringIds", "value", "WHERE id = ?", number))
            if not found:
                self.lost.add("names that are not in StringIds")
            self._strings[number] = str(found[0][0]) if found else f"#{number}"
        return self._strings[number]

    def row(self, event: int) -> dict[str, Any]:
        """Return the row of an event without NULL values, with shared strings in place of their numbers."""
        table, rowid = _EVENTS[event // _ROWS], event % _ROWS
        columns = sorted(self.tables.get(table, ()))
        chosen = ", ".join(self._column(table, name) for name in columns)
        where = f"WHERE {self._rowid(table)} = ?" if columns else ""
        for values in self._query(table, chosen, where, rowid) if columns else ():
            given = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
            return given | {
                name: self.string(given[name]) for name in _STRINGS if isinstance(given.get(name), int)
            }
        return {}

    def _columns_of(self, table: str) -> frozenset[str]:
        try:
            return frozenset(
                row[1] for row in query_small(self._connection, f"PRAGMA table_info({_quoted(table)})")
            )
        except DATABASE_ERRORS as error:
            self.lost.add(f"{table}: {error}")
            return frozenset()

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

    def _query(self, table: str, columns: str, where: str = "", *values: int) -> Iterator[Any]:
        try:
            yield from self._connection.execute(self._select(table, columns, where), values)
        except DATABASE_ERRORS as error:
            self.lost.add(f"{table}: {error}")

    def _select(self, table: str, columns: str, where: str = "") -> str:
        return f"SELECT {columns} FROM {_quoted(table)} {where} LIMIT {self._row_limit}"


def event_columns(table: str, rows: Array) -> dict[str, Array]:
    """Return the columns that every table of a trace has, except the name."""
    event = _EVENTS.index(table) * _ROWS + rows["rowid"] % _ROWS
    return {"start_ns": rows["start"], "duration_ns": rows["end"] - rows["start"], "event": event}


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
    if path.suffix in (".nsys-rep", ".qdrep"):
        with TemporaryDirectory(prefix="instrument-") as folder:
            database = _export(path, folder)
            with open_database(path, database) as connection:
                yield _report(path, database, connection)
    elif is_database(path):
        with open_database(path) as connection:
            yield _report(path, path, connection)
    else:
        raise TraceError(path, "not an SQLite database")


def _report(path: Path, database: Path, connection: sqlite3.Connection) -> NsightReport:
    report = NsightReport(connection, database)
    if not any(name.startswith(_KNOWN_TABLES) for name in report.tables):
        raise TraceError(path, "an SQLite database without any table of Nsight Systems")
    return report


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
        raise TraceError(path, f"nsys export failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return database


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
