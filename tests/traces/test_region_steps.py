"""Steps that a program marked as regions of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import instrument
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.measures.region_steps import steps_found, steps_from_regions
from instrument.read.measures.summary import summarize
from instrument.read.tables.trace import Trace
from instrument.start.cli import app
from tests.diagnosis.small_traces import Row, kernel, on_cpu, trace_of
from tests.support.shared_traces import shared


def loop(*names: str, length: int = 90, work: bool = True) -> Trace:
    """Return the trace of regions, 100 ns apart, each with a region inside and a kernel that runs later."""
    regions: list[Row] = []
    calls, kernels = [], []
    for number, name in enumerate(names):
        begin = 100 * number
        regions += [on_cpu(name, begin, begin + length), on_cpu("forward", begin + 10, begin + 50)]
        if work:
            calls.append(on_cpu("cudaLaunchKernel", begin + 20, begin + 25, correlation=number))
            kernels.append(kernel("k", begin + 60, begin + 130, correlation=number))
    return trace_of(regions=regions, runtime=calls, gpu=kernels)


def test_pattern() -> None:
    """The calls of the regions are steps with the numbers of their names, and have the GPU work they launched."""
    trace = loop("load", "Warm-up Step 4", "Warm-up Step 5", "Warm-up Step 6")
    stepped = steps_from_regions(trace, "^Warm-up Step")
    assert stepped.steps.number.tolist() == [4, 5, 6]
    assert stepped.steps.start_ns.tolist() == [100, 200, 300]
    assert stepped.gpu.step.tolist() == [-1, 0, 1, 2]
    assert (stepped.coverage["step"].linked, stepped.coverage["step"].of) == (3, 4)
    assert stepped.steps_from == "Warm-up Step *"
    assert metrics(stepped)["steps"]["n"] == summarize(stepped).steps == 3
    assert (len(trace.steps), trace.gpu.step.tolist(), trace.steps_from) == (0, [-1] * 4, "")


def test_pattern_of_nested_regions() -> None:
    """Of nested regions with such names, the outermost is the step; names without numbers are counted."""
    stepped = steps_from_regions(loop("train", "train", "train"), "train|forward")
    assert (stepped.steps.number.tolist(), stepped.steps.duration_ns.tolist()) == ([0, 1, 2], [90] * 3)
    assert steps_from_regions(loop("b 2", "b 1"), "b").steps.number.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("evaluate", "\"steps_from\" must match the name of a region: 'evaluate'; the outermost are: train"),
        ("(", "\"steps_from\" must be a regular expression: '('"),
        (3, '"steps_from" must be a regular expression: 3'),
    ],
)
def test_wrong_pattern(pattern: str, message: str) -> None:
    """A pattern that no name matches is an error that names the regions."""
    with pytest.raises(ValueError) as caught:
        steps_from_regions(loop("train"), pattern)
    assert str(caught.value).startswith(message)


def test_ranks_from_python(tmp_path: Path) -> None:
    """The ranks of a job are read with steps from regions, and diagnosed with them; a pattern may not fit."""
    for rank, length in enumerate((40, 60)):
        names = [f"epoch {number}" for number in range(length // 10)]
        events = [
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 20 * place, "dur": 10}
            for place, name in enumerate(names)
        ]
        text = json.dumps({"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": rank}})
        (tmp_path / f"rank{rank}.json").write_text(text)
    traces = instrument.read_traces(tmp_path, steps_from="^epoch")
    assert {rank: len(trace.steps) for rank, trace in traces.items()} == {0: 4, 1: 6}
    assert not any(len(trace.steps) for trace in instrument.read_traces(tmp_path).values())
    found = instrument.diagnose(tmp_path, steps_from="^epoch")
    assert (found.rank, found.steps) == (1, 6)
    with pytest.raises(ValueError, match='"steps_from" must match the name of a region'):
        instrument.read_traces(tmp_path, steps_from="evaluate")
    with pytest.raises(instrument.TraceError, match='"steps_from" must match the name of a region'):
        instrument.diagnose(tmp_path, steps_from="evaluate")


@pytest.mark.parametrize("work", [True, False])
def test_region_that_repeats(work: bool) -> None:
    """The one outermost region that repeats is the step, also if its names are numbered."""
    assert steps_found(loop("load", *["train"] * 5, work=work)).steps_from == "train"
    found = steps_found(loop(*(f"step {number}" for number in range(7, 10)), work=work))
    assert (found.steps_from, found.steps.number.tolist()) == ("step *", [7, 8, 9])


def marked() -> Trace:
    return trace_of(
        steps=[on_cpu("ProfilerStep#1", 0, 90)], regions=[on_cpu("a", n * 10, n * 10 + 9) for n in range(9)]
    )


def overlapping() -> Trace:
    return trace_of(regions=[on_cpu("task", 10 * number, 10 * number + 15) for number in range(5)])


def elsewhere() -> Trace:
    """Return a trace whose kernels are launched outside of its repeated region."""
    calls = [on_cpu("cudaLaunchKernel", 1000 + number, 1001 + number, correlation=number) for number in range(3)]
    kernels = [kernel("k", 1100 + number, 1101 + number, correlation=number) for number in range(3)]
    regions = [on_cpu("load", 300 * number, 300 * number + 299) for number in range(3)]
    return trace_of(regions=regions, runtime=calls, gpu=kernels)


@pytest.mark.parametrize(
    "trace",
    [
        marked(),
        overlapping(),
        elsewhere(),
        trace_of(),
        loop("train", "train"),
        loop(*["train"] * 5, length=45),
        loop(*["train", "evaluate"] * 3, length=100),
        loop(*["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] * 5),
        loop(*["Optimizer.step#SGD.step"] * 5),
    ],
    ids=["marked", "overlap", "no work", "empty", "two calls", "short", "two regions", "loader", "optimizer"],
)
def test_no_such_region(trace: Trace) -> None:
    """A trace with steps, or without exactly one region that takes most of the time, stays as it is."""
    assert steps_found(trace) is trace


def written(tmp_path: Path, name: str) -> Path:
    """Write a trace of torch.profiler with three regions of this name, and return its path."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": 100 * number, "dur": 90}
        for number in range(3)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_command(tmp_path: Path) -> None:
    """The summary says which regions are the steps, in text and in JSON, and refuses a wrong pattern."""
    path, run = str(written(tmp_path, "train")), CliRunner().invoke
    assert len(instrument.read_trace(path, steps_from="^train$").steps) == 3
    assert 'A step is a call of the region "train".' in run(app, ["summarize", path]).output
    shown = run(app, ["summarize", path, "--steps-from", "tr.*n"]).output
    assert "mean of steps 0-2" in shown and 'A step is a call of the region "train".' in shown
    numbers = json.loads(run(app, ["summarize", path, "--json"]).output)
    assert (numbers["steps_from"], numbers["steps"]["n"]) == ("train", 3)
    refused = run(app, ["summarize", path, "--steps-from", "nothing"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "must match the name of a region: 'nothing'; the outermost are: train" in refused.output


def test_ranks(tmp_path: Path) -> None:
    """The traces of all ranks get their steps, and files that cannot be read are still named."""
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(written(tmp_path, "train").read_text())
    (tmp_path / "trace.json").unlink()
    (tmp_path / "rank2.json").write_text("")
    result = CliRunner().invoke(app, ["summarize", str(tmp_path), "--json", "--steps-from", "train"])
    numbers = json.loads(result.stdout)
    assert [rank["steps"]["n"] for rank in numbers["ranks"]] == [3, 3]
    assert [Path(path).name for path in numbers["failed"]] == ["rank2.json"]


def test_real_trace() -> None:
    """In a real trace without steps, torch's own ranges are no steps, but can be taken for steps."""
    trace = read_trace(shared("param_resnet_kineto.json.gz"))
    assert steps_found(trace) is trace
    assert len(steps_from_regions(trace, "^Optimizer.step").steps) == 30
