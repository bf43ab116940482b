"""The command ``instrument check``: files that are written, compared and updated; its formats; its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.start.cli import app
from tests.support import warm
from tests.support.programs import environment

pytestmark = pytest.mark.process

TRAIN = """\
import sys

import torch

import instrument

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    with instrument.annotate("step"):
        with instrument.annotate("data"):
            batch = torch.ones(2, 4).cuda()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
"""
FILES = ("--baseline", "perf.txt", "--regions", "regions.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``instrument check`` in a folder."""
    env = environment({"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"})
    return warm.run([sys.executable, "-m", "instrument", "check", *arguments], env, cwd=folder)


def change(folder: Path, before: str, after: str) -> None:
    text = (folder / "train.py").read_text()
    assert before in text
    (folder / "train.py").write_text(text.replace(before, after))


def held(folder: Path) -> list[str]:
    return [line for line in (folder / "perf.txt").read_text().splitlines() if not line.startswith("#")]


def test_files(folder: Path) -> None:
    """--update writes files that are missing; the check passes until something moves."""
    missing = check(folder, *FILES, "--", "train.py")
    assert (missing.returncode, missing.stderr) == (2, "instrument: there is no perf.txt; --update writes it\n")
    made = check(folder, *FILES, "--update", "--", "train.py")
    assert made.returncode == 0, made.stderr
    assert "2 regions written to regions.txt." in made.stdout
    assert "h2d_bytes.pageable 32  # step > data, train.py in <module>: batch = torch.ones(2, 4).cuda()" in held(
        folder
    )
    assert (folder / "regions.txt").read_text().endswith("\nstep\n  data\n")
    same = check(folder, *FILES, "--", "train.py", "2")
    assert (same.returncode, same.stdout) == (
        0, "trained\nThe numbers are those in perf.txt.\nThe regions are those in regions.txt.\n"
    )  # fmt: skip


def test_what_moved(folder: Path) -> None:
    """A difference is a table by region and line, and exit code 1, also if it is better; --update accepts it."""
    check(folder, *FILES, "--update", "--", "train.py")
    (folder / "perf.txt").write_text((folder / "perf.txt").read_text().replace(" 32  #", " 32  small batches  #"))
    change(folder, "loss.backward()", "loss.backward(); print(loss.item())")
    change(folder, 'instrument.annotate("data")', 'instrument.annotate("load")')
    change(folder, "torch.ones(2, 4)", "torch.ones(1, 4)")
    worse = check(folder, *FILES, "--", "train.py")
    assert worse.returncode == 1
    assert "greater than in perf.txt." in worse.stdout
    assert "less than in perf.txt (better: record it with --update)." in worse.stdout
    rows = [" ".join(line.split()) for line in worse.stdout.splitlines()]
    assert "syncs 1 2 +1" in rows
    assert "step, train.py:14: loss.backward(); print(loss.item()) 0 1 +1" in rows
    assert "h2d_bytes.pageable 32 B 16 B -16 B" in rows
    assert "step > load, train.py:12: batch = torch.ones(1, 4).cuda() 32 B 16 B -16 B" in rows
    assert "- renamed: step > data to load" in rows
    assert check(folder, *FILES, "--update", "--", "train.py").returncode == 0
    place = "step > load, train.py in <module>: batch = torch.ones(1, 4).cuda()"
    assert f"h2d_bytes.pageable 16  small batches  # {place}" in held(folder)
    assert check(folder, *FILES, "--", "train.py").returncode == 0


