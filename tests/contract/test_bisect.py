"""The command ``instrument bisect``: which commit moved a number, in a repository with a real history."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from instrument.explain.contract.numbers import Number, Numbers
from instrument.start import worktree
from instrument.start.cli import app
from instrument.start.commands.bisect import Measured, Search
from tests.support import warm
from tests.support.programs import environment

if TYPE_CHECKING:
    from click.testing import Result

pytestmark = pytest.mark.process

TRAIN = """\
import torch
from layers import LAYERS

model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4).cuda()).sum().backward()
    optimizer.step()
"""


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=Ann", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True, env=env
    ).stdout.strip()


def commit(folder: Path, subject: str, layers: object, **files: str) -> None:
    """Commit the number of layers, which is a file of the project's own package."""
    (folder / "src" / "layers.py").write_text(f"LAYERS = {layers}\n")
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", subject)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository of six commits; from the fourth on, the model has three layers."""
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "train.py").write_text(TRAIN)
    git(root, "init", "-q")
    commit(root, "start", 2)
    commit(root, "readme", 2, readme="new")
    commit(root, "does not run", "1 // 0")
    commit(root, "a third layer", 3)
    commit(root, "docs", 3, docs="new")
    commit(root, "more docs", 3, docs="newer")
    git(root, "tag", "good", "HEAD~5")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root / "src")

    def run_warm(words: list[str], at: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return warm.run([sys.executable, *words], environment(env), cwd=at)

    monkeypatch.setattr(worktree, "run_python", run_warm)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return root


def bisect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bisect", *arguments], env={"COLUMNS": "100"})


def is_clean(folder: Path) -> bool:
    """Return whether nothing is left in the repository or in the folder for temporary files."""
    left = [*(folder.parent / "temporary").iterdir(), *(folder / ".git").glob("worktrees/*")]
    return (
        not left
        and not git(folder, "status", "--porcelain")
        and len(git(folder, "worktree", "list").splitlines()) == 1
    )


def test_number(folder: Path) -> None:
    """The commit that moved a number is found, with its table, past one that does not run; nothing is left."""
    result = bisect("good..HEAD", "--number", "kernels.gemm", "--", "check", "--", "train.py")
    assert result.exit_code == 1, result.output  # the commit before it does not run
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "One of 2 commits; the others could not be checked:" in lines
    assert any("does not run (Ann, " in line for line in lines)
    assert any("a third layer (Ann, " in line for line in lines)
    assert any(line.startswith("kernels.gemm 5 8 +3") for line in lines), result.output
    assert any(line.startswith("train.py:7: model(") for line in lines), result.output
    assert any("passed over: the run ended early at " in line and "ZeroDivisionError" in line for line in lines)
    assert is_clean(folder)


def test_outcome_of_the_check(folder: Path) -> None:
    """Without a number, it is the first commit for which the check fails; a merge stands for its branch."""
    check = ("check", "--baseline", "perf.txt")
    made = warm.run(
        [sys.executable, "-m", "instrument", *check, "--update", "--", "train.py"],
        environment({"PYTHONPATH": os.pathsep.join([str(folder / "src"), *sys.path])}),
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr
    commit(folder, "write it down", 3)
    git(folder, "tag", "held")
    git(folder, "checkout", "-qb", "branch")
    commit(folder, "wider", 4)
    commit(folder, "wider still", 5)
    git(folder, "checkout", "-q", "main")
    commit(folder, "notes", 3, notes="new")
    git(folder, "merge", "-q", "--no-ff", "-m", "merge of the branch", "branch")
    commit(folder, "later", 5, notes="newer")
    result = bisect("held..", "--", *check, "--", str(folder / "train.py"))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(" merge of the branch (Ann, " in line and not line.startswith("instrument:") for line in lines)
    assert is_clean(folder)
    same = bisect("good~0..good~0", "--", *check, "--", "train.py")
    assert "they are the same" in same.output


def test_ends_alike(folder: Path) -> None:
    """If the ends do not differ, the numbers that moved are named."""
    result = bisect("good..HEAD", "--", "check", "train.py")
    assert result.exit_code == 2
    assert "the check passes for BAD, too; numbers that moved, for --number: " in result.output
    assert "kernels.gemm" in result.output
    same = bisect("HEAD~1..HEAD", "--number", "kernels", "--", "check", "train.py")
    assert "kernels is the same at both ends; numbers that moved, for --number: none" in same.output
    unknown = bisect("HEAD~1..HEAD", "--number", "kernel", "--", "check", "train.py")
    assert "unknown number kernel; numbers that moved: none" in unknown.output
    fails = bisect("HEAD~1..HEAD", "--", "check", "no.py")
    assert "GOOD cannot be checked: there is no file no.py" in fails.output
    assert is_clean(folder)


@pytest.mark.parametrize(
    ("commits", "check", "message"),
    [
        ("HEAD", "check", "the commits must be GOOD..BAD, such as v1.2..HEAD: HEAD"),
        ("good...HEAD", "check", "the commits must be GOOD..BAD"),
        ("nothing..HEAD", "check", "there is no commit nothing"),
        ("--all..HEAD", "check", "No such option"),
        ("HEAD..good", "check", "HEAD is not an ancestor of good"),
        ("HEAD..HEAD", "check", "there is no commit between HEAD and HEAD: they are the same"),
        ("good..HEAD", "train.py", "what follows -- must be: check"),
        ("good..HEAD", "check --update", "what follows -- must be: check"),
    ],
)
def test_refused(commits: str, check: str, message: str, folder: Path) -> None:
    """What cannot be searched is refused with one sentence, before anything runs."""
    result = bisect(commits, "--", *check.split(), "train.py")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert is_clean(folder)


def test_refused_repositories(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are in no commit, a shallow clone and a folder without a repository are refused."""
    arguments = ("HEAD~1..HEAD", "--", "check", "train.py")
    (folder / "train.py").write_text(f"{TRAIN}\n# changed\n")
    assert "train.py has changes that are in no commit: commit or stash them" in bisect(*arguments).output
    git(folder, "checkout", "train.py")
    git(tmp_path, "clone", "-q", "--depth", "2", folder.as_uri(), "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    assert (
        "the repository is a shallow clone, which lacks commits: git fetch --unshallow"
        in bisect(*arguments).output
    )
    monkeypatch.chdir(tmp_path)
    assert "not a git repository" in bisect(*arguments).output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: int, folder: Path) -> None:
    """Ctrl-C and SIGTERM end the search; the temporary folder is removed."""
    env = environment({"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder.parent / "temporary")})
    command = [
        sys.executable,
        "-m",
        "instrument",
        "bisect",
        "good..HEAD",
        "--number",
        "kernels",
        "--",
        "check",
        "train.py",
    ]
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / ".git" / "worktrees").is_dir() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert is_clean(folder)


def test_numbers_that_are_not_exact() -> None:
    """A number that differs a little from run to run has not moved."""
    values = [100, 103, 97, 104, 150, 151]
    measured = [Measured(True, Numbers({"kernels": Number(value, exact=False)})) for value in values]
    search = Search(
        [str(value) for value in values], lambda commit: measured[values.index(int(commit))], "kernels"
    )
    assert search.run() == (3, 4)


def test_options_of_the_script(folder: Path) -> None:
    """A script may have an option of the name that the check must not have."""
    result = bisect("good~0..good~0", "--", "check", "--", "train.py", "--update")
    assert "they are the same" in result.output
