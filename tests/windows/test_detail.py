"""The argument ``detail`` decides what a window records, and each trace can be summarized and diagnosed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument

from .training import content, names, traces


def record(out: Path, **options: Any) -> Path:
    """Record the second step of a small training, and return the trace."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in instrument.steps(range(3), out, at=1, **options):
        with instrument.annotate("forward"):
            loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
    return traces(out)[0]


def kinds(trace: Path) -> set[str]:
    return {event["cat"] for event in content(trace)["traceEvents"] if event["ph"] == "X"}


def test_regions_are_recorded_without_operators(tmp_path: Path) -> None:
    """The detail "regions" keeps named ranges and steps, and the metadata says what was recorded."""
    trace = record(tmp_path, detail="regions")
    assert {"user_annotation", "Trace"} == kinds(trace)
    assert ["ProfilerStep#1", "forward", "Optimizer.step#SGD.step"] == names(trace)
    assert "regions" == content(trace)["instrument_detail"]


def test_the_next_window_records_operators_again(tmp_path: Path) -> None:
    """The detail holds for the windows of its profile, and other profilers record as before."""
    record(tmp_path / "a", detail="regions")
    assert "cpu_op" in kinds(record(tmp_path / "b"))
    record(tmp_path / "c", detail="regions")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.ones(2)
    assert "aten::ones" in {event.key for event in prof.key_averages()}


def test_full_is_the_default_of_single_options(tmp_path: Path) -> None:
    """The detail "full" records shapes, stacks and memory; an option that is given takes precedence."""
    full = record(tmp_path / "a", detail="full")
    operators = [event for event in content(full)["traceEvents"] if event.get("cat") == "cpu_op"]
    assert "python_function" in kinds(full)
    assert any("Input Dims" in event["args"] for event in operators)
    assert any(event["name"] == "[memory]" for event in content(full)["traceEvents"])
    assert "python_function" not in kinds(record(tmp_path / "b", detail="full", with_stack=False))


@pytest.mark.parametrize("detail", ["all", None, ["regions"]])
def test_an_unknown_detail_raises(tmp_path: Path, detail: Any) -> None:
    """A wrong value raises at the call, with what is accepted."""
    with pytest.raises(ValueError, match=r'"detail" must be one of regions, operators, full: '):
        instrument.profile(tmp_path, detail=detail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("detail", ["regions", "operators", "full"])
def test_the_diagnosis_says_which_detail_it_needs(tmp_path: Path, detail: Any) -> None:
    """A trace of every detail is diagnosed; without operators, the goodput says what to record instead."""
    diagnosis = instrument.diagnose(record(tmp_path, detail=detail))
    assert ('recorded with detail=\\"regions\\"' in diagnosis.to_json()) == (detail == "regions")


def test_a_callback_at_the_end_of_a_window_reads_events(tmp_path: Path) -> None:
    """`steps` has torch keep no events, unless ``on_trace_ready`` may read them."""
    found: Counter[str] = Counter()

    def read(prof: Any) -> None:
        found.update(event.key for event in prof.key_averages())

    for _ in instrument.steps(range(3), tmp_path, at=1, on_trace_ready=read):
        torch.ones(2)
    assert found["aten::ones"]


def test_the_trace_is_the_same_without_events(tmp_path: Path) -> None:
    """The events of a trace do not depend on whether the events are kept in memory."""

    def shape(trace: Path) -> list[tuple[Any, ...]]:
        events = content(trace)["traceEvents"]
        return sorted((e["ph"], str(e.get("cat")), str(e["name"]), *sorted(e.get("args", ()))) for e in events)

    assert shape(record(tmp_path / "a")) == shape(record(tmp_path / "b", on_trace_ready=lambda prof: None))