def test_formats(folder: Path) -> None:
    """Markdown, SARIF and JSON have what moved, alone on standard output."""
    check(folder, *FILES, "--update", "--", "train.py")
    change(folder, "loss.backward()", "loss.backward(); loss.item()")
    change(folder, '"data"', '"load|er"')
    markdown = check(folder, *FILES, "--format", "markdown", "--", "train.py")
    assert markdown.returncode == 1
    assert "trained" in markdown.stderr
    lines = markdown.stdout.splitlines()
    assert "| number | was | now | difference |" in lines
    assert "| **syncs** | 1 | 2 | +1 |" in lines
    assert "| &emsp;step, train.py:14: loss.backward(); loss.item() | 0 | 1 | +1 |" in lines
    assert "- renamed: step \\> data to load\\|er" in lines

    sarif = json.loads(check(folder, *FILES, "--format", "sarif", "--", "train.py").stdout)
    (run,) = sarif["runs"]
    found = {}
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        found[result["ruleId"]] = place["artifactLocation"]["uri"], place["region"]["startLine"], result["level"]
    assert found["contract/syncs"] == ("train.py", 14, "error")
    assert found["contract/regions"] == ("regions.txt", 1, "error")

    printed = json.loads(check(folder, *FILES, "--json", "--", "train.py").stdout)
    (moved,) = (each for each in printed["changed"] if each["name"] == "syncs")
    assert (moved["was"], moved["now"], [place["now"] for place in moved["places"]]) == (1, 2, [1])
    assert printed["numbers"]["syncs"]["value"] == 2
    assert printed["regions"] == "step\n  load|er"


def test_without_files(folder: Path) -> None:
    """Without files, the counts are printed; a module and a function can be checked as well."""
    printed = check(folder, "--steps", "2", "--", "-m", "train", "9")
    assert printed.returncode == 0
    assert "Counts of step 2 of 2" in printed.stdout
    (folder / "one.py").write_text("import torch\ndef step():\n    torch.ones(4, device='cuda').relu().sum()\n")
    assert json.loads(check(folder, "--json", "one.py::step").stdout)["numbers"]["kernels"]["value"] == 3


DISTRIBUTED = """\
import torch
torch.distributed.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_no_comparison(folder: Path) -> None:
    """A run that fails, or that uses no GPU, is not compared, and no file is written."""
    change(folder, 'print("trained")', 'raise RuntimeError("no data")')
    failed = check(folder, *FILES, "--update", "--", "train.py")
    message = r"instrument: train.py: the run ended early at train.py:\d+: RuntimeError: no data\n"
    assert (failed.returncode, failed.stdout) == (1, "")
    assert re.fullmatch(message, failed.stderr)
    change(folder, ".cuda()", "")
    change(folder, 'raise RuntimeError("no data")', "")
    unused = check(folder, *FILES, "--update", "--format", "markdown", "--", "train.py")
    assert unused.returncode == 1
    assert "nothing could be counted" in unused.stdout
    (folder / "empty.txt").touch()
    empty = check(folder, "--baseline", "empty.txt", "--", "train.py")
    assert (empty.returncode, empty.stderr) == (
        2,
        "instrument: empty.txt contains no numbers; --update writes them\n",
    )


def test_one_of_several_ranks(folder: Path) -> None:
    """With ``--gpus``, a script for torchrun runs alone, and what it sends is counted."""
    (folder / "train.py").write_text(DISTRIBUTED)
    found = json.loads(check(folder, "--gpus", "4", "--time-limit", "inf", "--json", "train.py").stdout)
    assert found["failure"] is None
    assert found["numbers"]["collective_bytes"]["value"] == 4 * 64 * 65
    assert not (folder / "perf.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--update", "train.py"], "--update has no effect without --baseline or --regions"),
        (["train"], "it is neither a script (train.py)"),
        (["--", "-m"], "-m must be followed by the name of a module"),
        (["other.py"], "there is no file other.py"),
        (["--baseline", "no/perf.txt", "--update", "train.py"], "folder not found"),
        (["--baseline", "wrong.txt", "train.py"], "cannot read wrong.txt, line 1: no name, number and reason"),
        (["--format", "html", "train.py"], "'html' is not one of"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong arguments end the command with code 2, before the script runs."""
    monkeypatch.chdir(folder)
    (folder / "wrong.txt").write_text("kernels\n")
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
