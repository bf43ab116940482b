"""Damaged and hostile files of every format end in a trace or one error, in bounded time and memory.

INSTRUMENT_FUZZ_SECONDS is the time for all formats together; a failure is repeated by
``python -m tests.traces.fuzzing FORMAT SEED``.
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instrument.base.errors import TraceError
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_file
from instrument.read.kineto import text
from instrument.read.tables.table import COLUMNS

from ..support.programs import ROOT
from .mutants import MAKERS, kineto
from .nsys_report import random_database
from .rocm_files import STEP, Kernel, Recording, as_json, write_rocpd

SECONDS = float(os.environ.get("INSTRUMENT_FUZZ_SECONDS", "8"))


@pytest.fixture(scope="module")
def mutants() -> dict[str, list[dict[str, Any]]]:
    """What a process printed that read damaged files of each format, by format."""
    command = [sys.executable, "-m", "tests.traces.fuzzing", ",".join(MAKERS), "0", str(SECONDS / len(MAKERS))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 120,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = list(map(json.loads, done.stdout.splitlines()))
    return {kind: [line for line in lines if line["kind"] == kind] for kind in MAKERS}


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", MAKERS)
def test_mutants(mutants: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """Damaged files of every format are read or raise a TraceError, and can be summarized."""
    *failed, whole = mutants[kind]
    assert not failed, f"{len(failed)} of {whole}; seed {failed[0]['seed']}:\n{failed[0]['error']}"
    assert whole["count"] > 0
    assert whole["peak_mib"] < 1000, whole


CHILD = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from pathlib import Path
from instrument.read.profilers import database
from instrument.read.jobs.read import read_file
from tests.support.memory import peak_kib
database._SECONDS = 1.0
before = peak_kib()
try:
    print(len(read_file(Path(sys.argv[1])).gpu))
except ValueError as error:
    print(str(error).partition(": ")[2])
print(peak_kib() - before)
"""


def limited(path: Path) -> tuple[str, int]:
    """Return the output of a process that reads a file with little memory, and the KiB that it used."""
    command = [sys.executable, "-c", CHILD, str(path)]
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environ, cwd=ROOT)
    result, size = done.stdout.splitlines()
    return result, int(size)


@pytest.mark.parametrize(
    ("head", "item"),
    [
        (
            b'{"rocprofiler-sdk-tool":[{"buffer_records":{"kernel_dispatch":[',
            b'{"start_timestamp":1,"end_timestamp":2},',
        ),
        (b'{"rocprofiler-sdk-tool":[{"kernel_symbols":[', b'{"kernel_id":1},'),
        (b'{"traceEvents":[', b'{"ph":"X","cat":"kernel","ts":1},'),
    ],
    ids=["kernels of rocprofv3", "symbols of rocprofv3", "kernels of Kineto"],
)
def test_absurd_counts(tmp_path: Path, head: bytes, item: bytes) -> None:
    """A small file with too many events is an error, found with little memory."""
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(head)
        for _ in range(53):
            file.write(item * 20_000)
    result, size = limited(path)
    assert "it holds more than 1,048,576" in result
    assert size < 700_000


def test_kernels_are_read_in_chunks(tmp_path: Path) -> None:
    """rocprofv3's JSON is read in chunks: 60 MB of kernels take less memory than their text."""
    [process] = as_json([Recording(kernels=[Kernel("gemm", 5 * n, 5 * n + 3, n) for n in range(1, 200)])])[
        "rocprofiler-sdk-tool"
    ]
    kernels = process["buffer_records"]["kernel_dispatch"]
    process["buffer_records"]["kernel_dispatch"] = ["HERE"]
    before, after = json.dumps({"rocprofiler-sdk-tool": [process]}).encode().split(b'"HERE"')
    path = tmp_path / "large_results.json"
    some = json.dumps(kernels, separators=(",", ":"))[1:-1].encode()
    count = 60_000_000 // len(some)
    with path.open("wb") as file:
        file.write(before + some)
        for _ in range(count - 1):
            file.write(b"," + some)
        file.write(after)
    result, size = limited(path)
    assert int(result) == count * len(kernels)
    assert size < 150_000


