"""Budgets, comments, baselines and markers that match nothing are errors that name the nearest."""

from __future__ import annotations

import linecache
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import instrument
from instrument.explain.waits.comments import _mistakes
from instrument.start.cli import app

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

SCRIPT = """\
import torch
import instrument

def step():
    x = torch.ones(2, device="cuda")
    with instrument.annotate("train"), instrument.annotate("forward"):
        x = x * 2
    x.sum().item()
"""


def step(region: str = "forward") -> None:
    with instrument.annotate("train"), instrument.annotate(region):
        torch.ones(2, device="cuda")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "steps.py").write_text(SCRIPT)
    return tmp_path / "steps.py"


def syncs(*arguments: object) -> Result:
    linecache.checkcache()  # several programs of one name in this process
    return CliRunner().invoke(app, ["syncs", *map(str, arguments)])


@pytest.mark.parametrize(
    ("region", "end"),
    [
        ("forwrd", 'did you mean "forward"?'),
        ("train/foward", 'did you mean "train/forward"?'),
        ("data", 'there were "forward", "train"'),
    ],
)
def test_budget_of_a_region_that_never_ran(region: str, end: str) -> None:
    """A budget of a region that did not run fails, and names the nearest region."""
    report = instrument.dry_run(step, budget={region: 0})
    expected = f'region "{region}" has a budget, but never ran; {end}'
    assert report.over() == expected
    assert expected in str(report).replace("\n    ", " ")
    with pytest.raises(AssertionError, match="never ran"):
        report.assert_max()


@pytest.mark.parametrize("budget", [{"forward": 0}, {"train/forward": 0}, {"train": 0, "/forward/": 2}, 0])
def test_budget_of_a_region_that_ran(budget: int | dict[str, int]) -> None:
    """A budget of a region that ran without a synchronization passes."""
    instrument.dry_run(step, budget=budget).assert_max()


def test_budget_without_any_region() -> None:
    """Without regions, the sentence says so."""
    report = instrument.dry_run(lambda: torch.ones(2, device="cuda"), budget={"forward": 0})
    assert report.over() == 'region "forward" has a budget, but never ran; there was none at all'


def test_budget_of_the_command(script: Path) -> None:
    """The command fails as well, and names the region."""
    result = syncs("steps.py::step", "--budget", "forwrd=0")
    assert 1 == result.exit_code
    assert 'never ran; did you mean "forward"?' in result.output
    assert 0 == syncs("steps.py::step", "--budget", "forward=0").exit_code


@pytest.mark.parametrize(
    ("comment", "mistake"),
    [
        ("# instrument: alow-sync once", "did you mean"),
        ("# instrument: allow_sync once", "did you mean"),
        ("# instrument: allow sync once", "did you mean"),
        ("# Instrument: Allow-Sync once", "did you mean"),
        ("# instrument allow-sync once", "did you mean"),
        ("# instrument: allow-sync once", ""),
        ("# instrument the model", ""),
        ("# instruments allow sync", ""),
    ],
)
def test_spelling_of_comments(script: Path, comment: str, mistake: str) -> None:
    """A comment that resembles one that allows a synchronization fails, at its line."""
    script.write_text(SCRIPT.replace("item()", f"item()  {comment}"))
    found = list(_mistakes(script.read_text()))
    assert [8] * bool(mistake) == [line for line, _, why in found if mistake in why]
    result = syncs("steps.py::step", "--max", 9)
    assert int(bool(mistake)) == result.exit_code
    assert bool(mistake) == ("steps.py:8: the comment" in result.output)


def test_comment_beside_no_statement(script: Path) -> None:
    """A comment that is two lines above its statement allows nothing, and the report says where it belongs."""
    script.write_text(SCRIPT.replace("    x.sum()", "    # instrument: allow-sync once\n\n    x.sum()"))
    result = syncs("steps.py::step", "--max", 9)
    assert 1 == result.exit_code
    assert "it belongs on a line of a statement, or alone on the line above" in result.output


def test_allowed_block_without_synchronization() -> None:
    """A block that allows a synchronization which did not happen this time is no error."""

    def quiet() -> None:
        with instrument.allow_sync("seldom"):
            step()

    instrument.dry_run(quiet).assert_max()


def test_baseline_of_another_program(script: Path) -> None:
    """A baseline that matches no synchronization fails and names the nearest; one that is partly old does not."""
    assert 0 == syncs("steps.py::step", "--write-baseline", "known").exit_code
    text = Path("known").read_text()
    script.write_text(SCRIPT.replace("x.sum().item()", "x.mean().item()"))
    result = syncs("steps.py::step", "--baseline", "known", "--max", 9)
    assert 1 == result.exit_code
    assert "nearest: steps.py in step, item: x.mean().item()" in result.output
    assert "is it the file of another program?" in result.output
    script.write_text(SCRIPT.replace("    x.sum().item()\n", ""))
    assert 0 == syncs("steps.py::step", "--baseline", "known").exit_code  # it was fixed
    script.write_text(SCRIPT)
    Path("known").write_text(f"{text}0123456789abcdef 1  # old.py in step, item: gone\n")
    assert 0 == syncs("steps.py::step", "--baseline", "known").exit_code


def test_function_of_step_on(script: Path) -> None:
    """A function of --step-on that is never found fails."""
    script.write_text(f"{SCRIPT}\nstep()\n")
    result = syncs("steps.py", "--max", 9, "--step-on", "steps.py:stepp")
    assert 1 == result.exit_code
    assert "the function of --step-on was not found, or never called" in result.output


@pytest.mark.process
def test_spelling_of_markers(tmp_path: Path) -> None:
    """A marker that is nearly ``syncs`` fails its test, and other markers are left alone."""
    refused = ["sync(max=9)", "syncss", "synchs(fake=True)"]
    accepted = ["sync", "asyncio", "sync(of='disks')", "syncs_later(1)", "slow(max=9)"]
    tests = [f"@pytest.mark.{name}\ndef test_{n}(): ...\n" for n, name in enumerate(refused + accepted)]
    (tmp_path / "test_it.py").write_text("import pytest\n" + "".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "test_it.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{len(refused)} failed, {len(accepted)} passed" in result.stdout, result.stdout
    for name in ("sync", "syncss", "synchs"):
        assert f"there is no marker {name}; did you mean @pytest.mark.syncs?" in result.stdout


def test_a_module_as_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-m`` runs a module or a package as Python does, and passes on what follows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "helper.py").write_text("number = 1\n")
    code = (
        "import sys\nimport torch\nfrom .helper import number\nassert sys.argv[1:] == ['--lr', '2'], sys.argv\n"
        "assert sys.modules['__main__'].__spec__.name.startswith('pkg')\n"
        "torch.ones(2, device='cuda').sum().item()\n"
    )
    (tmp_path / "pkg" / "train.py").write_text(code)
    (tmp_path / "pkg" / "__main__.py").write_text(code)
    for arguments in (["-m", "pkg.train"], ["-m", "pkg"], ["--max", 1, "-m", "pkg", "--"]):
        result = syncs(*arguments, "--lr", "2")
        assert int("--max" not in arguments) == result.exit_code, result.output
        assert "in <module>" in result.output
    for name in ("pkg.missing", "missing", "pkg.helper.more", "os.path.x", "pkg/train", ""):
        result = syncs("-m", name)
        assert 2 == result.exit_code
        assert f"there is no module {name} that can be run" in result.output
    assert 2 == syncs("-m").exit_code
