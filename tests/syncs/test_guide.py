"""The code in the guide to synchronizations runs, and its commands print the output shown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import warm

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "syncs.md").read_text()
PLUGIN = "instrument.start.pytest_plugin"

pytestmark = [pytest.mark.process, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with the files of the guide and a trace."""
    (tmp_path / ".git").mkdir()
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL):
        (tmp_path / name).write_text(code)
    shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", tmp_path / "trace.json.gz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> str:
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm.run([sys.executable, "-m", *command], environment)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_code_blocks_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code blocks run one after the other."""
    variables: dict[str, Any] = {}
    for block in re.findall(r"```python\n(?!# \w+\.py)(.*?)```", GUIDE, re.DOTALL):
        exec(block, variables)
    assert "No line makes the CPU wait for the GPU (dry run" in capsys.readouterr().out


def test_commands_print_the_output_shown(folder: Path) -> None:
    """Each command prints the output shown below it, and the baseline file matches."""
    shown = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*?)(?=\$ |```)", GUIDE, re.MULTILINE)
    assert len(shown) == 3
    for command, output in shown:
        printed = run(*shlex.split(command))
        assert output in ("...\n", printed)
    assert f"```\n{(folder / 'syncs.txt').read_text()}```" in GUIDE


def test_guide_tests_pass(folder: Path) -> None:
    """The tests in the guide pass."""
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    named = [] if installed else ["-p", PLUGIN]
    assert "2 passed" in run("pytest", "-q", *named, "-p", "no:cacheprovider", "test_steps.py")
