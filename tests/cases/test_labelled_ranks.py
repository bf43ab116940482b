"""A file in which a program merged the traces of several ranks is several ranks, not one GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.base.errors import TraceError
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.read.jobs.ranks import TraceSet
from instrument.read.jobs.read import read_contents, read_trace, read_traces
from instrument.read.measures.launches import launches_of
from instrument.start.cli import app

Event = dict[str, Any]
Label = Callable[[int, int], int | str]


def rank(number: int, busy: float, label: Label, device: int = 0) -> list[Event]:
    """Return four steps of 990 us, each with a kernel; all ranks count their ids from 1."""
    program, gpu = label(number, 4000 + number), label(number, 0)
    events = []
    for step in range(4):
        at, id = 1000 * step + 10, step + 1
        place = {"pid": program, "tid": 4000 + number}
        ids = {"External id": id, "correlation": id}
        operator = {"cat": "cpu_op", "name": f"op_of_{number}", "ts": at + 5, "dur": 40}
        on_gpu = {"pid": gpu, "tid": 7, "args": ids | {"device": device, "stream": 7}}
        events += [
            {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 990} | place,
            operator | {"args": {"External id": id}} | place,
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 10, "dur": 8, "args": ids} | place,
            {"cat": "kernel", "name": f"gemm_of_{number}", "ts": at + 50, "dur": busy} | on_gpu,
        ]
    return [{"ph": "X"} | event for event in events]


def merged(folder: Path, label: Label, ranks: int = 2, devices: bool = False) -> Path:
    path = folder / "merged.trace.json"
    each = (rank(number, 600 + 300 * number, label, number * devices) for number in range(ranks))
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*chain.from_iterable(each)]}))
    return path


def sglang(number: int, process: int) -> str:
    return f"[TP{number:02}] {process}"


LABELS: list[Label] = [
    sglang,
    lambda number, process: f"[TP{number:02}-DP00-PP00] {process}",
    lambda number, process: f"rank{number}_{process}",
    lambda number, process: f"{process} (rank {number})",
]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("devices", [False, True])
def test_ranks_of_one_file(tmp_path: Path, label: Label, devices: bool) -> None:
    """Each rank has its own GPU and launches, whatever numbers they have."""
    traces = read_traces(merged(tmp_path, label, devices=devices))
    assert traces.ranks == [0, 1]
    for number, trace in traces.items():
        assert {*trace.gpu.text("name")} == {f"gemm_of_{number}"}
        assert (trace.gpu.launch >= 0).all()
        assert {trace.operators.text("name")[row] for row in trace.gpu.operator} == {f"op_of_{number}"}
        assert not launches_of(trace).missing.any()
        assert (len(trace.steps), trace.rank, trace.world_size) == (4, number, 2)


def test_ranks_are_as_in_their_own_files(tmp_path: Path) -> None:
    """What is said of a rank is what is said of its file alone."""
    path, alone = merged(tmp_path, sglang), tmp_path / "rank1.json"
    alone.write_text(json.dumps({"traceEvents": rank(1, 900, sglang)}))
    parts = diagnose(path, rank=1).parts
    assert parts == diagnose(alone).parts
    assert diagnose(path, rank=0).parts["compute"] < parts["compute"]


def test_commands(tmp_path: Path) -> None:
    """Commands show the ranks; what reads one process says that the file holds several."""
    path = merged(tmp_path, sglang)
    shown = CliRunner().invoke(app, ["summarize", str(path)]).output
    assert "2 of 2 ranks" in shown
    assert "Diagnosed" in CliRunner().invoke(app, ["diagnose", str(path), "--rank", "1"]).output
    with pytest.raises(TraceError, match="it holds the traces of 2 ranks, which read_traces reads"):
        read_trace(path)


def test_a_merged_file_beside_its_ranks(tmp_path: Path) -> None:
    """SGLang leaves the merged file beside those of the ranks, which are read once."""
    for number in range(2):
        events = rank(number, 600, lambda _, process: process)
        (tmp_path / f"TP-{number}-rank{number}.trace.json").write_text(json.dumps({"traceEvents": events}))
    path = merged(tmp_path, sglang)
    traces = read_traces(tmp_path)
    assert (traces.ranks, [*traces.left_out]) == ([0, 1], [path])


@pytest.mark.parametrize("label", [lambda _, process: process, lambda _, process: f"[TP00] {process}"])
def test_one_trace(tmp_path: Path, label: Label) -> None:
    """Processes without a rank, and a file of one rank, are one trace; shared ids lose no launch."""
    trace = read_contents(merged(tmp_path, label))
    assert not isinstance(trace, TraceSet)
    assert not launches_of(trace).missing.any()


def test_processes_without_a_label(tmp_path: Path) -> None:
    """Processes with steps of their own, joined as they are, are several ranks where no GPU is used."""
    path = tmp_path / "joined.json"
    events = [
        event | ({"dur": 990 + number} if event["name"].startswith("ProfilerStep") else {})
        for number in range(2)
        for event in rank(number, 0, lambda number, process: process)
        if event["cat"] in ("user_annotation", "cpu_op")
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    for rank_number, trace in read_traces(path).items():
        assert [990_000 + 1000 * rank_number] * 4 == trace.steps.duration_ns.tolist()
        assert {f"op_of_{rank_number}"} == {trace.operators.strings[code] for code in trace.operators.name}
    assert "of 4 steps of 998 us each" in diagnose(path).verdict
