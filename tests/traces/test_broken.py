"""Damaged files: intact events are read, others repaired if possible, and the trace lists the losses."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instrument.base.errors import TraceError
from instrument.read.kineto import text
from instrument.read.kineto.kineto import read_kineto
from instrument.read.tables.table import COLUMNS
from instrument.read.tables.trace import ReadLosses, Trace

from ..support.kineto_oracle import check_columns, events_of
from ..support.kineto_text import Event, dumps, ordinary, written
from ..support.shared_traces import shared

EVENTS = ordinary(9)
HEAD, TAIL = b'{"schemaVersion": 1, "traceEvents": [\n', b'\n], "distributedInfo": {"rank": 3}}\n'
LINES = [dumps(event).encode() for event in EVENTS]
CUT_OFF = "the file is cut off: its array of events does not end"


def whole_file(lines: list[bytes], separator: bytes = b",\n") -> bytes:
    return HEAD + separator.join(lines) + TAIL


def write(folder: Path, data: bytes) -> Path:
    path = folder / "trace.json"
    path.write_bytes(data)
    return path


def check(trace: Trace, events: list[Event]) -> None:
    """Check that these events were read, and that their args can be looked up."""
    check_columns(trace, events)
    for kind in COLUMNS:
        table = getattr(trace, kind)
        for row in range(min(len(table), 50)):
            args = events[int(table.event[row])].get("args", {})
            assert json.loads(json.dumps(args, default=float)) == trace.args(table, row)


def read(folder: Path, data: bytes, events: list[Event]) -> ReadLosses:
    trace = read_kineto(write(folder, data))
    check(trace, events)
    return trace.lost


# Corrupt samples, and equivalents made from an intact file


def original() -> tuple[bytes, list[Event]]:
    path = shared("tl_h100_bert_small.json.gz")
    return gzip.decompress(path.read_bytes()), events_of(path)


def events_before(data: bytes, events: list[Event]) -> list[Event]:
    """Return the events that end within the first bytes of a pretty-printed file."""
    ends = len(re.findall(rb"^    \},?$", data[data.index(b'"traceEvents"') :], re.MULTILINE))
    return events[:ends]


@pytest.mark.parametrize("name", ["malformed_truncated_midevent.json", "malformed_truncated.json.gz", "boundary"])
def test_samples_cut_off(tmp_path: Path, name: str) -> None:
    """All events before the cut are read."""
    data, events = original()
    if name == "boundary":
        place = data.index(b"\n    },", len(data) * 7 // 10) + len(b"\n    }")
        path = write(tmp_path, data[:place])
    else:
        path = shared(name)
    packed = path.read_bytes()
    data = zlib.decompressobj(wbits=31).decompress(packed) if name.endswith(".gz") else packed
    trace = read_kineto(path)
    check(trace, events_before(data, events))
    assert CUT_OFF in trace.lost.reasons
    assert (0 if name == "boundary" else 1) == trace.lost.events


def names_in(path: Path) -> list[str]:
    """Return the names of the events in a pretty-printed file."""
    events = path.read_text().split('"traceEvents": [')[1].split('"deviceProperties"')[0]
    return re.findall(r'^      "name": "(.*)",?$', events, re.MULTILINE)


def test_sample_of_unescaped_quotes() -> None:
    """Names have their intended text."""
    _, events = original()
    path = shared("malformed_unescaped_quotes.json")
    names = names_in(path)
    plain = [name if name.startswith('{"device"') else json.loads(f'"{name}"') for name in names]
    trace = read_kineto(path)
    check(trace, [event | {"name": name} for event, name in zip(events, plain, strict=True)])
    assert (0, 0) == (trace.lost.events, trace.lost.bytes)
    assert sum(name.startswith('{"device"') for name in names) == trace.lost.repaired > 0


def test_sample_of_windows_paths() -> None:
    """Backslashes of Windows paths are not read as escapes."""
    _, events = original()
    path = shared("malformed_winpath_escape.json")
    names = names_in(path)
    trace = read_kineto(path)
    plain = [name if name.startswith("C:") else json.loads(f'"{name}"') for name in names]
    check(trace, [event | {"name": name} for event, name in zip(events, plain, strict=True)])
    assert (0, 0) == (trace.lost.events, trace.lost.bytes)
    assert sum(name.startswith("C:") for name in names) == trace.lost.repaired > 0


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (b'"name": "aten::', b'"name": "aten\x01::', lambda name: name.replace("aten::", "aten ::")),
        (b'"name": "aten::', b'"name": "aten\xff::', lambda name: name.replace("aten::", "aten\ufffd::")),
        (b'"stream": 7,', b'"stream": 7, "est.": N/A, "x": nan, "y": -nan(ind),', None),
        (b'"correlation": ', b'"correlation": 0, "correlation": ', None),
    ],
    ids=["control", "utf8", "bare", "duplicate"],
)
def test_damaged_sample(tmp_path: Path, before: bytes, after: bytes, name: Callable[[str], str] | None) -> None:
    """Every event of a damaged sample is read."""
    data, events = original()
    assert before in data
    trace = read_kineto(write(tmp_path, data.replace(before, after)))
    check_columns(trace, [event | {"name": name(event["name"])} for event in events] if name else events)
    assert (0, 0) == (trace.lost.events, trace.lost.bytes)
    damaged = 0 if before == b'"correlation": ' else data.count(before)
    assert damaged == trace.lost.repaired


# Cut at every place


def read_cut(folder: Path, data: bytes, whole: int) -> ReadLosses:
    """Check that events before the cut are read, and the next one as well if only its args are cut."""
    cut = EVENTS[whole] | {"args": {}}
    trace = read_kineto(write(folder, data))
    check(trace, [*EVENTS[:whole], cut] if trace.lost.repaired else EVENTS[:whole])
    assert trace.lost.repaired in (0, 1)
    return trace.lost


def test_every_prefix(tmp_path: Path) -> None:
    """Intact events before the cut are read; without any, an error says so."""
    data = whole_file(LINES[:3])
    ends = [data.index(line) + len(line) for line in LINES[:3]]
    args = data.index(b', "args"')
    for size in range(len(data)):
        whole = sum(end <= size for end in ends)
        if whole or size >= args + len(b', "args":'):
            lost = read_cut(tmp_path, data[:size], whole)
            assert (CUT_OFF in lost.reasons) == (size < data.index(TAIL) + len(b"\n]"))
        else:
            with pytest.raises(TraceError, match=r"empty|traceEvents|cut off"):
                read_kineto(write(tmp_path, data[:size]))


def test_every_prefix_of_a_packed_file(tmp_path: Path) -> None:
    """All data that can be unpacked is read."""
    data = whole_file(LINES[:6])
    ends = [data.index(line) + len(line) for line in LINES[:6]]
    packed = gzip.compress(data, mtime=0)
    for size in range(20, len(packed), 3):
        unpacked = zlib.decompressobj(wbits=31).decompress(packed[:size])
        whole = sum(end <= len(unpacked) for end in ends)
        if whole:
            assert "the gzip file is cut off" in read_cut(tmp_path, packed[:size], whole).reasons


# Gzip


def test_wrong_checksum(tmp_path: Path) -> None:
    """All events are read, and the damage is reported."""
    packed = bytearray(gzip.compress(whole_file(LINES)))
    packed[-6] ^= 1
    assert ["damaged gzip: Error -3 while decompressing data: incorrect data check"] == list(
        read(tmp_path, bytes(packed), EVENTS).reasons
    )


def test_several_members(tmp_path: Path) -> None:
    """Gzip streams may follow each other, as after `cat` of two files or a flush."""
    data = whole_file(LINES)
    assert not read(tmp_path, gzip.compress(data[:500]) + gzip.compress(data[500:]) + b"\0" * 512, EVENTS)


def test_data_after_the_gzip_stream(tmp_path: Path) -> None:
    """Data after the gzip stream is not part of it."""
    lost = read(tmp_path, gzip.compress(whole_file(LINES)) + b"rubbish", EVENTS)
    assert (7, ["data after the end of the gzip stream"]) == (lost.bytes, list(lost.reasons))


def test_damage_in_the_middle_of_a_packed_file(tmp_path: Path) -> None:
    """Data before the damage is read."""
    lines = [dumps(event).encode() for event in ordinary(4000)]
    packed = bytearray(gzip.compress(whole_file(lines), 1))
    packed[len(packed) // 2] ^= 0xFF
    trace = read_kineto(write(tmp_path, bytes(packed)))
    assert len(trace.operators) + len(trace.gpu) + len(trace.frames) + len(trace.runtime) > 1000
    assert trace.lost


def test_zip_bomb(tmp_path: Path) -> None:
    """A bomb is refused at the limit that the error states."""
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(HEAD)] + [packer.compress(b" " * (1 << 20)) for _ in range(300)]
    with pytest.raises(TraceError, match="more than 200 times its size"):
        read_kineto(write(tmp_path, b"".join(parts) + packer.flush()))


# One kind of damage at a time, with the event that is read

NAMED = EVENTS[4] | {"name": 'a "b" c'}


@pytest.mark.parametrize("block", [60, 1 << 20])
@pytest.mark.parametrize(
    ("line", "event", "repaired"),
    [
        (LINES[4][:-1], EVENTS[4] | {"args": {}}, 1),
        (LINES[4].replace(b"event 4", b'a "b" c'), NAMED, 1),
        (LINES[4].replace(b"event 4", b"C:\\Users\\x"), EVENTS[4] | {"name": "C:\\Users\\x"}, 1),
        (LINES[4].replace(b"event 4", b"C:\\tmp\\"), EVENTS[4] | {"name": "C:\\tmp\\"}, 1),
        (LINES[4].replace(b"event 4", b"\\ud800"), EVENTS[4] | {"name": "?"}, 1),
        (LINES[4].replace(b'"event 4"', b"null"), EVENTS[4] | {"name": ""}, 1),
        (LINES[4].replace(b"40.125", b'"40.125"'), EVENTS[4], 1),
        (LINES[4].replace(b"40.125", b"nan"), None, 0),
        (LINES[4].replace(b"40.125", b"1e400"), None, 0),
        (LINES[4].replace(b'"pad": ""', b'"pad": C:\\x'), EVENTS[4] | {"args": {}}, 1),
        (LINES[4][:40], None, 0),
        (LINES[4][: LINES[4].index(b"event 4") + 3], None, 0),
        (b"\0" * 500, None, 0),
        (b"rubbish", None, 0),
        (b"]", None, 0),
        (b'{"ph": "X", "args": ' + b"[" * 5000, None, 0),
    ],
)
def test_one_damaged_event(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    line: bytes,
    event: Event | None,
    repaired: int,
) -> None:
    """The other events are read, and the damaged one as well if it can be repaired."""
    monkeypatch.setattr(text, "BLOCK", block)
    expected = [*EVENTS[:4], *([event] if event else []), *EVENTS[5:]]
    lost = read(tmp_path, whole_file([*LINES[:4], line, *LINES[5:]]), expected)
    assert repaired == lost.repaired
    assert bool(lost.bytes) == (event is None)
    assert lost.reasons


@pytest.mark.parametrize("separator", [b"\n", b";", b",,", b"}", b"]", b"],", b"\0", b',"x",', b"garbage"])
def test_damaged_separators(tmp_path: Path, separator: bytes) -> None:
    """Text between events does not lose events."""
    data = HEAD + b",".join(LINES[:5]) + separator + b",".join(LINES[5:]) + TAIL
    read(tmp_path, data, EVENTS)


def test_event_cut_by_another(tmp_path: Path) -> None:
    """If two processes write into one file, only events cut by another event are lost."""
    for place in range(1, len(LINES[4])):
        data = HEAD + b",".join([*LINES[:4], LINES[4][:place] + LINES[5], *LINES[6:]]) + TAIL
        read(tmp_path, data, [*EVENTS[:4], *EVENTS[5:]])


def test_two_concatenated_traces(tmp_path: Path) -> None:
    """The events of two concatenated traces are read."""
    lost = read(tmp_path, written(EVENTS[:4]) + b"\n" + written(EVENTS[4:]), EVENTS)
    assert ["events after the end of their array"] == list(lost.reasons)
    twice = b'{"traceEvents": [' + LINES[0] + b'], "x": 1, "traceEvents": [' + LINES[1] + b'], "y": 2}'
    trace = read_kineto(write(tmp_path, twice))
    check(trace, EVENTS[:2])
    assert {"x": 1, "y": 2} == trace.metadata


@pytest.mark.parametrize("tail", [b"", TAIL])
def test_zero_bytes_to_the_end(tmp_path: Path, tail: bytes) -> None:
    """Zero bytes at the end, as after a killed job, are reported."""
    trace = read_kineto(write(tmp_path, HEAD + b",\n".join(LINES) + tail + b"\0" * 100_000))
    check_columns(trace, EVENTS)
    assert trace.lost.events == 0


@pytest.mark.parametrize("head", [b'{"traceEvents": ', b'{"trace', b"", b'{"x": {"y": ['])
def test_damaged_beginning(tmp_path: Path, head: bytes) -> None:
    """Events are found although the beginning of their array is damaged."""
    lost = read(tmp_path, head + b",\n".join(LINES) + TAIL, EVENTS)
    assert "the beginning of the array of events is damaged" in lost.reasons


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'], "rank": 3, "devi', {"rank": 3}),
        (b'], "rank": 3, "traceName": "C:\\Users\\x"}', {"rank": 3, "traceName": "C:\\Users\\x"}),
        (b'], "rank": 3, "x": nan, "y": [1]}', {"rank": 3, "x": None, "y": [1]}),
    ],
)
def test_damaged_metadata(tmp_path: Path, tail: bytes, expected: dict[str, Any]) -> None:
    """Metadata is read as far as possible, and the loss is reported."""
    trace = read_kineto(write(tmp_path, HEAD.replace(b'"schemaVersion": 1, ', b"") + LINES[0] + tail))
    check(trace, EVENTS[:1])
    assert expected == trace.metadata
    assert any("metadata" in reason for reason in trace.lost.reasons)


def test_impossible_duration(tmp_path: Path) -> None:
    """Only the event with an impossible duration is lost."""
    odd = b'{"ph": "M", "name": "process_name", "dur": 1e308, "pid": 1, "args": {"name": "x"}}'
    trace = read_kineto(write(tmp_path, whole_file([*LINES, odd])))
    assert 1 == trace.lost.events
    whole = read_kineto(write(tmp_path, whole_file(LINES)))
    assert [len(whole.operators), len(whole.gpu)] == [len(trace.operators), len(trace.gpu)]
