"""What torch.compile does in a dry run is what it does without one."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from instrument import dry_run
from instrument.base.compat import tracing
from instrument.syncs.dryrun import graphs

from . import compiled_programs
from .compiled_programs import PROGRAMS

pytestmark = [
    pytest.mark.skipif(not tracing.can_follow(), reason="this version of torch cannot be followed"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of Dynamo's own
]


@cache
def expected() -> Any:
    """Return what Dynamo says of each program, in a process without a dry run."""
    command = [sys.executable, "-m", compiled_programs.__name__]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return msgspec.json.decode(out.splitlines()[-1])


def counted(name: str, *, fake: bool = False) -> tuple[dict[str, Any], Any]:
    """Return what a dry run says of a program, and its report."""
    results: list[float] = []

    def step() -> None:
        torch.manual_seed(0)
        results.extend(PROGRAMS[name]("cuda"))

    report = dry_run(step, fake=fake)
    assert report.error is None
    assert report.counts is not None
    made = report.counts.compiled
    breaks = sorted(
        [site.line, reason] for site, reason in ((e.site, e.reason) for e in made.of_kind("graph break"))
    )
    return {
        "results": results,
        "graphs": made.graphs,
        "graph_breaks": breaks,
        "recompilations": made.recompilations,
    }, report


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without_a_dry_run(name: str) -> None:
    """Results, graphs, graph breaks with line and reason, and recompilations are the same."""
    found, report = counted(name)
    wanted = dict(expected()[name])
    branches = wanted.pop("counted_breaks")
    assert wanted == found
    assert not [finding for finding in report.not_covered if "eager" in finding.cause]
    by_value = [reason for _, reason in found["graph_breaks"] if "branch on the value" in reason]
    assert branches == len(found["graph_breaks"]) - len(by_value)  # torch's counters lack these


@pytest.mark.parametrize("name", ["reading", "shapes"])
def test_without_data(name: str) -> None:
    """The same numbers without data."""
    found, _ = counted(name, fake=True)
    wanted = expected()[name]
    assert [wanted[key] for key in ("graphs", "recompilations")] == [found["graphs"], found["recompilations"]]


def test_operators_in_graphs() -> None:
    """Operators in graphs are those of an eager run, at the same lines and in the same modules."""

    def step(compiled: bool) -> None:
        model = compiled_programs.Model().to("cuda")
        compiled_programs.train(model, torch.compile(model) if compiled else model, "cuda")

    eager, made = (dry_run(lambda compiled=compiled: step(compiled)).counts for compiled in (False, True))
    assert eager.step.kernels == made.step.kernels
    assert eager.step.flops == made.step.flops
    assert (0, True) == (eager.step.compiled_kernels, made.step.compiled_kernels > 20)
    assert "of torch.compile, counted as eager operators" in str(made)
    assert eager.step.by("line") == made.step.by("line")
    rows = made.step.by("module")
    modules = [row._replace(name=row.name.replace("OptimizedModule._orig_mod", "Model")) for row in rows]
    assert eager.step.by("module") == modules


def test_steps() -> None:
    """Graphs belong to the step that makes them."""
    counts = dry_run(lambda: PROGRAMS["shapes"]("cuda")).counts
    assert (1, 0, 4) == (counts.first.graphs, counts.first.recompilations, counts.steps)
    assert [1, 1, 0, 1] == [counts.compiled.in_step(step).graphs for step in range(1, 5)]


def test_numbers_have_places() -> None:
    """The numbers that a project holds say which line breaks the graph."""
    report = dry_run(lambda: PROGRAMS["reading"]("cuda"))
    with pytest.raises(AssertionError, match=r"graph_breaks is 1; allowed: 0\n.*x\.abs\(\)\.max\(\)\.item\(\)"):
        report.numbers.assert_max(graph_breaks=0)


def test_what_the_program_sees() -> None:
    """Errors of ``fullgraph=True`` reach the program, and what a run compiled is not used after it."""
    seen: list[Any] = []

    def prints(x: Any) -> Any:
        print("once")
        return x

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    compiled = torch.compile(prints, fullgraph=True, backend=backend)
    report = dry_run(lambda: compiled(torch.ones(2, 8)))
    assert "print" in str(report.error)
    doubled = torch.compile(lambda x: x * 2, backend=backend)
    dry_run(lambda: doubled(torch.ones(2, device="cuda")))
    assert not seen
    doubled(torch.ones(2))
    assert 1 == len(seen)


def test_functions_that_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a dry run cannot trace runs eagerly, which the report says."""

    def fail(*_: Any) -> None:
        raise ValueError("an error in tracing")

    def step() -> None:
        torch.compile(nn.Linear(2, 2, device="cuda"))(torch.ones(1, 2, device="cuda")).sum().item()

    monkeypatch.setattr(graphs.Graph, "__init__", fail)
    report = dry_run(step)
    assert ["item"] == [found.op for found in report.syncs]
    assert "an error in tracing" in report.not_covered[0].cause
    monkeypatch.setattr(tracing, "can_follow", lambda: False)
    assert "this version of torch" in dry_run(step).not_covered[0].cause


def test_threads() -> None:
    """Threads that compile at the same time are watched like threads that do so one after the other."""

    def step() -> None:
        x = torch.ones(4, device="cuda")
        compiled = [torch.compile(function) for function in (lambda x: (x * 2).relu(), lambda x: (x + 1).sin())]
        threads = [threading.Thread(target=function, args=(x,)) for function in compiled]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for _ in range(3):
        counts = dry_run(step).counts
        assert (2, 5) == (counts.step.graphs, counts.step.operators)
