"""`instrument memory` prints the parts of a peak, and what changed from one snapshot to another."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.cli import app

from ..support.programs import ROOT
from ..support.shared_traces import shared
from .snapshots import write
from .test_breakdown import OLDER, STEP


@pytest.fixture
def snapshots(tmp_path: Path) -> list[str]:
    """The paths of a snapshot of a step, and of one whose activation is twice as large."""
    larger = copy.deepcopy(STEP)
    for number in (1, 5):
        larger[number]["size"] = 5000
    given = {"one": STEP, "two": larger}
    return [str(write(tmp_path / f"{name}.pickle", [events], OLDER)) for name, events in given.items()]


def output(*arguments: str, code: int = 0, columns: int = 120) -> str:
    result = CliRunner().invoke(app, ["memory", *arguments], env={"COLUMNS": str(columns)})
    assert code == result.exit_code, result.output
    return result.output


def test_a_peak(snapshots: list[str]) -> None:
    """Categories, lines and evidence, with what they are of the peak."""
    lines = [" ".join(line.split()) for line in output(snapshots[0]).splitlines()]
    assert "GPU 0 of one.pickle: 4.73 kB in use at the peak" == lines[0]
    assert "optimizer state 2.00 kB 42.3 2.00 kB 0 B" in lines
    assert "me/train.py:42 train optimizer state 2.00 kB 42.3 2" in lines
    assert "gradients (sized gradient) 1.00 kB 21.1 1" in lines
    assert any(line.startswith("sized gradient: allocated on a thread") for line in lines)


def test_a_change(snapshots: list[str]) -> None:
    """The peaks, and the parts that differ."""
    lines = [" ".join(line.split()) for line in output(*snapshots).splitlines()]
    assert "The peak went from 4.73 kB to 6.72 kB, +1.99 kB. The changes of the parts add up to this." in lines
    assert "me/model.py:12 forward activations 0 B 5.00 kB +5.00 kB" in lines
    assert not any(line.startswith("me/data.py") for line in lines)  # the same


def test_documented_output() -> None:
    """docs/traces.md shows what the command prints, in order, but for what it leaves out."""
    text = (ROOT / "docs" / "traces.md").read_text()
    block = text.split("$ instrument memory ctx128_fullstep.pickle\n")[1].split("```")[0]
    printed = iter(output(str(shared("memory/ctx128_fullstep.pickle")), columns=100).splitlines())
    shown = [line.rstrip() for line in block.splitlines() if line != "..."]
    missing = [line for line in shown if line not in map(str.rstrip, printed)]
    assert [] == missing


def test_json(snapshots: list[str]) -> None:
    """All numbers, unrounded."""
    found = json.loads(output(*snapshots, "--json"))
    one, two = (each["peak_bytes"] for each in found["snapshots"])
    assert (4730, two - one) == (one, sum(part["change_bytes"] for part in found["changes"]))
    assert 4730 == sum(use["bytes"] for use in found["snapshots"][0]["uses"])


def test_wrong_arguments(snapshots: list[str], tmp_path: Path) -> None:
    """What cannot be read ends with 1, wrong arguments with 2, and both say what is accepted."""
    (tmp_path / "text.pickle").write_text("no pickle")
    assert "it is not a pickle" in output(str(tmp_path / "text.pickle"), code=1)
    assert "cannot read" in output(str(tmp_path / "none.pickle"), code=1)
    assert "GPUs with memory in every snapshot are 0: 3" in output(snapshots[0], "--device", "3", code=2)
    empty = str(write(tmp_path / "empty.pickle", []))
    assert "no GPU has memory in" in output(empty, code=1)
    assert "one or two are accepted: 3" in output(*snapshots, snapshots[0], code=2)
