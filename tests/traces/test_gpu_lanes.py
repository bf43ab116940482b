"""Copies of traces with lanes of GPU regions: the content of the lanes, and the unchanged rest."""

from __future__ import annotations

import gzip
import json
import os
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.explain.metrics.metrics import metrics
from instrument.read.kineto.insert_events import CATEGORY, LaneSpan, add_gpu_lanes, gpu_lanes
from instrument.read.kineto.kineto import read_kineto
from instrument.read.measures.summary import summarize
from instrument.read.tables.trace import Trace
from instrument.start.cli import app

from ..support.shared_traces import shared
from .nsys_report import Database, thread
from .test_autograd import DEVICE, MAIN, NODES, Event, complete, kernel, name_of, read, region, step


def on_stream(stream: int, events: list[Event]) -> list[Event]:
    """Return the events with their kernels on another stream."""
    return [
        event | {"tid": stream, "args": event["args"] | {"stream": stream}} if event["cat"] == "kernel" else event
        for event in events
    ]


def added(path: Path) -> list[dict[str, Any]]:
    """Return the events that were added to a file, with exact times."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    content = json.loads(text, parse_float=Decimal)
    events = content if isinstance(content, list) else content["traceEvents"]
    lanes = {(event["pid"], event["tid"]) for event in events if event.get("cat") == CATEGORY}
    return [event for event in events if (event.get("pid"), event.get("tid")) in lanes]


def drawn(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, str, float, float]]]:
    """Return depth, name, start and end in us of each lane's ranges; fail if they do not nest."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes: dict[str, list[tuple[int, str, float, float]]] = {}
    for tid, name in names.items():
        open_: list[float] = []
        for event in (event for event in events if event["tid"] == tid and event["ph"] == "X"):
            start, end = float(event["ts"]), float(event["ts"] + event["dur"])
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], event
            lanes.setdefault(name, []).append((len(open_), event["name"], start, end))
            open_.append(end)
    return lanes


def test_lanes(tmp_path: Path) -> None:
    """Each stream shows nested regions, from the first start to the last end of their work on it."""
    other = [
        event for number in (6, 7) for event in on_stream(20, kernel(number, 511 + number, 600, 650 + number))
    ]
    trace = read(tmp_path, *step(), *NODES, *other)
    assert add_gpu_lanes(trace, tmp_path / "out.json") == (11, 2, 0)
    assert drawn(added(tmp_path / "out.json")) == {
        "stream 7: regions": [
            (0, "ProfilerStep#3", 200, 1130),
            (1, "Sequential", 200, 290),
            (1, "backward", 520, 960),
            (2, "Sequential (backward)", 520, 950),
            (3, "Block (backward)", 520, 620),
            (3, "Block (backward)", 700, 950),
            (1, "Optimizer.step", 1100, 1130),
        ],
        "stream 20: regions": [
            (0, "ProfilerStep#3", 600, 657),
            (1, "backward", 600, 657),
            (2, "Sequential (backward)", 600, 657),
            (3, "Block (backward)", 600, 657),
        ],
    }


@pytest.mark.parametrize("seed", range(10))
def test_lanes_match_their_definition(seed: int, tmp_path: Path) -> None:
    """A region includes the work of inner regions on the stream; overlapping regions get more rows."""
    dice = random.Random(seed)
    events = [name_of(DEVICE, "pt_autograd_0")]
    for tid in (MAIN, DEVICE):
        for number in range(12):
            start = dice.randrange(80)
            events.append(region(f"{tid} {number}", start, start + dice.randrange(40), tid))
    for number in range(40):
        start, tid = dice.randrange(100), dice.choice((MAIN, DEVICE))
        work = kernel(number + 1, start, start + 10, start + 10 + dice.randrange(30), tid)
        events += on_stream(dice.choice((7, 20)), work)
    trace = read(tmp_path, *events)
    names, parents = trace.regions.text("name"), trace.regions.parent.tolist()
    expected: dict[tuple[int, str], list[int]] = {}
    for op, row in enumerate(trace.gpu.region.tolist()):
        while row >= 0:
            start, end = int(trace.gpu.start_ns[op]), int(trace.gpu.end_ns[op])
            place = int(trace.gpu.stream[op]), names[row]
            first, last, count, total = expected.get(place, (start, end, 0, 0))
            expected[place] = [min(first, start), max(last, end), count + 1, total + end - start]
            row = parents[row]
    lanes = gpu_lanes(trace)
    spans = {(lane.stream, span.name): [*span[1:]] for lane in lanes for row in lane.rows for span in row}
    assert spans == expected
    add_gpu_lanes(trace, tmp_path / "out.json")
    shown = drawn(added(tmp_path / "out.json"))
    assert sum(map(len, shown.values())) == len(expected)


def test_overlapping_work_on_a_stream(tmp_path: Path) -> None:
    """Regions beyond sixteen rows are counted but not drawn."""
    events = []
    for tid in range(20):
        work = kernel(tid + 1, 10, 100 + tid, 200 + tid, 100 + tid)
        events += [region(f"r{tid}", 0, 50, 100 + tid), *work]
    (lane,) = gpu_lanes(read(tmp_path, *events))
    assert [len(row) for row in lane.rows] == [1] * 16
    assert lane.left_out == 4
    assert lane.rows[1] == [LaneSpan("r1", 101_000, 201_000, 1, 100_000)]