@pytest.mark.parametrize("block", [7, 50, 300, 5000])
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, style: dict[str, object]) -> None:
    """The trace is independent of the block size and of the formatting of rocprofv3's JSON."""
    kernels = [Kernel('a "[{\\', 5 * n, 5 * n + 3, n, counters=(("x", 0.5),)) for n in range(1, 60)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(as_json([STEP, Recording(kernels=kernels, pid=7)]), **style))  # type: ignore[arg-type]
    whole = read_file(path)
    monkeypatch.setattr(text, "BLOCK", block)
    part = read_file(path)
    assert len(whole.gpu) == 64
    assert not part.lost
    for kind in COLUMNS:
        for name, column in getattr(whole, kind).items():
            np.testing.assert_array_equal(column, getattr(part, kind)[name])
    assert part.strings == whole.strings
    assert part.args(part.gpu, 60) == whole.args(whole.gpu, 60)


# Databases

ENDLESS = "(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n)"
TABLES = ", ".join(f"rocpd_event_0 T{number}" for number in range(12))


def alter(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


@pytest.mark.parametrize(
    "rest", [f"{ENDLESS} N", f"{ENDLESS} N WHERE N.x < 0", f"{TABLES} WHERE T1.id + T11.id < 0"]
)
def test_endless_views(tmp_path: Path, rest: str) -> None:
    """An endless view is refused or stopped; other views are read while time is left."""
    path = write_rocpd(tmp_path / "results.db", [STEP])
    alter(path, "ALTER TABLE rocpd_event_0 ADD COLUMN z", "DROP VIEW memory_copies")
    with closing(sqlite3.connect(path)) as connection:
        [(sql,)] = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'kernels'")
    alter(path, "DROP VIEW kernels", f"CREATE VIEW memory_copies AS {sql.partition(' AS ')[2]}")
    alter(path, f"CREATE VIEW kernels AS SELECT V.* FROM memory_copies V, {rest}")
    result, size = limited(path)
    assert result == "3" or "too long for its size" in result
    assert size < 300_000


@pytest.mark.parametrize("column", ["rowid", "ROWID", "_rowid_", "oid"])
def test_columns_named_as_row_numbers(tmp_path: Path, column: str) -> None:
    """A text column named like SQLite's row number is not taken for it."""
    path = random_database(1).write(tmp_path / "report.sqlite")
    plain = read_file(path)
    alter(path, f"ALTER TABLE NVTX_EVENTS ADD COLUMN {column} TEXT DEFAULT 'text'")
    trace = read_file(path)
    assert trace.regions.text("name") == plain.regions.text("name")
    assert trace.args(trace.regions, 3)["start"] == plain.args(plain.regions, 3)["start"]
    assert not trace.lost


@pytest.mark.parametrize("write", [lambda path: write_rocpd(path, [STEP]), random_database(1).write])
def test_schema_that_is_not_utf8(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """An SQLite message that cannot be decoded is an error like any other."""
    path = write(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = CAST(x'ff' || sql AS TEXT), name = CAST(x'ff' AS TEXT)")
    with pytest.raises(TraceError):
        read_file(path)


# Numbers


def test_absurd_numbers(tmp_path: Path) -> None:
    """Impossible devices, times and sizes are unknown and reported as lost; the rest is kept."""
    path = write_rocpd(tmp_path / "results.db", [STEP])
    huge = f"json_set(extdata, '$.max_waves_per_cu', {1 << 62})"
    alter(
        path, f"UPDATE rocpd_info_agent_0 SET extdata = {huge}", f"UPDATE rocpd_memory_copy_0 SET size = {1 << 62}"
    )
    trace = read_file(path)
    assert {device.threads_per_sm for device in trace.devices} == {0}
    assert metrics(trace)["occ_limit_weighted"] is None
    assert trace.memcpys.bytes.tolist() == [-1, -1]
    assert "a GPU with impossible threads_per_sm" in trace.lost.reasons

    content = kineto()
    kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
    kernels[0]["dur"] = 2.2e15
    (tmp_path / "trace.json").write_text(json.dumps(content))
    found = read_file(tmp_path / "trace.json")
    assert found.lost.events == 1
    assert metrics(found)["span_ns"] < 10**9
