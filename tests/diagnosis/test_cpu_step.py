"""A program that uses no GPU: what bounds its steps, where their time goes, and fixes that its machine allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.explain.metrics.steps import CPU_PARTS
from instrument.show.sections.diagnosis import overview_section, table_sections
from tests.support.loops import Loop

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def event(category: str, name: str, start_us: float, us: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": us, "pid": 1, "tid": thread}


def program(
    folder: Path,
    *,
    loader: float = 0,
    forward: float = 0,
    reduce: float = 0,
    beside: float = 0,
    python: float = 0,
    **about: Any,
) -> instrument.Trace:
    """Write and read five steps with these times in us; what the DataLoader runs has operators, too.

    A collective runs ``beside`` the end of the forward pass for 50 us, and then while nothing else runs.
    """
    events, now = [], 1000.0
    for number in range(5):
        start = now
        for category, name, us in (
            ("user_annotation", LOADER, loader),
            ("user_annotation", "forward", forward),
            ("cpu_op", "c10d::allreduce_", reduce),
        ):
            if us:
                events.append(event(category, name, now, us))
                if category == "user_annotation":
                    events.append(event("cpu_op", "aten::mm", now, us))
                now += us
        if beside:
            events.append(event("user_annotation", "gloo:all_reduce", now - 50, beside + 50, thread=2))
        now += beside + python
        events.append(event("user_annotation", f"ProfilerStep#{number}", start, now - start))
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, **about}))
    return instrument.read_trace(path)


@pytest.mark.parametrize(
    ("times", "bound", "text"),
    [
        (
            {"loader": 880, "forward": 100},
            "input",
            "The DataLoader bounds the step: the loop waits for it for 88 %",
        ),
        ({"loader": 100, "forward": 880}, "compute", "Operators on the CPU bound the step: they run for 88 %"),
        ({"reduce": 880, "forward": 100}, "communication", "Communication bounds the step"),
        ({"forward": 100, "beside": 880}, "communication", "Communication bounds the step"),
        ({"forward": 120, "python": 880}, "overhead", "Python bounds the step: no operator runs for 88 %"),
        (
            {"loader": 310, "forward": 320, "reduce": 310, "python": 60},
            None,
            "No clear bound: the largest part, compute, is 32 %",
        ),
    ],
)
def test_the_largest_part(tmp_path: Path, times: dict[str, float], bound: str | None, text: str) -> None:
    """The verdict names the largest part of the step; the parts add up to it, and a third of it is a bound."""
    found = instrument.diagnose(program(tmp_path, **({"python": 20} | times)))
    assert bound == found.bound
    assert found.verdict.startswith(text)
    assert ("the largest region is forward" in found.verdict) == text.startswith(("Operators", "Python", "No"))
    assert found.step_ns == sum(found.parts.values())
    names = {"loader": "input", "forward": "compute", "python": "overhead"}
    names |= dict.fromkeys(("reduce", "beside"), "communication")
    expected = {names[name]: 1000 * us for name, us in ({"python": 20} | times).items()}
    assert dict.fromkeys(CPU_PARTS, 0) | expected == dict(found.parts)


def test_a_step_outside_of_regions(tmp_path: Path) -> None:
    """A region of a small part of the step explains nothing: the verdict says how to name the rest."""
    found = instrument.diagnose(program(tmp_path, forward=50, python=950))
    assert "most of it in no region: name its parts with instrument.annotate" in found.verdict
    assert "forward" not in found.verdict


def test_the_bar_and_the_tables(tmp_path: Path) -> None:
    """Terminal, Markdown, JSON and page show the parts of the CPU, and no columns of a GPU."""
    found = instrument.diagnose(program(tmp_path, loader=100, forward=880, python=20))
    shown = str(found)
    assert "# compute 880 us (88.0 %)  i input 100 us (10.0 %)  o overhead 20.0 us (2.0 %)" in shown
    assert "GPU" not in shown.partition("Longest regions")[2]
    assert "| CPU |\n|---|--:|\n| forward | 880 us |" in found.to_markdown()
    data = json.loads(found.to_json())
    assert {"ns": 880_000, "definition": CPU_PARTS["compute"]} == data["parts"]["compute"]
    bar = overview_section(found)
    assert bar is not None
    assert {"compute": 880_000, "input": 100_000, "overhead": 20_000} == {
        part["name"]: part["ns"] for part in bar["bars"][0]["parts"]
    }
    headings = [column["title"] for section in table_sections(found) for column in section["columns"]]
    assert "Self CPU time" in headings
    assert not [heading for heading in headings if "GPU" in heading]


def test_numbers_of_the_cpu(tmp_path: Path) -> None:
    """Metrics divide the time of the steps on the CPU; tables are sorted by it where there is no GPU."""
    numbers = instrument.metrics(program(tmp_path, loader=100, forward=880, reduce=50, python=20))
    parts = [numbers[f"cpu_{name}_ns"] for name in ("input", "comm", "operators", "other")]
    assert [500_000, 250_000, 4_400_000, 100_000] == parts
    assert 5_250_000 == numbers["cpu_ns"] == sum(parts)
    assert ["forward", LOADER] == [row["name"] for row in numbers["region_table"]]


def test_launches_without_kernels_are_no_cpu_program(tmp_path: Path) -> None:
    """A trace whose GPU work was not recorded has no parts of the CPU."""
    loop = Loop()
    for number in range(3):
        with loop.step(number):
            loop.work(100)
            loop.add("cuda_runtime", "cudaLaunchKernel", loop.cpu, loop.cpu + 5)
    found = instrument.diagnose(loop.trace(tmp_path))
    assert not found.parts
    assert found.bound is None


@pytest.mark.parametrize(
    ("cores", "loader", "workers", "win_us"),
    [
        (None, 880, 8, 870),
        (64, 880, 8, 870),
        (4, 880, 4, 735),  # all work takes 245 us on 4 cores
        (2, 880, 2, 490),
        (4, 300, 3, 300),  # the loop itself needs a core
        (2, 300, 1, 300),
        (1, 880, 1, 0),
    ],
)
def test_fixes_know_the_machine(tmp_path: Path, cores: int | None, loader: int, workers: int, win_us: int) -> None:
    """Workers are suggested, and win, as far as the recorded cores allow; no memory or batch size is invented."""
    about = {} if cores is None else {"instrument_cores": str(cores)}
    found = instrument.diagnose(program(tmp_path, loader=loader, forward=980 - loader, **about))
    waits = [each for each in found.findings if each.rule == "input-wait"]
    assert [win_us] * (win_us > 0) == [(each.win_ns or 0) // 1000 for each in waits]
    for each in waits:
        assert each.fix is not None
        assert f"DataLoader(dataset, ..., num_workers={workers}, persistent_workers=True)" == each.fix.after
        assert abs((each.replayed_ns or 0) - (each.win_ns or 0)) < 2000


def test_a_recorded_program_says_its_cores(tmp_path: Path) -> None:
    """Traces of this library have the number of CPU cores that the program may use."""
    for _ in instrument.steps(range(4), tmp_path / "run", wait=0, warmup=1, active=2):
        pass
    trace = instrument.read_traces(tmp_path / "run")[0]
    assert int(str(trace.metadata["instrument_cores"])) >= 1
