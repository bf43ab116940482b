"""The choice of the reader, the sources of files, and the errors of unreadable files."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import sqlite3
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from instrument.base.errors import TraceError
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.ranks import TraceSet
from instrument.read.jobs.read import read_file, read_trace, read_traces
from instrument.read.tables.trace import Trace

from ..support.kineto_oracle import check_columns
from ..support.kineto_text import ordinary, written

EVENTS = ordinary(9)
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06"


class StandardInput:
    """Standard input with given bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.sqlite", "trace"])
@pytest.mark.parametrize("packed", [False, True])
def test_format_by_content(tmp_path: Path, name: str, packed: bool) -> None:
    """A trace is recognized by its content, with any name and packed or not."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(written(EVENTS)) if packed else written(EVENTS))
    for given in (path, str(path)):
        trace = read_trace(given)
        assert isinstance(trace, Trace)
        assert ("kineto", path) == (trace.format, trace.path)
        check_columns(trace, EVENTS)


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """A trace from standard input looks up args while it exists; then its copy is removed."""
    data = gzip.compress(written(EVENTS)) if packed else written(EVENTS)
    monkeypatch.setattr(sys, "stdin", StandardInput(data))
    trace = read_trace("-")
    assert isinstance(trace, Trace)
    assert Path("-") == trace.path
    check_columns(trace, EVENTS)
    assert EVENTS[1]["args"] == trace.args(trace.gpu, 0)
    other = pickle.loads(pickle.dumps(trace))
    del trace
    with pytest.raises(FileNotFoundError):
        other.args(other.gpu, 0)


def test_broken_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names standard input, not the copy of it."""
    monkeypatch.setattr(sys, "stdin", StandardInput(b""))
    with pytest.raises(TraceError, match="cannot read -: it is empty"):
        read_trace("-")


def test_pipe(tmp_path: Path) -> None:
    """A pipe is read, as from ``<(zcat trace.json.gz)``."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(written(EVENTS),))
    writer.start()
    trace = read_trace(path)
    writer.join()
    assert isinstance(trace, Trace)
    check_columns(trace, EVENTS)
    assert EVENTS[1]["args"] == trace.args(trace.gpu, 0)


def test_folders_patterns_and_lists(tmp_path: Path) -> None:
    """Several files are the ranks of one job."""
    paths = []
    for rank in range(2):
        content = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": EVENTS}
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_text(json.dumps(content, default=float))
    with ThreadPoolExecutor(1) as executor:
        for given in (tmp_path, str(tmp_path), str(tmp_path / "*.json"), paths):
            traces = read_traces(given, executor=executor)
            assert isinstance(traces, TraceSet)
            assert [0, 1] == [trace.rank for trace in traces.values()]


def test_other_databases(tmp_path: Path) -> None:
    """The error names a database of another program, or a damaged one, with the cause."""
    path = tmp_path / "some.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE cats (name TEXT)")
    database.close()
    with pytest.raises(TraceError, match=str(path)):
        read_file(path)
    path.write_bytes(b"SQLite format 3\0" + b"\x07" * 5000)
    with pytest.raises(TraceError, match="database"):
        read_file(path)


def test_missing_file(tmp_path: Path) -> None:
    """A missing file raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        read_trace(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"\0" * 5000, "it has nothing but zero bytes"),
        (b"hello", "it is a text file, and no JSON: give a trace that"),
        (b"[INFO] step 1\n[INFO] step 2\n", 'it has no array of "traceEvents"'),
        (b"perf\0\1\2", "it is a binary file of an unknown kind"),
        (b"<!DOCTYPE html><html><body>404 {}</body></html>", "it is an HTML page"),
        (
            pickle.dumps({"segments": []}),
            "a pickle, such as a memory snapshot, which instrument memory reads",
        ),
        (PNG, "it is a picture"),
        (b"{}", 'it has no array of "traceEvents"'),
        (b"[1, 2, 3]", 'it has no array of "traceEvents"'),
        (b'{"name": "config", "items": [{"id": 1}]}', 'it has no array of "traceEvents"'),
        (b'{"traceEvents": null}', 'it has no array of "traceEvents"'),
        (b'{"traceEvents": {}}', 'it has no array of "traceEvents"'),
        (b'{"traceEvents": [1, 2]}', "none of its events can be read"),
        (b"\x1f\x8bno gzip at all", "damaged gzip: .*; it is empty"),
        (b"\x1f\x8b\x08\x00", "the gzip file is cut off; it is empty"),
        (gzip.compress(b"", mtime=0), "it is empty"),
        (gzip.compress(b"hello", mtime=0), "it is a text file, and no JSON"),
    ],
)
def test_files_that_are_not_traces(tmp_path: Path, data: bytes, reason: str) -> None:
    """One sentence names the file and the cause."""
    path = tmp_path / "what.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"cannot read {path}: ")
    assert len(str(caught.value)) < len(str(path)) + 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"[]", b'{"traceEvents": []}', b'\xef\xbb\xbf{"traceEvents":\r\n[ ] }'])
def test_empty_trace(tmp_path: Path, data: bytes) -> None:
    """A trace without events is valid."""
    path = tmp_path / "empty.json"
    path.write_bytes(data)
    trace = read_file(path)
    assert not trace.lost
    check_columns(trace, [])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda traces: read_trace(3), TypeError, '"path" must be the path of one file: 3'),  # type: ignore[arg-type]
        (lambda traces: read_traces(3), TypeError, '"paths" must be a folder, a pattern'),  # type: ignore[arg-type]
        (lambda traces: read_trace(""), TraceError, "empty"),
        (lambda traces: read_traces(""), TraceError, "empty"),
        (lambda traces: read_trace([traces[3].path]), TypeError, "read_traces reads several files"),  # type: ignore[arg-type]
        (lambda traces: read_trace(traces[3].path.parent), TraceError, "a folder; read_traces reads"),
        (lambda traces: read_trace(traces[3].path.with_name("*")), TraceError, "a pattern; read_traces reads"),
        (lambda traces: read_traces(traces[3].path), TraceError, "one file; read_trace reads it"),
        (lambda traces: read_traces("-"), TraceError, "one file; read_trace reads it"),
        (lambda traces: read_traces("nowhere"), FileNotFoundError, "nowhere"),
        (lambda traces: metrics(traces), TypeError, '"trace" must be one Trace'),
        (lambda traces: traces[7], KeyError, "no trace of rank 7; the set has the ranks 3"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    """The error says what was given and what is accepted."""
    (tmp_path / "rank0.json").write_bytes(written(EVENTS))
    with pytest.raises(error, match=message):
        call(read_traces(tmp_path))


def test_other_json_beside_windows(tmp_path: Path) -> None:
    """A folder whose only file is small JSON of another kind is searched."""
    (tmp_path / "config.json").write_text('{"lr": 1}')
    (tmp_path / "window-0001").mkdir()
    (tmp_path / "window-0001" / "rank0.json").write_bytes(written(EVENTS))
    assert [3] == list(read_traces(tmp_path))


def test_nsight_compute_report(tmp_path: Path) -> None:
    """The error names the kind of file and the program that opens it."""
    path = tmp_path / "kernels.ncu-rep"
    path.write_bytes(b"NVR\0" * 100)
    with pytest.raises(TraceError, match=r"a report of Nsight Compute, .* open it with ncu-ui"):
        read_trace(path)
