"""`instrument.summarize`, and what objects of the library show at a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import instrument
from instrument.start.cli import app
from tests.support.loops import Loop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two windows of a loop with a region in another."""
    out = tmp_path_factory.mktemp("run")
    schedule = instrument.schedule(wait=0, warmup=1, active=2, repeat=2)
    with instrument.profile(out, schedule=schedule) as prof:
        for _ in range(8):
            with instrument.annotate("outer"), instrument.annotate("inner"):
                torch.ones(3).sum()
            prof.step()
    return out


def test_all_windows(run: Path) -> None:
    """The windows of the run are added up, as the command prints them."""
    found = instrument.summarize(run)
    assert 4 == found.steps
    rows = {region.path: (region.calls, region.cpu_ns - region.self_ns) for region in found.regions}
    inner = next(region for region in found.regions if region.path[-1] == "inner")
    assert {("outer",): (4, inner.cpu_ns), ("outer", "inner"): (4, 0)} == rows
    printed = CliRunner().invoke(app, ["summarize", str(run)], env={"COLUMNS": "100"}).output
    title, _, shown = printed.partition("\n\n")
    assert title.startswith("The 2 windows of the last run in ")
    lines = shown.partition("\n\nFiles")[0].splitlines()
    assert [line.rstrip() for line in str(found).splitlines()] == [line.rstrip() for line in lines]


def test_one_trace(run: Path) -> None:
    """A trace, its path and the traces of a job give one summary."""
    path = sorted(run.rglob("*.json.gz"))[0]
    trace = instrument.read_trace(path)
    assert instrument.summarize(path) == instrument.summarize(trace)
    assert 2 == instrument.summarize(trace).steps
    assert 2 == instrument.summarize(instrument.read_traces(run)).steps


def test_data_frames(run: Path) -> None:
    """The tables are data frames with self times."""
    pytest.importorskip("pandas")
    frames = instrument.summarize(run).to_pandas()
    regions = frames["regions"]
    assert ["outer", "outer > inner"] == list(regions.index)
    assert ["calls", "cpu_ns", "self_ns", "gpu_ns", "steps"] == list(regions.columns)
    assert regions.cpu_ns["outer"] == regions.self_ns.sum()
    assert "aten::sum" in frames["operators"].index
    rows = instrument.read_traces(run)[0].regions.to_pandas()
    assert {"outer", "inner"} == set(rows.name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trace": 3}, TypeError, '"trace" must be a trace, the traces of several ranks or a path: 3'),
        ({"rank": 7}, ValueError, '"rank" must be one of 0: 7'),
        ({"steps_from": "nothing"}, ValueError, "steps_from"),
    ],
)
def test_refused(run: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Wrong arguments are named, with what is accepted."""
    with pytest.raises(error, match=message):
        instrument.summarize(**{"trace": run} | arguments)


def test_prompts(tmp_path: Path) -> None:
    """A result shows in a line at a prompt what it is, and not all that it holds."""
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            loop.work(400)
            for _ in range(10):
                loop.launch(5)
            loop.synchronize()
    trace = loop.trace(tmp_path)
    diagnosis = instrument.diagnose(trace)
    comparison = instrument.compare(diagnosis, diagnosis)
    shown = {
        repr(diagnosis): f"<diagnosis of {str(trace.path)!r}: {len(diagnosis.findings)} finding",
        repr(diagnosis.findings[0]): f"<finding {diagnosis.findings[0].rule}: ",
        repr(comparison): "<comparison: no change seen, ",
        repr(diagnosis.metrics): f"<{len(diagnosis.metrics)} metrics: gpu_events, ",
        repr(instrument.summarize(trace)): "<summary of 5 steps, ",
    }
    for text, begin in shown.items():
        assert text.startswith(begin)
        assert len(text) < 500
    assert json.loads(json.dumps(diagnosis.metrics)) == diagnosis.metrics
