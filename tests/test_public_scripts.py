"""scripts/public_scripts: the manifest, the search for clones, and the comparison. No network is used."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from scripts import repositories
from scripts.public_scripts import compare, ways
from scripts.public_scripts.__main__ import VARIABLE, examine, main
from scripts.public_scripts.manifest import SCRIPTS
from scripts.public_scripts.script import Edit, Script
from scripts.public_scripts.table import Result, page
from scripts.public_scripts.ways import Outcome

pytestmark = pytest.mark.corpus

TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item()}")
"""


def git(*args: str | Path) -> str:
    config = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *config, *map(str, args)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one script."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "part").mkdir()
    (folder / "part" / "train.py").write_text(TRAINING)
    (folder / "other.py").write_text("")
    git("init", "--quiet", folder)
    git("-C", folder, "add", ".")
    git("-C", folder, "commit", "--quiet", "--message", "one")
    return folder


@pytest.fixture
def script(clone: Path) -> Script:
    return Script(
        name="small", repository="owner/small", commit=git("-C", clone, "rev-parse", "HEAD"), file="train.py",
        folder="part", parts=("part",), shows="nothing", args="", updates=8, counted="range(8)",
        loss=r"loss ([\d.]+)", regions=("Linear", "backward"), syncs=("train.py:11 item",),
        edits=(Edit("part/train.py", "range(3)", "range(8)"),), times=(r"took [\d.]+ s",),
    )  # fmt: skip


# The manifest.


def test_manifest() -> None:
    """The manifest has at least twelve scripts with different names, some of each kind."""
    assert len(SCRIPTS) >= 12
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)
    assert any(script.processes > 1 for script in SCRIPTS)
    assert any(script.launcher for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_entry(script: Script) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", script.commit)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", script.repository)
    assert re.fullmatch(r"[a-z0-9-]+", script.name)
    assert re.compile(script.loss).groups == 1
    assert all(re.compile(pattern) for pattern in script.times)
    assert all(re.fullmatch(r"\w+\.py:\d+ \w+", line) for line in script.syncs)
    assert ways.middle(script)[0] >= 2  # otherwise the steps would be the default ones of `run`
    for edit in script.edits:
        assert edit.old.count("\n") == edit.new.count("\n")  # keeps the line numbers in `syncs`
        assert edit.file.startswith(script.parts) or script.parts == (".",)
    assert script.shows
    assert script.counted


# Where clones are found.


def check_out(script: Script, target: Path, cache: Path) -> None:
    place = repositories.locate(VARIABLE, script.repository, script.commit, cache)
    repositories.check_out(place, script.commit, script.parts, target)


LAYOUTS = {
    "OWNER/NAME": "owner/small",
    "OWNER+NAME": "owner+small",
    "OWNER+NAME/repo": "owner+small/repo",
    "OWNER/NAME.git": "owner/small.git",
}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(
    layout: str, bare: bool, clone: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "clones" / LAYOUTS[layout]
    git("clone", "--quiet", *(["--bare"] if bare else []), clone, place)
    assert repositories.find(VARIABLE, tmp_path / "clones", "owner/small") == (place if bare else place / ".git")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "clones"))
    target = tmp_path / "target"
    target.mkdir()
    check_out(script, target, tmp_path / "cache")
    assert [path.relative_to(target).as_posix() for path in target.rglob("*.py")] == ["part/train.py"]
    assert not (tmp_path / "cache").exists()


def emulate_network(monkeypatch: pytest.MonkeyPatch, instead: Path) -> None:
    """Make git read ``instead/OWNER/NAME`` for GitHub's repository of that name."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{instead}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")


def test_network(clone: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is fetched once; the second call uses the cached copy."""
    git("clone", "--quiet", "--bare", clone, tmp_path / "github" / "owner" / "small")
    for instead in (tmp_path / "github", tmp_path / "nothing"):
        emulate_network(monkeypatch, instead)
        target = tmp_path / f"target of {instead.name}"
        target.mkdir()
        check_out(script, target, tmp_path / "cache")
        assert (target / "part" / "train.py").exists()


