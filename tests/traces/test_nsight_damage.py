"""Reports of Nsight Systems with missing tables, unexpected values, damage or random bytes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instrument.base.errors import TraceError
from instrument.read.measures.launches import projection
from instrument.read.profilers.nsight import read_nsight
from instrument.read.tables.table import COLUMNS, Table
from tests.traces import nsys_report
from tests.traces.nsys_report import one_of_each_kind


@pytest.mark.parametrize("table", sorted({table for table, _ in one_of_each_kind().rows} | {"StringIds"}))
def test_missing_tables(table: str, tmp_path: Path) -> None:
    """If any one of the tables is missing, the others are read."""
    path = one_of_each_kind().write(tmp_path / "part.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"DROP TABLE {table}")
    trace = read_nsight(path)
    rows = {"gpu": 4, "runtime": 5, "syncs": 1, "regions": 2, "steps": 1, "others": 1}
    gone = {
        nsys_report.KERNEL: {"gpu": 3}, nsys_report.MEMCPY: {"gpu": 3}, nsys_report.MEMSET: {"gpu": 3},
        nsys_report.GRAPH: {"gpu": 3}, nsys_report.RUNTIME: {"runtime": 0}, nsys_report.SYNC: {"syncs": 0},
        nsys_report.NVTX: {"regions": 0, "steps": 0}, "OSRT_API": {"others": 0},
        "StringIds": {"regions": 3, "steps": 0},  # it cannot be recognized as a step
    }.get(table, {})  # fmt: skip
    assert {kind: len(getattr(trace, kind)) for kind in rows} == rows | gone
    assert bool(trace.lost) == (table == "StringIds")


@pytest.mark.parametrize("table", [nsys_report.KERNEL, nsys_report.MEMCPY, nsys_report.RUNTIME, nsys_report.NVTX])
def test_missing_columns(table: str, tmp_path: Path) -> None:
    """If any one of a table's columns is missing, the rest is read; only rows without times are lost."""
    columns = [name for kind, row in one_of_each_kind().rows if kind == table for name in row]
    for column in dict.fromkeys(columns):
        database = one_of_each_kind()
        for kind, row in database.rows:
            if kind == table:
                row.pop(column, None)
        path = tmp_path / f"{column}.sqlite"
        trace = read_nsight(database.write(path))
        whole = column in ("start", "end")
        assert bool(trace.lost) == (whole and not (table == nsys_report.NVTX and column == "end")), column
        if not whole:
            assert len(trace.gpu) == 4
            assert len(trace.runtime) == 5


def test_new_columns_and_tables(tmp_path: Path) -> None:
    """Additional columns and tables of later releases are ignored."""
    database = one_of_each_kind()
    database.add("SOMETHING_NEW", 1, 2, payload=b"\xff")
    for kind, row in database.rows:
        if kind == nsys_report.KERNEL:
            row |= {"greenContextId": 5, "cluster X": "text"}
    path = database.write(tmp_path / "new.sqlite")
    trace = read_nsight(path)
    assert not trace.lost
    assert len(trace.gpu) == 4
    assert trace.args(trace.gpu, 0)["cluster X"] == "text"


@pytest.mark.parametrize("value", ["text", b"blob", 1.5, 10**18 * 9, -(2**63), None, float("inf")])
@pytest.mark.parametrize("table", [nsys_report.KERNEL, nsys_report.RUNTIME, nsys_report.NVTX, nsys_report.MEMCPY])
def test_wrong_types(table: str, value: Any, tmp_path: Path) -> None:
    """Values of unexpected types do not affect other rows and columns."""
    columns = dict.fromkeys(name for kind, row in one_of_each_kind().rows if kind == table for name in row)
    path = tmp_path / "wrong.sqlite"
    for column in columns:
        database = one_of_each_kind()
        row = next(row for kind, row in database.rows if kind == table and column in row)
        row[column] = value
        path.unlink(missing_ok=True)
        trace = read_nsight(database.write(path))
        assert len(trace.gpu) >= 3, column
        assert len(trace.runtime) >= 4, column
        assert len(trace.syncs) == 1
        assert trace.lost.events <= 1
        if column not in ("start", "end"):
            assert trace.lost.events == 0, column