def texts() -> dict[str, bytes]:
    """Return a step in files of all kinds."""
    events = ",\n".join(map(json.dumps, [*step(), *NODES])).encode()
    head = b'{"traceEvents": ['
    bad = b'{"ph": "X", "name": "a"b", "cat": "c", "ts": 1, "dur": 1},'
    return {
        "object": b'{"schemaVersion": 1, "deviceProperties": [{"id": 0}],\n "traceEvents": [\n' + events + b"\n]}",
        "keys after": head + events + b'], "traceName": "x", "distributedInfo": {"rank": 3}}\n',
        "array": b"[" + events + b"]",
        "blocks": head + b" " * 3_000_000 + events + b" " * 3_000_000 + b"]}",
        "cut": head + events[: events.rindex(b'"aten::mm"') + 4],
        "damaged": head + bad + events + b"]}",
        "two": head + events + b"]}" + head + events + b"]}",
    }


@pytest.mark.parametrize("packed", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("kind", texts())
def test_other_events_are_unchanged(kind: str, packed: bool, tmp_path: Path) -> None:
    """The copy is the file with inserted events, whatever text surrounds its own."""
    before = texts()[kind]
    source, out = tmp_path / "a.json", tmp_path / f"b.json{'.gz' * packed}"
    source.write_bytes(before if packed else gzip.compress(before))
    trace = read_kineto(source)
    add_gpu_lanes(trace, out)
    after = gzip.decompress(out.read_bytes()) if packed else out.read_bytes()
    size = len(after) - len(before)
    begin = next(place for place, pair in enumerate(zip(after, before, strict=False)) if pair[0] != pair[1])
    begin = after.rindex(b"{", 0, begin + 1)
    assert after[:begin] + after[begin + size :] == before
    lines = after[begin : begin + size].splitlines()
    assert [json.loads(line.removesuffix(b","))["ph"] for line in lines] == ["M", "M", *"X" * (len(lines) - 2)]
    assert len(lines) >= 9
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((source.name, out.name))
    copy = read_kineto(out)
    assert summarize(copy) == summarize(trace)
    assert metrics(copy) == metrics(trace)
    assert (copy.rank, copy.lost) == (trace.rank, trace.lost)


NAMES = [
    '"], {"ph": "X"',
    "back\\slash \\u0041",
    "</script>&amp;",
    "Größe 块 🙂",
    "\x01\n\t",
    "\ud800",
    "a" * 5000,
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_unusual_names(name: str, tmp_path: Path) -> None:
    """Any name of a region is preserved on the lane."""
    trace = read(tmp_path, region(name, 0, 50), *kernel(1, 10, 20, 30, MAIN))
    add_gpu_lanes(trace, tmp_path / "out.json")
    shown = [event["name"] for event in added(tmp_path / "out.json") if event["ph"] == "X"]
    assert shown == [trace.regions.text("name")[0]]
    assert shown == [name] or name == "\ud800"


def test_times_since_1970_are_exact(tmp_path: Path) -> None:
    """Times are exact to the nanosecond, unlike floats."""
    text = json.dumps([region("r", 0, 50), *kernel(1, 10, 20, 30, MAIN)])
    for at in (20, 10, 0):
        text = text.replace(f'"ts": {at},', f'"ts": 17121954954067{at:02}.803,')
    (tmp_path / "a.json").write_text(text)
    add_gpu_lanes(read_kineto(tmp_path / "a.json"), tmp_path / "b.json")
    (found,) = [event for event in added(tmp_path / "b.json") if event["ph"] == "X"]
    assert (found["ts"], found["dur"]) == (Decimal("1712195495406720.803"), Decimal("10.000"))


def test_unused_thread_id(tmp_path: Path) -> None:
    """A lane gets an unused thread id."""
    strange = complete("other", "strange", 0, 10, 1_000_000_000) | {"pid": 0}
    trace = read(tmp_path, region("r", 0, 50), *kernel(1, 10, 20, 30, MAIN), strange)
    add_gpu_lanes(trace, tmp_path / "out.json")
    assert {event["tid"] for event in added(tmp_path / "out.json")} == {1_000_000_001}


# The command


def refused(*args: str | Path, blamed: str = "--add-gpu-lanes") -> str:
    """Return the output of the command, which must refuse this argument."""
    result = CliRunner().invoke(app, ["summarize", *map(str, args)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert f"Invalid value for {blamed}:" in result.output
    return " ".join(result.output.replace("│", "").split())


def written_trace(tmp_path: Path) -> Path:
    read(tmp_path, *step(), *NODES)
    return tmp_path / "trace.json"


def test_command(tmp_path: Path) -> None:
    """The command prints the summary and writes the copy, gzipped if its name says so; it replaces a file."""
    trace, out = written_trace(tmp_path), tmp_path / "with lanes.json.gz"
    out.write_text("old")
    result = CliRunner().invoke(app, ["summarize", str(trace), "--add-gpu-lanes", str(out)])
    assert result.exit_code == 0
    assert "backward" in result.stdout
    assert "has 7 ranges of regions and steps on 1 stream of the GPU" in result.stderr
    assert len(drawn(added(out))["stream 7: regions"]) == 7
    plain = tmp_path / "b.json"
    result = CliRunner().invoke(app, ["summarize", "--json", str(trace), "--add-gpu-lanes", str(plain)])
    assert json.loads(result.stdout)["gpu_events"] == 5
    assert plain.read_text().startswith("[{")


def test_trace_is_never_overwritten(tmp_path: Path) -> None:
    """The trace itself is not overwritten, under any of its names."""
    trace = written_trace(tmp_path)
    before = trace.read_bytes()
    (tmp_path / "link.json").symlink_to(trace)
    os.link(trace, tmp_path / "hard.json")
    for out in (trace, tmp_path / "link.json", tmp_path / "hard.json", f"{tmp_path}/./trace.json"):
        assert "is the trace itself" in refused(trace, "--add-gpu-lanes", out)
    assert "is the trace itself" in refused(tmp_path / "link.json", "--add-gpu-lanes", trace)
    assert trace.read_bytes() == before


def test_refused_arguments(tmp_path: Path) -> None:
    """Each error names the argument, its value, and the accepted values."""
    trace, out = written_trace(tmp_path), tmp_path / "out.json"
    assert "one TRACE is accepted, not 2" in refused(trace, trace, "--add-gpu-lanes", out, blamed="TRACE")
    assert "TRACE must be the file of one process: -" in refused("-", "--add-gpu-lanes", out, blamed="TRACE")
    assert f"TRACE must be the file of one process: {tmp_path}" in refused(
        tmp_path, "--add-gpu-lanes", out, blamed="TRACE"
    )
    assert "the folder of OUT does not exist" in refused(trace, "--add-gpu-lanes", tmp_path / "no" / "out.json")
    assert "is not a file that can be replaced" in refused(trace, "--add-gpu-lanes", tmp_path)
    assert "File name too long" in refused(trace, "--add-gpu-lanes", tmp_path / ("x" * 300))
    database, main = Database(), thread(42, 42)
    database.span("r", 0, 50, main)
    database.call("cudaLaunchKernel_v7000", 10, 20, main, 1)
    database.kernel("k", 30, 40, correlationId=1, globalPid=main & ~0xFFFFFF)
    report = database.write(tmp_path / "made.sqlite")
    assert f".json.gz), not of nsight systems: {report}" in refused(report, "--add-gpu-lanes", out, blamed="TRACE")
    (tmp_path / "cpu.json").write_text(json.dumps([region("r", 0, 50)]))
    assert "no GPU work was launched in a region" in refused(
        tmp_path / "cpu.json", "--add-gpu-lanes", out, blamed="TRACE"
    )
    assert not out.exists()
    add_gpu_lanes(read_kineto(trace), out)
    assert "already has such lanes" in refused(out, "--add-gpu-lanes", tmp_path / "again.json", blamed="TRACE")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing copy stays, no partial file is left, and the error names the file."""
    trace, out = written_trace(tmp_path), tmp_path / "out.json"
    out.write_text("old")

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("instrument.read.kineto.insert_events.read_blocks", full)
    assert f"cannot write {out}: No space left on device" in refused(trace, "--add-gpu-lanes", out)
    assert out.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def spans_named(trace: Trace, name: str) -> list[tuple[int, int]]:
    """Return start and duration of each range of that name on the lanes of a trace."""
    return [
        (span.start_ns, span.end_ns - span.start_ns)
        for lane in gpu_lanes(trace)
        for row in lane.rows
        for span in row
        if span.name == name
    ]


def test_lanes_of_kineto_and_of_this_library() -> None:
    """In a real trace Kineto's lane shows 28 us of a 64 ms backward pass, and nothing of an outer region."""
    trace = read_kineto(Path(shared("hta_ns_resolution.json.gz")))
    of_kineto: dict[str, list[int]] = {}
    for name, duration_ns in zip(
        trace.gpu_regions.text("name"), trace.gpu_regions.duration_ns.tolist(), strict=True
    ):
        of_kineto.setdefault(name, []).append(duration_ns)
    assert of_kineto.keys() == {"DistributedDataParallel.forward", "## backward ##", "Optimizer.step#SGD.step"}
    assert max(of_kineto["## backward ##"]) < 30_000
    assert min(duration for _, duration in spans_named(trace, "## backward ##")) > 63_000_000
    inner = sorted(of_kineto["DistributedDataParallel.forward"])
    durations = sorted(duration for _, duration in spans_named(trace, "DistributedDataParallel.forward"))
    assert [duration - 1 for duration in inner] == durations  # Kineto's begin and end a little early and late
    assert spans_named(trace, "## forward ##") == spans_named(trace, "DistributedDataParallel.forward")
