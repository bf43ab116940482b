"""The folder of a run that recorded phases beside its steps: what each command reads, and the numbers of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import instrument
from instrument.base.run_folder import NAME, last_window, without_files
from instrument.start.cli import app


def record(out: Path, schedule: instrument.Schedule | str | None) -> Path:
    """Train for six steps, with two blocks of one phase and one of another, which end after the last step."""
    with instrument.profile(out, schedule=schedule) as prof:
        for number in range(6):
            torch.ones(3).sum()
            prof.step()
            if number > 3:
                with prof.phase("eval", "0,1"):
                    torch.ones(30, 30).mm(torch.ones(30, 30))
        with prof.phase("sanity", "0"):
            torch.ones(3).sum()
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two windows of two steps each, and the phases."""
    return record(tmp_path_factory.mktemp("run"), instrument.schedule(wait=0, active=2, repeat=2))


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160"})


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / NAME).read_text().splitlines()]


def shown(result: Any) -> Sequence[str]:
    """Return the lines of the table of phases."""
    lines = [line.split() for line in result.stdout.splitlines()]
    start = next((row for row, words in enumerate(lines) if words[:1] == ["phase,"]), len(lines))
    return [" ".join(words) for words in lines[start + 2 :] if words[-4:-3] == ["summarize"]]


def test_the_manifest_says_what_a_window_recorded(run: Path) -> None:
    """A line of a phase names it and the run of its training."""
    training = {entry["run"] for entry in entries(run) if entry["phase"] is None}
    assert 1 == len(training)
    assert {"eval", "sanity"} == {entry["phase"] for entry in entries(run)} - {None}
    assert training == {entry["phase_of"] for entry in entries(run)} - {None}


def test_the_steps_come_first(run: Path) -> None:
    """The last window of steps is read, although phases ended later; the phases are listed."""
    assert "window-0002" == Path(last_window(str(run))).name
    assert 4 == instrument.summarize(run).steps
    result = command("summarize", run)
    assert "The 2 windows of the last run in" in result.stdout
    assert "Left out" not in result.stdout
    assert ["eval 2", "sanity 1"] == [" ".join(words.split()[:2]) for words in shown(result)]
    assert all(words.endswith(f"instrument summarize {run} --phase {words.split()[0]}") for words in shown(result))


def test_one_phase(run: Path) -> None:
    """Its blocks are the steps; the other phase is listed, and the training's windows are not left out."""
    assert 2 == instrument.summarize(run, phase="eval").steps
    result = command("summarize", run, "--phase", "eval")
    assert "of eval of the last run in" in result.stdout
    assert "Left out" not in result.stdout
    assert "(mean of steps 0-1)" in result.stdout
    assert 1 == len(shown(result))


def test_a_phase_that_does_not_exist(run: Path) -> None:
    """The error names those that do."""
    result = command("summarize", run, "--phase", "validation")
    assert 2 == result.exit_code
    assert f"--phase must be one that {run} recorded, eval, sanity: 'validation'" in result.stderr
    with pytest.raises(ValueError, match=r'"phase" must be one that .* recorded, eval, sanity'):
        instrument.summarize(run, phase="validation")
    assert 2 == command("summarize", run / "window-0001", "--phase", "eval").exit_code


def test_the_diagnosis(run: Path) -> None:
    """It is that of the last steps, and names each phase, its length and its folder."""
    diagnosis = instrument.diagnose(run)
    assert 2 == diagnosis.steps
    assert "window-0002" in diagnosis.source
    found = json.loads(diagnosis.to_json())["phases"]
    assert [("eval", 2), ("sanity", 1)] == [(phase["name"], phase["blocks"]) for phase in found]
    assert all(phase["median_ns"] > 0 for phase in found)
    printed = " ".join(command("diagnose", run).stdout.split())
    for phase in found:
        assert f"instrument diagnose {phase['window']}" in printed
        assert phase["name"] in {region.name for region in instrument.diagnose(phase["window"]).regions}


def test_every_window_as_json(run: Path) -> None:
    """One document has the last window, as it had before, and under "windows" each of the run."""
    printed = json.loads(command("summarize", "--json", run).stdout)
    alone = json.loads(command("summarize", "--json", last_window(str(run))).stdout)
    assert {**alone, "windows": printed["windows"]} == printed
    windows = printed["windows"]
    assert {(None, 1), (None, 2), ("eval", "eval-0001"), ("eval", "eval-0002"), ("sanity", "sanity-0001")} == {
        (window["phase"], window["window"]) for window in windows
    }
    assert [[0, 1], [2, 3]] == [window["step_numbers"] for window in windows if window["phase"] is None]
    for window in windows:
        of_file = json.loads(command("summarize", "--json", window["path"]).stdout)
        assert of_file == {key: window[key] for key in of_file} | {"rank": None}  # of which no file name says it
    assert printed["ranks"][0]["path"] == [each["path"] for each in windows if each["phase"] is None][-1]


def test_a_run_of_phases_alone(tmp_path: Path) -> None:
    """Without recorded steps, the phase that ended last is read, and the other one is listed."""
    run = record(tmp_path / "run", "99")
    result = command("summarize", run)
    assert result.stdout.startswith(f"{run}/window-sanity-0001/rank0.")
    assert ["eval 2"] == [" ".join(words.split()[:2]) for words in shown(result)]
    assert "window-sanity-0001" in instrument.diagnose(run).source


def test_failures_of_the_training(run: Path, tmp_path: Path) -> None:
    """Phases that began after a window of the training failed do not hide it."""
    lines = entries(run)
    failed = {**next(entry for entry in lines if entry["phase"] is None), "status": "failed", "files": []}
    (tmp_path / NAME).write_text("".join(f"{json.dumps(line)}\n" for line in [failed, *lines]))
    assert [f"window {failed['window']} failed: None"] == without_files(tmp_path, "failed")