def test_invalid_utf8(tmp_path: Path) -> None:
    """Invalid characters are replaced, and nothing else is lost."""
    path = one_of_each_kind().write(tmp_path / "made.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE StringIds SET value = CAST(X'61FF62' AS TEXT) WHERE value LIKE '%gemm%'")
        connection.execute("UPDATE NVTX_EVENTS SET text = CAST(X'FF' AS TEXT) WHERE text = 'unregistered'")
        connection.execute("UPDATE TARGET_INFO_GPU SET name = CAST(X'FF' AS TEXT)")
    trace = read_nsight(path)
    assert trace.kernels.text("name")[0] == "a\ufffdb"
    assert trace.regions.text("name") == ["region", "\ufffd"]
    assert trace.devices[0].name == "\ufffd"
    assert trace.args(trace.kernels, 0)["demangledName"] == "a\ufffdb"


def test_file_is_unchanged(tmp_path: Path) -> None:
    """A write-ahead log is read, and none is created."""
    path = one_of_each_kind().write(tmp_path / "odd ?#% name.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    assert len(read_nsight(path).gpu) == 4
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before

    with closing(sqlite3.connect(path)) as connection:
        with connection:
            connection.execute(f"DELETE FROM {nsys_report.KERNEL}")
        assert len(read_nsight(path).gpu) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"not a database at all", "not an SQLite database"),
        (b"SQLite format 3\0" + b"\xff" * 500, "damaged database: file is not a database"),
    ],
)
def test_files_that_are_not_reports(content: bytes, reason: str, tmp_path: Path) -> None:
    """One sentence names the file and the cause."""
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(TraceError) as raised:
        read_nsight(path)
    assert str(raised.value) == f"cannot read {path}: {reason}"


def test_other_databases(tmp_path: Path) -> None:
    """A database without tables, or of another program, is refused."""
    path = tmp_path / "x.sqlite"
    for statement in ("PRAGMA user_version = 1", "CREATE TABLE bookmarks (id)"):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)
        with pytest.raises(TraceError, match="and none of Nsight Systems or rocprofv3"):
            read_nsight(path)


def test_truncated_database(tmp_path: Path) -> None:
    """Tables before the cut are read; the trace lists the others."""
    database = one_of_each_kind()
    for number in range(2000):
        database.kernel(f"kernel {number}", 1000 + number, 1001 + number)
    path = database.write(tmp_path / "made.sqlite")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    trace = read_nsight(path)
    assert trace.lost.reasons
    assert len(trace.runtime) == 5
    assert len(trace.gpu) > 1000


def test_missing_file(tmp_path: Path) -> None:
    """A missing file raises FileNotFoundError."""
    for name in ("x.sqlite", "x.nsys-rep"):
        with pytest.raises(FileNotFoundError):
            read_nsight(tmp_path / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a small database."""
    return one_of_each_kind().write(tmp_path_factory.mktemp("whole") / "made.sqlite")


def survives(path: Path, content: bytes) -> None:
    """Check that reading gives a usable trace or a `TraceError`."""
    path.write_bytes(content)
    try:
        trace = read_nsight(path)
    except TraceError:
        return
    assert isinstance(trace.gpu, Table)
    projection(trace)
    for kind in COLUMNS:
        table: Table = getattr(trace, kind)
        table.text("name")
        for row in range(min(2, len(table))):
            trace.args(table, row)


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.binary(max_size=2000), st.booleans())
def test_any_bytes(tmp_path: Path, content: bytes, header: bool) -> None:
    """Random bytes give a trace or a `TraceError`."""
    survives(tmp_path / "x.sqlite", b"SQLite format 3\0" * header + content)


@FUZZ
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), max_size=8))
def test_changed_bytes(tmp_path: Path, whole: Path, changes: list[tuple[float, bytes]]) -> None:
    """A report with some bytes changed gives a trace or a `TraceError`."""
    content = bytearray(whole.read_bytes())
    for place, new in changes:
        at = int(place * len(content))
        content[at : at + len(new)] = new
    survives(tmp_path / "x.sqlite", bytes(content))


@FUZZ
@given(st.floats(0, 1))
def test_any_length(tmp_path: Path, whole: Path, kept: float) -> None:
    """A report that was cut off gives a trace or a `TraceError`."""
    content = whole.read_bytes()
    survives(tmp_path / "x.sqlite", content[: int(kept * len(content))])
