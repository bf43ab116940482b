from __future__ import annotations

import copy
import gzip
import json
import random
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instrument.base.errors import TraceError
from instrument.read.profilers.rocpd import read_rocpd
from instrument.read.profilers.rocprof import read_rocprof
from instrument.read.tables.trace import Trace

from .rocm_files import STEP, Kernel, Recording, as_json, write_rocpd


def text_of(*recordings: Recording) -> bytes:
    return json.dumps(as_json(recordings)).encode()


def read_text(folder: Path, text: bytes) -> Trace:
    path = folder / "damaged.json"
    path.write_bytes(text)
    return read_rocprof(path)


MANY = Recording(kernels=[Kernel(f"kernel [{n % 3}", 10 * n, 10 * n + 5, n) for n in range(1, 40)])


def test_cut_off(tmp_path: Path) -> None:
    """Wherever a file is cut off in its kernels, all intact ones before the cut are read."""
    text = text_of(MANY)
    begin = text.index(b'"kernel_dispatch"')
    ends = [found.start() for found in re.finditer(rb'"stream_id": \{"handle": 0\}\}', text[begin:])]
    whole = len(b'"stream_id": {"handle": 0}}')
    for cut in range(begin + 30, text.index(b'"memory_copy"'), 97):
        trace = read_text(tmp_path, text[:cut])
        assert len(trace.gpu) == sum(begin + end + whole <= cut for end in ends)
        assert trace.lost


def test_cut_anywhere(tmp_path: Path) -> None:
    """A file that is cut off anywhere gives a trace or an error that says so."""
    text = text_of(STEP)
    for cut in range(0, len(text), 41):
        try:
            assert read_text(tmp_path, text[:cut]).lost
        except TraceError as error:
            assert "damaged.json" in str(error)


def test_cut_gzip(tmp_path: Path) -> None:
    """The part of a truncated gzip file that unpacks is read."""
    packed = gzip.compress(text_of(MANY), 1)
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) * 9 // 10])
    trace = read_rocprof(path)
    assert 0 < len(trace.gpu) < len(MANY.kernels)
    assert any("gzip" in reason for reason in trace.lost.reasons)
    assert trace.args(trace.gpu, 3)["start_timestamp"] == trace.gpu.start_ns[3]


def test_damage_inside(tmp_path: Path) -> None:
    """Records before damaged text are read."""
    text = text_of(MANY)
    place = text.index(b'"start_timestamp": 200,')
    trace = read_text(tmp_path, text[:place] + b"\x00" + text[place:])
    assert trace.gpu.start_ns.tolist() == [kernel.start for kernel in MANY.kernels if kernel.start < 200]
    assert trace.lost.bytes > 100


def test_invalid_utf8(tmp_path: Path) -> None:
    """A name that is not UTF-8 is read with replacement characters."""
    trace = read_text(tmp_path, text_of(STEP).replace(b'"gemm', b'"ge\xffmm'))
    assert "ge\ufffdmm" in trace.gpu.text("name")
    assert trace.lost


