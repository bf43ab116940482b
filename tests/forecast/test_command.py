"""`instrument forecast`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.forecast.table import write_table
from instrument.start.cli import app

from .tables import content

SCRIPT = """
import sys
import torch
print("training")
model = torch.nn.Linear(int(sys.argv[1]), 512).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.zeros(64, int(sys.argv[1]), device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["forecast", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_gpus_side_by_side(script: Path) -> None:
    """A row for each GPU, in the order asked for, after what the script prints."""
    code, out, _ = run("--gpu", "h100,t4", "--", script, 512)
    assert code == 0
    shown = out[out.index("gpu ") :].splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["h100", "t4"]


def test_json(script: Path) -> None:
    """The same as JSON; a larger model takes longer."""
    found = [json.loads(run("--json", "--gpu", "l4", "--", script, width)[1])[0] for width in (512, 65536)]
    assert [each["gpu"] for each in found] == ["l4", "l4"]
    assert found[0]["gpu_ns"] < found[1]["gpu_ns"]
    assert found[0]["least_ns"] <= found[0]["ns"] <= found[0]["most_ns"]
    assert found[0]["peak_bytes"] < found[1]["peak_bytes"] < found[0]["memory_bytes"]
    assert found[0]["fits"]


def test_a_model_that_does_not_fit(script: Path) -> None:
    """The peak of its memory is beside that of each GPU."""
    script.write_text(SCRIPT.replace("512).cuda()", "4_000_000).cuda()"))
    _, out, _ = run("--gpu", "t4,h100", "--", script, 1024)
    small, large = out[out.index("gpu ") :].splitlines()[1:3]
    assert small.endswith("of 15.6 GB: too much")
    assert large.endswith("of 84.9 GB")


def test_table(script: Path, tmp_path: Path) -> None:
    """Another table is used instead: one without this GPU gives a bound."""
    file = tmp_path / "table.json.gz"
    write_table(content("a100"), file)
    code, out, _ = run("--table", file, "--gpu", "l4", "--", script, 512)
    assert code == 0
    assert "bound, not forecast" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "p100", "train.py"), "--gpu must be one of h100"),
        (("nothing.py",), "there is no file nothing.py"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], message: str) -> None:
    """They end the command with code 2 and a message."""
    code, _, err = run(*words)
    assert code == 2
    assert message in err


def test_a_script_that_fails(tmp_path: Path) -> None:
    """The error is named, and the exit code is 1."""
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no data')")
    code, _, err = run(file)
    assert code == 1
    assert "RuntimeError: no data" in err