def test_missing(
    clone: Path,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing clone, commit, network, package or git gives one sentence, and the exit code is 2."""
    reasons = []
    emulate_network(monkeypatch, tmp_path / "nothing")
    reasons.append(examine(script, tmp_path / "1", print).missing)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "empty"))
    reasons.append(examine(script, tmp_path / "2", print).missing)
    git("clone", "--quiet", clone, tmp_path / "clones" / "owner" / "small")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "clones"))
    reasons.append(examine(dataclasses.replace(script, commit="0" * 40), tmp_path / "3", print).missing)
    reasons.append(examine(dataclasses.replace(script, needs=("no_such_package",)), tmp_path / "4", print).missing)
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "nothing"))
        reasons.append(examine(script, tmp_path / "5", print).missing)
    clones = tmp_path / "clones"
    assert reasons[0].startswith("https://github.com/owner/small could not be fetched (")
    assert reasons[1:] == [
        f"PUBLIC_SCRIPTS={tmp_path}/empty has no clone of owner/small: put one at owner/small or owner+small",
        f"{clones}/owner/small/.git does not have commit 000000000000 of owner/small: fetch it there",
        "the package no_such_package is not installed: pip install no_such_package",
        "git is not installed",
    ]
    assert main(["nanogpt"]) == 2
    assert "karpathy+nanoGPT" in capsys.readouterr().out


def test_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-script"])
    assert "unknown script: no-such-script; there are mnist, " in capsys.readouterr().err


# Differences that the comparison detects.


def window(steps: list[int], status: str = "recorded") -> dict[str, Any]:
    return {"status": status, "steps": steps, "reason": None}


def finding(line: int, op: str) -> dict[str, Any]:
    return {
        "site": {"file": "/checkout/part/train.py", "line": line},
        "op": op,
        "status": "sync",
        "cause": "reads",
    }


@pytest.fixture
def outcomes() -> dict[str, Outcome]:
    """The outcomes of runs without a difference."""
    out, regions = "took 0.1 s\nstep 0 loss 0.5\nstep 1 loss 0.25\n", {"Linear", "backward", "ProfilerStep#2"}
    found = {way: Outcome(0, out.replace("0.1 s", f"{len(way)}.5 s"), "a warning\n", 1.0) for way in (
        "plain", "plain again", "run", "run --steps A-B", "run --steps all", "syncs")}  # fmt: skip
    for way, steps in {"run": [2, 4], "run --steps A-B": [4, 6], "run --steps all": [1, 7]}.items():
        found[way].windows, found[way].regions = [window(steps)], set(regions)
        found[way].err = "Where the step went\na warning\nregion\n"
    found["syncs"].report = {"error": None, "finished": True, "steps": 8, "findings": [finding(11, "item")]}
    found["syncs"].out = "took 9.9 s\nstep 0 loss 0.75\nstep 1 loss 1e-3\n"
    return found


def differences(script: Script, outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    return {way: found for way, found in compare.problems(script, outcomes).items() if found}


def test_no_difference(script: Script, outcomes: dict[str, Outcome]) -> None:
    """Times, and the lines that `instrument` adds to standard error, are not differences."""
    assert differences(script, outcomes) == {}


@pytest.mark.parametrize("way", ["plain again", "run", "run --steps A-B", "run --steps all"])
def test_changed_loss(way: str, script: Script, outcomes: dict[str, Outcome]) -> None:
    outcomes[way].out = outcomes[way].out.replace("0.25", "0.24999999")
    assert differences(script, outcomes) == {
        way: ["printed 'step 1 loss 0.24999999' for 'step 1 loss 0.25'", "last loss 0.24999999, plain 0.25"]
    }


def test_changed_output(script: Script, outcomes: dict[str, Outcome]) -> None:
    """Lost lines on either stream, and another exit code, are differences."""
    outcomes["run"].out = outcomes["run"].out.replace("step 0 loss 0.5\n", "")
    outcomes["run --steps all"].err = "Where the step went\n"
    outcomes["run --steps A-B"].code, outcomes["run --steps A-B"].err = 1, "a warning\nOSError: full\n"
    assert differences(script, outcomes) == {
        "run": ["printed 'step 1 loss 0.25' for 'step 0 loss 0.5'"],
        "run --steps A-B": ["exit code 1, plain 0: OSError: full"],
        "run --steps all": ["1 lines of stderr differ, first 'a warning'"],
    }


def test_wrong_windows(script: Script, outcomes: dict[str, Outcome]) -> None:
    """Missing windows, other steps than planned, partial windows and lost regions are differences."""
    outcomes["run --steps all"].windows = [window([1, 8])]
    outcomes["run --steps A-B"].windows = [window([4, 6], "partial")]
    outcomes["run"].windows = []
    assert differences(script, outcomes) == {
        "run": ["0 windows, expected 1"],
        "run --steps A-B": ["steps 4-6 partial, expected 4-6 recorded"],
        "run --steps all": ["steps 1-8 recorded, expected 0-7 recorded"],
    }
    outcomes["run"].windows = [window([2, 4])]
    outcomes["run"].regions = {"LinearAlgebra", "backward"}
    assert differences(script, outcomes)["run"] == ["no region Linear"]
    outcomes["run"].regions = {"Linear [0]", "backward"}
    assert "run" not in differences(script, outcomes)


def test_wrong_report(script: Script, outcomes: dict[str, Outcome]) -> None:
    report = outcomes["syncs"].report
    assert report is not None
    report.update(steps=1, findings=[finding(12, "item")])
    assert differences(script, outcomes) == {
        "syncs": [
            "1 steps, expected 8",
            "lines not found: train.py:11 item",
            "lines not expected: train.py:12 item",
        ]
    }
    report.update(steps=8, findings=[finding(11, "item")], error="RuntimeError: mixed")
    outcomes["syncs"].out = "step 0 loss 0.75\n"
    assert differences(script, outcomes) == {
        "syncs": [
            "did not come to its end: RuntimeError: mixed",
            "2 kinds of lines were not printed, first '<time>'",
        ]
    }
    report.update(error=None, findings=[finding(11, "item"), {**finding(12, "mm"), "status": "not covered"}])
    outcomes["syncs"].out = outcomes["plain"].out
    assert differences(script, outcomes) == {"syncs": ["train.py:12 is said to be not covered: reads"]}
    outcomes["syncs"].report, outcomes["syncs"].err = None, "ValueError: no\n"
    assert differences(script, outcomes) == {"syncs": ["no report, exit code 0: ValueError: no"]}


def test_unrepeatable(script: Script, outcomes: dict[str, Outcome]) -> None:
    """For a script that prints other numbers each time, the lines are compared without numbers and order."""
    script = dataclasses.replace(script, repeatable=False, ordered=False)
    outcomes["run"].out = "step 1 loss 0.3\ntook 5.5 s\nstep 0 loss 0.7\n"
    assert differences(script, outcomes) == {}
    outcomes["run"].out = "step 1 loss 0.3\n"
    assert list(differences(script, outcomes)) == ["run"]


def test_page(script: Script, outcomes: dict[str, Outcome]) -> None:
    """The page has a line for each script, with its differences, missing parts and edits."""
    outcomes["run"].code = 3
    results = [
        Result(script, outcomes, compare.problems(script, outcomes)),
        Result(dataclasses.replace(script, name="other"), {}, {}, missing="there is no clone"),
    ]
    text = page(results, ["third"])
    assert "| 8 | 0.25 | same | differs | same | same | same | 1 |" in text
    assert "- **small**, run: exit code 3, plain 0: region" in text
    assert "- **other**: there is no clone" in text
    assert "`range(3)` becomes `range(8)`" in text
    assert "0 of 2 scripts without a difference. Left out of this run: third." in text


# Runs of a script.


def test_time_limit(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not end is stopped with all of its processes, and its output is kept."""
    (tmp_path / "prepared" / "part").mkdir(parents=True)
    monkeypatch.setattr(ways, "TIME_LIMIT_S", 1)
    monkeypatch.setattr(
        ways, "commands", lambda script: {"plain": ["sh", "-c", "echo here; sleep 1000; echo end"]}
    )
    outcome = ways.run(script, "plain", tmp_path / "prepared", tmp_path)
    assert (outcome.code, outcome.out, outcome.err) == (-9, "here\n", "\nstopped after 1 s")


def test_no_process_stays(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background processes of a run end with it."""
    (tmp_path / "prepared" / "part").mkdir(parents=True)
    background = "sleep 1000 > /dev/null 2>&1 & echo $!"
    monkeypatch.setattr(ways, "commands", lambda script: {"plain": ["sh", "-c", background]})
    outcome = ways.run(script, "plain", tmp_path / "prepared", tmp_path)
    state = Path(f"/proc/{int(outcome.out)}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_script_is_run(clone: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edited script is run plain and under `instrument run`, and its windows and regions are read."""
    git("clone", "--quiet", clone, tmp_path / "clones" / "owner" / "small")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "clones"))
    every = ways.commands(script)
    assert list(every) == ["plain", "plain again", "run", "run --steps A-B", "run --steps all", "syncs"]
    monkeypatch.setattr(ways, "commands", lambda script: {way: every[way] for way in ("plain", "run --steps all")})
    result = examine(script, tmp_path / "base", print)
    assert result.problems == {"plain": [], "run --steps all": []}
    assert result.outcomes["plain"].out.count("loss") == 8
    assert result.outcomes["run --steps all"].windows[0]["steps"][1] == 7