def change(content: Any, path: tuple[Any, ...], value: Any) -> bytes:
    place = content["rocprofiler-sdk-tool"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(content).encode()


FIRST = ("buffer_records", "kernel_dispatch", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*FIRST, "start_timestamp"), "soon"),
        ((*FIRST, "start_timestamp"), 1 << 70),
        ((*FIRST, "start_timestamp"), -1),
        ((*FIRST, "end_timestamp"), 1),
        ((*FIRST, "end_timestamp"), None),
        ((*FIRST, "dispatch_info"), []),
        (FIRST, 5),
    ],
)
def test_bad_record(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    """An invalid record is counted as lost, and the others are read."""
    trace = read_text(tmp_path, change(as_json([STEP]), path, value))
    assert trace.kernels.text("name") == ["before", "allreduce"]
    assert (trace.lost.events, len(trace.lost.reasons)) == (1, 1)


def test_large_integers(tmp_path: Path) -> None:
    """An id beyond 64 bits does not affect other fields."""
    content = as_json([STEP])
    trace = read_text(tmp_path, change(content, (*FIRST, "correlation_id", "internal"), 1 << 80))
    assert trace.gpu.correlation[trace.gpu.start_ns == 1000].tolist() == [-1]
    assert (trace.lost.repaired, trace.lost.events) == (1, 0)


def test_missing_ids(tmp_path: Path) -> None:
    """A record without ids is read."""
    content = as_json([STEP])
    for record in content["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"]:
        del (
            record["correlation_id"],
            record["thread_id"],
            record["stream_id"],
            record["dispatch_info"]["kernel_id"],
        )
    trace = read_text(tmp_path, json.dumps(content).encode())
    assert trace.kernels.correlation.tolist() == trace.kernels.launch.tolist() == [-1] * 3
    assert trace.kernels.text("name") == ["kernel -1"] * 3
    assert not trace.lost


def test_json_of_an_old_version(tmp_path: Path) -> None:
    """JSON of rocprofv3 before 1.0, which does not number GPUs, raises an error that names the version."""
    content = as_json([STEP])
    for agent in content["rocprofiler-sdk-tool"][0]["agents"]:
        del agent["logical_node_type_id"]
    with pytest.raises(TraceError, match=r"rocprofv3 before 1\.0"):
        read_text(tmp_path, json.dumps(content).encode())


@pytest.mark.parametrize(
    "section",
    ["metadata", "agents", "counters", "strings", "kernel_symbols", "callback_records", "buffer_records"],
)
def test_missing_sections(tmp_path: Path, section: str) -> None:
    """Without a section, everything that does not depend on it is read."""
    content = as_json([STEP])
    del content["rocprofiler-sdk-tool"][0][section]
    trace = read_text(tmp_path, json.dumps(content).encode())
    assert len(trace.gpu) == (0 if section == "buffer_records" else 5)
    assert not trace.lost


def test_one_process_without_list(tmp_path: Path) -> None:
    """A process that is not in a list is read."""
    [process] = as_json([STEP])["rocprofiler-sdk-tool"]
    trace = read_text(tmp_path, json.dumps({"rocprofiler-sdk-tool": process}).encode())
    assert len(trace.gpu) == 5
    assert trace.args(trace.gpu, 1)["start_timestamp"] == 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not JSON"),
        (b"[]", "not what rocprofv3 writes"),
        (b"{}", "rocprofiler-sdk-tool"),
        (b'{"traceEvents": []}', "rocprofiler-sdk-tool"),
        (b'{"rocprofiler-sdk-tool": 5}', "Expected"),
        (b'{"rocprofiler-sdk-tool": [{"agents": null}]}', "agents"),
        (b'{"rocprofiler-sdk-tool": ' + b"[" * 100_000, "not what rocprofv3 writes"),
        (b'{"rocprofiler-sdk-tool": [{"metadata": ' + b'{"a":' * 100_000, "not JSON"),
        (b"\x1f\x8b\x08 but no gzip", "gzip"),
        (json.dumps({"rocprofiler-sdk-tool": [{}] * 40_000}).encode(), "32,767 processes"),
    ],
)
def test_not_a_trace(tmp_path: Path, text: bytes, reason: str) -> None:
    """A file that is not from rocprofv3 raises an error with the reason."""
    with pytest.raises(TraceError, match=reason) as caught:
        read_text(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """A missing file raises FileNotFoundError."""
    for read_file in (read_rocprof, read_rocpd):
        with pytest.raises(FileNotFoundError):
            read_file(tmp_path / "none")


# Damaged databases


def test_database_is_unchanged(tmp_path: Path) -> None:
    """Reading a database, even in write-ahead mode, changes neither it nor its folder."""
    path = write_rocpd(tmp_path / "results.db", [STEP])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = path.read_bytes()
    trace = read_rocpd(path)
    trace.args(trace.gpu, 0)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_write_ahead_log(tmp_path: Path) -> None:
    """A write-ahead log beside the database is not read, which the trace reports."""
    path = write_rocpd(tmp_path / "results.db", [STEP])
    (tmp_path / "results.db-wal").write_bytes(b"pages")
    assert list(read_rocpd(path).lost.reasons) == ["results.db-wal beside it is not read"]


@pytest.mark.parametrize("name", ["with space.db", "with#sign?.db", "100%25.db"])
def test_unusual_file_names(tmp_path: Path, name: str) -> None:
    """Any file name works."""
    assert len(read_rocpd(write_rocpd(tmp_path / name, [STEP])).gpu) == 5


def alter(folder: Path, *statements: str) -> Path:
    path = write_rocpd(folder / "altered.db", [STEP])
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def test_missing_views(tmp_path: Path) -> None:
    """A database without the views raises an error that names them."""
    with pytest.raises(TraceError, match="lacks the view kernels, regions"):
        read_rocpd(alter(tmp_path, "DROP VIEW kernels", "DROP VIEW regions"))


def test_optional_views(tmp_path: Path) -> None:
    """Optional views may be missing."""
    drops = [f"DROP VIEW {view}" for view in ("samples", "memory_allocations", "counters_collection")]
    trace = read_rocpd(alter(tmp_path, *drops))
    assert len(trace.gpu) == 5
    assert not trace.lost


def test_view_without_its_table(tmp_path: Path) -> None:
    """A view whose tables are missing does not affect others."""
    trace = read_rocpd(alter(tmp_path, "DROP TABLE rocpd_kernel_dispatch_0"))
    assert trace.gpu.text("category") == ["memcpy", "memcpy"]
    assert any(reason.startswith("kernels:") for reason in trace.lost.reasons)


@pytest.mark.parametrize("start", ["'soon'", "NULL", "-5", "3000000", "1.5", "x'00'"])
def test_bad_times(tmp_path: Path, start: str) -> None:
    """A row with invalid times is counted as lost, and the others are read."""
    trace = read_rocpd(alter(tmp_path, f"UPDATE rocpd_kernel_dispatch_0 SET [start] = {start} WHERE id = 1"))
    assert trace.kernels.text("name") == ["before", "allreduce"]
    assert trace.lost.events == 1


def test_values_of_other_types(tmp_path: Path) -> None:
    """Values of another type are unknown or read as text."""
    trace = read_rocpd(
        alter(
            tmp_path,
            "UPDATE rocpd_event_0 SET extdata = 'no JSON', stack_id = x'ff'",
            "UPDATE rocpd_info_kernel_symbol_0 SET display_name = x'ff', arch_vgpr_count = NULL",
            "UPDATE rocpd_info_agent_0 SET extdata = '[]'",
        )
    )
    assert trace.kernels.text("name") == ["\ufffd"] * 3
    assert trace.kernels.registers.tolist() == [-1] * 3
    assert not trace.regions
    assert np.isnan(trace.kernels.blocks_per_sm).all()


@pytest.mark.parametrize("text", [b"", b"SQLite", b"SQLite format 3\0" + b"\7" * 4000, b'{"a": 1}'])
def test_not_a_database(tmp_path: Path, text: bytes) -> None:
    """A file that is not a database raises a TraceError."""
    path = tmp_path / "results.db"
    path.write_bytes(text)
    with pytest.raises(TraceError, match="database"):
        read_rocpd(path)


def test_truncated_database(tmp_path: Path) -> None:
    """A truncated database gives a trace with losses, or an error."""
    data = write_rocpd(tmp_path / "whole.db", [STEP]).read_bytes()
    path = tmp_path / "cut.db"
    for size in range(0, len(data), 4096):
        path.write_bytes(data[:size])
        try:
            assert read_rocpd(path).lost
        except TraceError as error:
            assert "cut.db" in str(error)


# Any bytes

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def try_all(read_file: Callable[[Path], Trace], path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        trace = read_file(path)
    except TraceError:
        return
    for table in (trace.gpu, trace.runtime, trace.regions, trace.others):
        assert np.all(table.duration_ns >= 0)
        table.text("name")


@fuzz
@given(
    data=st.binary(max_size=200),
    header=st.sampled_from([b"", b"\x1f\x8b\x08", b'{"rocprofiler-sdk-tool":[', b"["]),
)
def test_any_bytes(tmp_path: Path, data: bytes, header: bytes) -> None:
    """Any bytes give a trace or a TraceError."""
    try_all(read_rocprof, tmp_path / "any.json", header + data)
    try_all(read_rocpd, tmp_path / "any.db", b"SQLite format 3\0" + data)


@fuzz
@given(seed=st.integers(), changes=st.integers(1, 20))
def test_mutated_text(tmp_path: Path, seed: int, changes: int) -> None:
    """JSON with changed, removed and doubled bytes gives a trace or a TraceError."""
    source, data = random.Random(seed), bytearray(text_of(STEP))
    for _ in range(changes):
        place, size = source.randrange(len(data)), source.randrange(30)
        data[place : place + size] = source.choice([b"", source.randbytes(size), data[place : place + 2 * size]])
    try_all(read_rocprof, tmp_path / "mutated.json", bytes(data))


VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1 << 31,
        (1 << 63) - 1,
        -(1 << 63),
        1 << 64,
        10**400,
        1.5,
        1e300,
        "",
        "\x00é",
        [],
        {},
        [[]],
    ]
)


@fuzz
@given(data=st.data())
def test_mutated_values(tmp_path: Path, data: st.DataObject) -> None:
    """JSON with values of any type and size gives a trace or a TraceError."""
    content: Any = as_json([STEP])
    for _ in range(data.draw(st.integers(1, 6))):
        place = content["rocprofiler-sdk-tool"]
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or data.draw(st.integers(0, 9)) == 0:
                place[key] = copy.deepcopy(data.draw(VALUES))  # later changes must not alter the strategy
                break
            place = place[key]
    try_all(read_rocprof, tmp_path / "mutated.json", json.dumps(content).encode())


@fuzz
@given(seed=st.integers(), changes=st.integers(1, 40))
def test_mutated_database(tmp_path: Path, seed: int, changes: int) -> None:
    """A database with changed bytes gives a trace or a TraceError."""
    whole = tmp_path / "whole.db"
    if not whole.exists():
        write_rocpd(whole, [STEP])
    source, data = random.Random(seed), bytearray(whole.read_bytes())
    for _ in range(changes):
        data[source.randrange(len(data))] = source.randrange(256)
    try_all(read_rocpd, tmp_path / "mutated.db", bytes(data))
