"""``instrument check``: the counts of a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import environment

SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
steps = parser.parse_args().steps
model = torch.nn.Linear(8, 4).to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(steps):
    model(torch.ones(2, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", steps)
"""


def check(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instrument", "check", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path)


def test_script_as_it_is(script: str) -> None:
    """The script runs with its own arguments, and the counts follow what it prints."""
    done = check("--", "train.py", "--steps", "3", cwd=Path(script))
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("done 3\nCounts of step 2 of 3\n")
    assert "H2D pageable" in done.stdout
    assert "Memory: " in done.stdout


def test_json(script: str) -> None:
    """With --json, standard output holds the counts alone."""
    done = check("--json", "--fake", "--steps", "2", "--", "train.py", cwd=Path(script))
    found = json.loads(done.stdout)
    counts, memory = found["counts"], found["memory"]
    assert memory["peak_bytes"] == found["numbers"]["peak_bytes"]["value"] == sum(memory["categories"].values())
    assert (2, 2, 64) == (counts["steps"], counts["step"]["step"], counts["step"]["copies"][0]["bytes"])


def test_nothing_on_a_gpu(tmp_path: Path) -> None:
    """A script that uses no GPU fails, with the reason."""
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(2)\n")
    done = check("train.py", cwd=tmp_path)
    assert (1, True) == (done.returncode, "nothing was moved to a GPU" in done.stderr)


def test_missing_script(tmp_path: Path) -> None:
    """A script that is not there is a wrong argument."""
    done = check("missing.py", cwd=tmp_path)
    assert (2, True) == (done.returncode, "there is no file missing.py" in done.stderr)


def test_operators_that_could_not_be_counted(script: str) -> None:
    """An error of the library while it counts is no improvement: the check fails, and says so."""
    (Path(script) / "sitecustomize.py").write_text(
        "from instrument.syncs.counting import recorder\n"
        "def kind(func):\n    raise ValueError('made up')\n"
        "recorder._kind_of = kind\n"
    )
    command = [sys.executable, "-m", "instrument", "check", "--steps", "2", "--", "train.py"]
    paths = os.pathsep.join(filter(None, (script, os.environ.get("PYTHONPATH"))))
    lenient = environment({"INSTRUMENT_STRICT": "0", "PYTHONPATH": paths})
    done = subprocess.run(command, cwd=script, env=lenient, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "operators could not be counted" in done.stderr
