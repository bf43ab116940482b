"""The guide "contract.md": its code and commands run, its workflow and its hook work in a repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import warm
from tests.support.inner_pytest import outcomes, run
from tests.support.programs import environment

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "contract.md").read_text()

pytestmark = [pytest.mark.process, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")]


def block(name: str) -> str:
    """Return the block of code that is about the file ``name``."""
    found = re.search(rf"```\w+\n# {re.escape(name)}\n(.*?)```", GUIDE, re.DOTALL)
    assert found, name
    return found.group(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a repository with the script of the guide and its two files."""
    (tmp_path / "train.py").write_text(block("train.py"))
    git(tmp_path, "init", "-q")
    made = command(tmp_path, "check --baseline perf.txt --regions regions.txt --update -- train.py")
    assert made.returncode == 0, made.stderr
    git(tmp_path, "add", "-A")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *arguments], cwd=folder, check=True, env=env)


def variables() -> dict[str, str]:
    return environment({"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"})


def command(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "instrument", *line.split()], variables(), cwd=folder)


def log_the_loss(folder: Path) -> None:
    text = (folder / "train.py").read_text()
    after = "loss.backward()\n        print(loss.item())"
    (folder / "train.py").write_text(text.replace("loss.backward()", after))


def shell(folder: Path, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash, with a command ``instrument`` of this library and a ``pip`` that installs nothing."""
    programs = folder.parent / f"{folder.name}-bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("instrument", f'exec "{sys.executable}" -m instrument "$@"'), ("pip", "exit 0")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    env = variables() | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"} | more
    return subprocess.run(["bash", "-e", "-c", line], cwd=folder, env=env, capture_output=True, text=True)


def test_files(folder: Path) -> None:
    """The lines shown are in the files, and a check prints what moved as shown."""
    shown = [
        text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE) if not kind
    ]
    assert (folder / "regions.txt").read_text().split("\n", 1)[1] in shown
    numbers = next(text for text in shown if text.startswith("flops"))
    assert set(numbers.splitlines()) <= set((folder / "perf.txt").read_text().splitlines())
    log_the_loss(folder)
    (line, table) = re.findall(r"```console\n\$ instrument (check.*)\n(\d(?:.*\n)*?)```", GUIDE)[0]
    moved = command(folder, line)
    assert moved.returncode == 1
    printed = moved.stdout.splitlines()
    assert {each for each in table.splitlines() if each != "..."} <= set(printed), moved.stdout


def test_tests(tmp_path: Path) -> None:
    """The tests of the guide pass once the regions are written, and an unknown name lists all."""
    (tmp_path / "test_step.py").write_text(block("test_step.py"))
    code, text = run(tmp_path, "-v", "--update-regions")
    assert (code, len(outcomes(text))) == (0, 4), text
    assert (tmp_path / "regions_of_step.txt").read_text().endswith("\nforward\n")
    assert run(tmp_path, "-v")[0] == 0


def test_workflow(folder: Path) -> None:
    """Its lines run in bash: the check passes; with another synchronization it fails and says where."""
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load(block(".github/workflows/counts.yml"))["jobs"].values()
    steps = [step for step in job["steps"] if "run" in step]
    summary = folder / "summary.md"

    def run_steps() -> list[int]:
        codes: list[int] = []
        for step in steps:
            if step.get("if") == "always()" or not any(codes):
                codes.append(shell(folder, step["run"], GITHUB_STEP_SUMMARY=str(summary)).returncode)
        return codes

    assert run_steps() == [0] * 4
    assert "The numbers are those in perf.txt." in summary.read_text()
    log_the_loss(folder)
    assert run_steps() == [0, 0, 1, 0]
    assert "| &emsp;backward, train.py:17: print(loss.item()) | 0 | 1 | +1 |" in summary.read_text()


def test_hook(folder: Path) -> None:
    """pre-commit runs the hook: it passes, and fails with the table once a number moved."""
    pytest.importorskip("pre_commit")
    (folder / ".pre-commit-config.yaml").write_text(block(".pre-commit-config.yaml"))
    git(folder, "add", "-A")
    line = f'"{sys.executable}" -m pre_commit run'
    home: dict[str, Any] = {"PRE_COMMIT_HOME": str(folder.parent / "hooks")}
    passed = shell(folder, line, **home)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "counts of a training step" in passed.stdout
    assert "Passed" in passed.stdout
    log_the_loss(folder)
    git(folder, "add", "-A")
    failed = shell(folder, line, **home)
    assert failed.returncode == 1
    assert "backward, train.py:17: print(loss.item())" in failed.stdout
