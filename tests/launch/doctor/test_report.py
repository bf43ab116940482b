"""The printed page, the JSON and the command."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from instrument.start.doctor.machine import Check, Machine, Status
from instrument.start.doctor.report import SECTIONS, CheckResult, examine, render, to_json
from tests.launch.doctor.support import command
from tests.support import nsys
from tests.support.programs import ROOT

pytestmark = pytest.mark.vendor

GUIDE = (ROOT / "docs" / "doctor.md").read_text()


@pytest.mark.nsys
def test_the_command(tmp_path: Path) -> None:
    """Everything that is installed records: the exit code is 0, and the JSON has each check."""
    nsys.nsys()
    with nsys.alone():
        done = command("--json", "--out", str(tmp_path / "runs"))
    assert (0, "") == (done.returncode, done.stderr)
    printed = json.loads(done.stdout)
    assert 0 == printed["problems"]
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["torch.profiler"]["facts"]["proved"]
    assert checks["nsys"]["facts"]["proved"]
    assert {"section", "name", "status", "sentence", "fix", "facts"} == set(checks["nsys"])


def test_files_of_the_current_folder_do_not_run(tmp_path: Path, tools: Callable[..., Path]) -> None:
    """No command, and no child of one, imports files of the current folder."""
    tools("nsys", 'shift 7; exec "$@"')
    hostile = tmp_path / "here"
    (hostile / "instrument").mkdir(parents=True)
    names = ("torch", "json", "numpy", "rich", "msgspec", "sqlite3", "typer", "nvtx", "instrument/__init__")
    for name in names:
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10)); raise SystemExit(3)"
        (hostile / f"{name}.py").write_text(text)
    for rank in range(4):
        shutil.copy(ROOT / "tests" / "data" / "gpu_two_steps.json", hostile / f"rank{rank}.json")
    script = [str(Path(sys.executable).with_name("instrument"))]
    with_children = [["doctor"], ["summarize", "."]]
    lines = {"script": [*with_children, ["syncs", "rank0.json"], ["run", "--help"]], "-m": with_children}
    for way, commands in lines.items():
        program = script if way == "script" else [sys.executable, "-m", "instrument"]
        for arguments in commands:
            done = subprocess.run([*program, *arguments], cwd=hostile, capture_output=True, text=True, timeout=300)
            assert not (tmp_path / "ran").exists(), (arguments, (tmp_path / "ran").read_text())
            assert done.returncode in (0, 1), done.stderr
        shutil.rmtree(hostile / "instrument", ignore_errors=True)  # "python -m" would import it


def test_a_machine_where_everything_is_broken(tmp_path: Path, tools: Callable[..., Path]) -> None:
    """The page is complete, and plain text in a pipe; the exit code is 1, and 2 for a wrong option."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    tools("nsys", "echo No license; exit 3")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command(PYTHONPATH=path, INSTRUMENT_EMITTERS="nsys", COLUMNS="80")
    assert 1 == done.returncode
    assert "\x1b" not in done.stdout
    text = " ".join(done.stdout.split())
    assert "PROBLEM torch" in text
    assert "import torch ended with code 1: ImportError: libcudart.so.13: cannot open" in text
    assert "PROBLEM nsys 2023.4.1.97: nsys profile ended with code 3: No license" in text
    assert "PROBLEM settings INSTRUMENT_EMITTERS is ignored" in text
    assert re.search(r"\n3 problems.*\.\n$", done.stdout)
    assert 2 == command("--nonsense").returncode


def test_a_check_that_raises(machine: Machine) -> None:
    """A check that raises is a problem, and the next ones run; Ctrl-C passes."""

    def broken(machine: Machine) -> Check:
        raise ZeroDivisionError("oh")

    def interrupted(machine: Machine) -> Check:
        raise KeyboardInterrupt

    checks = {"first": broken, "silent": lambda machine: None, "last": lambda machine: Check("ok", "fine")}
    first, last = examine(machine, {"section": checks})
    assert ("section", "first", "problem") == (first.section, first.name, first.check.status)
    assert "not checked: ZeroDivisionError: oh" == first.check.sentence
    assert ("last", "fine") == (last.name, last.check.sentence)
    with pytest.raises(KeyboardInterrupt):
        list(examine(machine, {"section": {"name": interrupted}}))


def page(found: list[CheckResult], width: int) -> str:
    file = io.StringIO()
    render(found, console=Console(file=file, width=width, color_system=None))
    return file.getvalue()


WORDS = st.lists(st.text("abc[]/:-", min_size=1, max_size=15), min_size=1, max_size=30)


@given(WORDS, st.sampled_from([20, 80, 100]))
def test_sentences_fit(words: list[str], width: int) -> None:
    """Every word is on the page, and no line is wider than the terminal if words can be separated."""
    text = page([CheckResult("section", "name", Check("note", " ".join(words)))], width)
    shown = text.split()
    assert ["section", "note", "name", *words, "No", "problem,"] == shown[: len(words) + 5]
    lines = text.splitlines()[1:-2]
    assert max(map(len, lines)) <= max(width, 46)


@pytest.mark.parametrize(
    "statuses, conclusion",
    [
        (["ok", "absent"], "No problem: everything installed records here."),
        (["ok", "note"], "No problem, 1 note: everything installed records here."),
        (["problem", "note", "note"], "1 problem, 2 notes."),
        (["problem", "problem"], "2 problems."),
    ],
)
def test_conclusion(statuses: list[Status], conclusion: str) -> None:
    """The last line counts the problems, and so does the JSON."""
    found = [CheckResult("section", status, Check(status, "x", "do it")) for status in statuses]
    text = page(found, 80)
    assert conclusion == text.splitlines()[-1]
    assert len(statuses) == text.count("fix: do it")
    assert statuses.count("problem") == to_json(found)["problems"]


def test_the_guide() -> None:
    """The page in the guide has all sections and checks, in their order."""
    (shown,) = re.findall(r"```\n\$ instrument doctor\n(.*?)```", GUIDE, re.DOTALL)
    assert list(SECTIONS) == [line for line in shown.splitlines() if line in SECTIONS]
    names = [name for checks in SECTIONS.values() for name in checks]
    signs = r"^(?:ok|note|PROBLEM|-) +(.*)$"
    rows = re.findall(signs, shown, re.MULTILINE)
    found = [next(name for name in names if row.startswith(f"{name} ")) for row in rows]
    assert found == [name for name in names if name in found]
    described = re.findall(r"^\| ([\w. ]+) \|", GUIDE, re.MULTILINE)
    assert names == [name for name in described if name in names]
