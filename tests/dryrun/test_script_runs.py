"""Dry runs of scripts and of functions in them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instrument.explain.waits.report import SyncReport
from instrument.syncs.dryrun.run import dry_run_file

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


SCRIPT = '''
import sys
import torch
import neighbor

seen = torch.ones(2, device="cuda").tolist()

def step():
    neighbor.read(torch.ones(2, device="cuda"))

def needs(batch, size=1):
    """Needs something."""

class Trainer:
    @staticmethod
    def fit():
        torch.ones(2, device="cuda").cpu()

number = 3

if __name__ == "__main__":
    torch.ones(len(sys.argv), device="cuda").sum().item()
    sys.exit(0 if sys.argv[1:] == ["--epochs", "2"] else 5)
'''


NEIGHBOUR = "def read(value):\n    value.sum().item()\n"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """Write a script with functions and a module beside it; restore `sys.modules` and `sys.path` afterwards."""
    (tmp_path / "neighbor.py").write_text(NEIGHBOUR, "utf-8")
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT, "utf-8")
    arguments, places, modules, main = list(sys.argv), list(sys.path), set(sys.modules), sys.modules["__main__"]
    yield path
    assert arguments == sys.argv
    assert places == sys.path
    assert main is sys.modules["__main__"]
    left = {name for name in set(sys.modules) - modules if name in ("train_it", "neighbor")}
    for name in left:
        del sys.modules[name]
    assert set() == left - {"neighbor"}


def places(report: SyncReport) -> list[tuple[str, str, int]]:
    return sorted((found.op, Path(found.site.file).name, found.site.line) for found in report.syncs)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("fake", [False, True])
def test_a_function_of_a_script(script: Path, fake: bool) -> None:
    """The report has what the function does, and not the import of the script."""
    report = dry_run_file(script, "step", fake=fake)
    assert report.error is None
    assert [("item", "neighbor.py", 2)] == places(report)


def test_a_method_of_a_script(script: Path) -> None:
    """A function may be inside a class."""
    assert [("cpu", "train_it.py", 17)] == places(dry_run_file(script, "Trainer.fit"))


def test_a_script(script: Path) -> None:
    """A script runs as the main program, with its arguments."""
    report = dry_run_file(script, None, args=["--epochs", "2"])
    assert report.error is None
    assert [("item", "train_it.py", 22), ("tolist", "train_it.py", 6)] == places(report)
    assert isinstance(dry_run_file(script, None).error, SystemExit)


def test_a_script_that_fails(script: Path) -> None:
    """The script's error is in the report, at its line; so is an error during its import."""
    script.write_text("import torch\ntorch.ones(2, device='cuda').item\nraise OSError('full')\ndef step(): ...\n")
    for function in (None, "step"):
        report = dry_run_file(script, function)
        assert isinstance(report.error, OSError)
        (note,) = report.not_covered
        assert (str(script), 3) == (note.site.file, note.site.line)


def test_a_script_that_cannot_be_compiled(script: Path) -> None:
    """A syntax error is the script's, not the run's."""
    script.write_text("def step(:\n")
    with pytest.raises(ValueError, match=r"cannot import .*train_it\.py: SyntaxError: invalid syntax"):
        dry_run_file(script, "step")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("nothing", ValueError, "there is no function nothing in "),
        ("Trainer.nothing", ValueError, "there is no function Trainer.nothing in "),
        ("needs", TypeError, "needs in .* needs arguments: batch$"),
        ("number", TypeError, "number in .* must be a plain function"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_no_such_function(script: Path, function: str, error: type[Exception], message: str) -> None:
    """Something that is not callable is the caller's error."""
    with pytest.raises(error, match=message):
        dry_run_file(script, function)


def test_no_such_file(tmp_path: Path) -> None:
    """A missing file is the caller's error."""
    with pytest.raises(ValueError, match="there is no file "):
        dry_run_file(tmp_path / "missing.py", None)


def test_a_script_named_as_a_module(script: Path) -> None:
    """A script with the name of an imported module is found all the same."""
    path = script.with_name("copy.py")
    path.write_text(SCRIPT, "utf-8")
    assert [("item", "neighbor.py", 2)] == places(dry_run_file(path, "step"))
    assert sys.modules["copy"] is copy
