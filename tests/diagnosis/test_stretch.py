"""How long recording made the steps: every verdict says it, whatever bounds the steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import instrument
from instrument.explain.diagnosis.verdict import timing_of
from instrument.start import cli

from .made_loops import MadeLoop
from .test_diagnose import idle_loop, run, write


def line(window: int, steps: list[int], around_ns: int | None, run: str = "a", rank: int = 0) -> dict[str, Any]:
    """Return a line of the manifest."""
    around = [[9, 12]] if around_ns else []
    return {
        "run": run, "rank": rank, "window": window, "status": "recorded", "steps": steps, "end_ns": window,
        "files": [{"path": f"window-{window:04}/rank{rank}.{run}.json"}],
        "timing": {"run_steps": 9, "run_ns": 9, "around_ns": around_ns, "around_steps": around, "own_ns": 0},
    }  # fmt: skip


def write_run(folder: Path, loop: MadeLoop, *lines: dict[str, Any]) -> list[Path]:
    """Write a folder of a run whose windows all hold the same steps."""
    (folder / "manifest.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return [write(folder / each["files"][0]["path"], loop) for each in lines]


def test_a_verdict_without_gpu_work(tmp_path: Path) -> None:
    """Without GPU work, the verdict is of the CPU, and says how long recording made the steps."""
    loop = MadeLoop(busy=False).operator("aten::mm", 1, 900)
    (path,) = write_run(tmp_path, loop, line(1, [0, 2], 250_000))
    found = instrument.diagnose(path)
    assert found.bound == "overhead"
    assert found.verdict.endswith("No GPU is used. Recording made a step 4.00 times as long.")


def test_a_verdict_without_a_bound(tmp_path: Path) -> None:
    """Where no class of work bounds the step, the verdict says it as well."""
    loop = MadeLoop(busy=False)
    for step in range(3):
        loop.work("unknown", 1000 * step, 1000 * step + 1, 1000 * (step + 1))
    (path,) = write_run(tmp_path, loop, line(1, [0, 2], 250_000))
    found = instrument.diagnose(path)
    assert found.bound is None
    assert found.verdict.endswith("wins anything alone. Recording made a step 4.00 times as long.")
    assert "Recording made a step 4.00 times as long." in " ".join(run(path).stdout.split())


def test_recorded_steps_that_are_shorter(tmp_path: Path) -> None:
    """Recording does not make steps shorter: the sentence compares them with those outside the window."""
    (path,) = write_run(tmp_path, idle_loop(), line(1, [0, 2], 2_500_000))
    found = instrument.diagnose(path)
    assert found.verdict.endswith(" A recorded step took 0.40 times as long as the steps outside the window.")


def test_a_first_window(tmp_path: Path) -> None:
    """A window without steps around it is compared with the steps around the other windows of its run and rank."""
    others = line(2, [6, 8], 500_000), line(3, [9, 9], 100, run="b"), line(4, [9, 9], 100, rank=1)
    first, *_ = write_run(tmp_path, idle_loop(), line(1, [0, 2], None), *others)
    timing = timing_of(first)
    assert timing is not None
    assert timing.around == (4, 500_000)
    found = instrument.diagnose(first)
    assert found.stretch == 2.0
    assert found.findings[0].title.endswith("(inflated: recording made steps 2.00 times as long)")
    assert timing_of(tmp_path / "elsewhere.json") is None


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    """The summary of a run has the verdict on its last window, with how long recording made its steps."""
    write_run(tmp_path, idle_loop(), line(1, [0, 2], 500_000), line(2, [6, 8], 500_000))
    text = " ".join(CliRunner().invoke(cli.app, ["summarize", str(tmp_path)]).stdout.split())
    assert "The last window: Bound by input" in text
    assert "Recording made a step 2.00 times as long." in text
