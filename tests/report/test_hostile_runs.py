"""Folders of runs whose manifest or lengths of steps are damaged, of another version, or senseless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instrument.base.run_folder import NAME, RUNS
from instrument.start.cli import app

RUN = "20260101T000000-host-1-1"
NOTHING = {
    "usual_ns": 0, "typical_steps": 100, "typical_ns": 0, "slow_steps": 0, "slow_ns": 0, "slow": [],
    "recorded": [], "start_ns": 0, "between_ns": 0, "phases_ns": 0, "recording_ns": 0, "end_ns": 0,
}  # fmt: skip
WINDOWS: list[dict[str, Any]] = [
    {"window": 1, "end_ns": 10},
    {"window": 2, "end_ns": 20},
    {"window": "eval-0001", "end_ns": 30, "phase": "eval", "phase_of": RUN, "run": f"{RUN}2"},
]
COMMANDS = (
    ["summarize"], ["summarize", "--json"], ["summarize", "--phase", "eval"], ["diagnose"], ["diagnose", "--json"],
    ["whatif"],
)  # fmt: skip


def loop(at_us: int, step_us: int) -> list[dict[str, Any]]:
    """Return the events of four steps that begin every 100 us."""
    events = []
    for number in range(4):
        start = at_us + 100 * number
        step = {"name": f"ProfilerStep#{number}", "cat": "user_annotation", "ts": start, "dur": step_us}
        work = {"name": "aten::mm", "cat": "cpu_op", "ts": start + 10, "dur": 50}
        events += [step, work]
    return [{"ph": "X", "pid": 1, "tid": 1, **event} for event in events]


def write(folder: Path, *windows: dict[str, Any], runs: bytes = b"", step_us: int = 100) -> Path:
    """Write a run of such windows, which overlap each other."""
    lines = []
    for number, fields in enumerate(windows):
        name = f"window-{number}/rank0.{number}.pt.trace.json"
        (folder / name).parent.mkdir()
        (folder / name).write_text(json.dumps({"traceEvents": loop(50 * number, step_us)}))
        line = {
            "run": RUN,
            "rank": 0,
            "status": "recorded",
            "steps": [0, 3],
            "files": [{"path": name, "bytes": 1}],
        }
        timing = {"recorded_ns": 100_000, "run_steps": 30, "run_ns": 10**7, "around_each_ns": [], "lengths": None}
        lines.append(json.dumps({**line, "timing": timing, **fields}))
    (folder / NAME).write_text("\n".join(lines))
    (folder / RUNS).write_bytes(runs)
    return folder


def check(folder: Path, *wrong: str) -> None:
    """Check that each command prints something, or refuses in one line; only those in ``wrong`` may refuse."""
    for command in COMMANDS:
        result = CliRunner().invoke(app, [command[0], str(folder), *command[1:]])
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
        assert 0 == result.exit_code or " ".join(command) in wrong, result.output
        assert result.output


@pytest.mark.parametrize(
    "runs",
    [
        b"", b"\x00\xff{{{\n[1]\n3\nnull", json.dumps({"run": RUN, "rank": 0, "lengths": NOTHING}).encode()[:60],
        *(
            json.dumps({"run": RUN, "rank": 0, "lengths": lengths}).encode()
            for lengths in (
                None, "x", [1, 2], {"other": "version"}, NOTHING, {**NOTHING, "typical_ns": -1, "between_ns": -5},
                {**NOTHING, "slow": [[1]], "typical_steps": "many"}, {**NOTHING, "typical_ns": 10**40},
                {**NOTHING, "slow": [[100 * number, 900] for number in range(1000)], "slow_ns": 900_000},
                {**NOTHING, "typical_ns": float("inf"), "usual_ns": float("nan")},
            )
        ),
    ],
)  # fmt: skip
def test_lengths_of_all_steps(tmp_path: Path, runs: bytes) -> None:
    """They are left out where they make no sense."""
    check(write(tmp_path, *WINDOWS, runs=runs))


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": 3}, {"phase_of": [1]}, {"timing": "x"}, {"timing": {"recorded_ns": "x"}}, {"steps": "ab"},
        {"timing": {"recorded_ns": -5}}, {"steps": [5, 1]}, {"steps": [1.5, 2]}, {"steps": [1, 2, 3]},
        {"run": [1]}, {"steps": [0, 10**25]}, {"window": None, "end_ns": None}, {"rank": "x"},
        {"phase": "a b;c", "phase_of": RUN},
    ],
)  # fmt: skip
@pytest.mark.parametrize("window", [1, 2])
def test_lines_of_the_manifest(tmp_path: Path, window: int, fields: dict[str, Any]) -> None:
    """A line with a wrong value hides no other window, neither of steps nor of a phase."""
    windows = [{**each, **(fields if number == window else {})} for number, each in enumerate(WINDOWS)]
    check(write(tmp_path, *windows), *(["summarize --phase eval"] if window == 2 else []))


@pytest.mark.parametrize("step_us", [0, -5])
def test_steps_without_a_length(tmp_path: Path, step_us: int) -> None:
    """They are no error."""
    check(write(tmp_path, *WINDOWS, step_us=step_us))
