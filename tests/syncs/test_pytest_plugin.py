"""The pytest plugin, in separate pytest runs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

import instrument
from tests.support.inner_pytest import failure, marked_tests, outcomes, run

pytestmark = pytest.mark.process

SOURCE = str(Path(instrument.__file__).parent.parent)

MARKED = """
import sys
import unittest
import warnings

import pytest
import torch

import instrument

seen = []


def gpu():
    return torch.ones(4, device="cuda")


@pytest.mark.syncs
def test_clean():
    gpu().sum()


@pytest.mark.syncs()
def test_waits():
    gpu().sum().item()


@pytest.mark.syncs(max=1)
def test_within():
    gpu().sum().item()


@pytest.mark.syncs(1, fake=True)
def test_fake():
    gpu().sum().item()
    seen.append(torch.cuda.is_available())


@pytest.mark.syncs
def test_allowed():
    with instrument.allow_sync("to check it"):
        assert gpu().sum().item() == 4


@pytest.mark.syncs(max=9)
def test_own_failure():
    value = gpu().sum().item()
    assert value == 5, "own message"


@pytest.mark.syncs
def test_skips():
    pytest.skip("no reason")


@pytest.mark.syncs
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_expected():
    gpu()
    1 / 0


@pytest.mark.syncs
def test_raises():
    with pytest.raises(ValueError, match="x"):
        raise ValueError("x" + str(gpu().shape[0]))


@pytest.mark.syncs
@pytest.mark.parametrize("size", [1, 2])
def test_arguments(tmp_path, size):
    torch.ones(size, device="cuda")
    assert tmp_path.exists()


@pytest.mark.syncs(maximum=1)
def test_wrong_name():
    pass


@pytest.mark.syncs(max=-1)
def test_wrong_number():
    pass


@pytest.mark.syncs
async def test_coroutine():
    pass


class TestMethods:
    @pytest.mark.syncs
    def test_method(self):
        gpu().sum().item()


@pytest.mark.syncs(max=0)
class TestUnit(unittest.TestCase):
    def test_unit(self):
        gpu().sum().item()

    def test_unit_clean(self):
        gpu()


@pytest.mark.syncs(max=9)
def test_exits():
    gpu()
    sys.exit(0)


def test_exits_in_a_function(syncs):
    syncs(lambda: sys.exit(0))


@pytest.mark.syncs(fake="no")
def test_wrong_fake():
    pass


def test_afterwards():
    assert not torch.cuda.is_available()
    assert seen == [True]
    with pytest.raises((AssertionError, RuntimeError)):
        gpu()
"""

FIXTURE = """
import pytest
import torch


def test_report(syncs):
    model = torch.nn.Linear(4, 1)
    batch = torch.ones(2, 4)

    def step():
        loss = model(batch).sum()
        loss.backward()
        print(loss.item())

    report = syncs(step, on_gpu=[model, batch])
    assert ["item"] == [found.op for found in report.syncs]
    report.assert_max(1)
    with pytest.raises(AssertionError, match="the step waits for the GPU once; allowed: 0"):
        report.assert_max(0)


def test_fake(syncs):
    syncs(lambda: torch.ones(4, device="cuda").sum(), fake=True).assert_max(0)


def test_allowed(syncs):
    def step():
        with syncs.allow("to log it"):
            torch.ones(4, device="cuda").sum().item()

    report = syncs(step)
    report.assert_max(0)
    assert ["to log it"] == [found.allowed for found in report.allowed]


def test_step_fails(syncs):
    def step():
        assert torch.ones(4, device="cuda").shape[0] == 5, "own message"

    syncs(step)
"""


EXPECTED = {
    "test_clean": "PASSED",
    "test_waits": "FAILED",
    "test_within": "PASSED",
    "test_fake": "PASSED",
    "test_allowed": "PASSED",
    "test_own_failure": "FAILED",
    "test_skips": "SKIPPED",
    "test_expected": "XFAIL",
    "test_raises": "PASSED",
    "test_arguments[1]": "PASSED",
    "test_arguments[2]": "PASSED",
    "test_wrong_name": "FAILED",
    "test_wrong_number": "FAILED",
    "test_coroutine": "FAILED",
    "test_method": "FAILED",
    "test_unit": "FAILED",
    "test_unit_clean": "PASSED",
    "test_exits": "FAILED",
    "test_exits_in_a_function": "FAILED",
    "test_wrong_fake": "FAILED",
    "test_afterwards": "PASSED",
}


marked = marked_tests(MARKED)


def test_marker(marked: tuple[Path, str]) -> None:
    """A test that synchronizes more often than the marker allows fails; others keep their outcome."""
    assert EXPECTED == outcomes(marked[1]), marked[1]


def test_failure_shows_the_report(marked: tuple[Path, str]) -> None:
    """The failure message is the report, with the line of the test."""
    text = failure(marked[1], "test_waits")
    assert "the step waits for the GPU once; allowed: 0" in text
    assert "test_it.py:25 in test_waits" in text
    assert "+ total += loss.detach()" in text
    assert "pytest_plugin.py" not in text


def test_failure_of_the_test_itself(marked: tuple[Path, str]) -> None:
    """The test's own failure has its traceback and values without the plugin's frames; the report follows."""
    text = failure(marked[1], "test_own_failure")
    assert "own message" in text
    assert "assert value == 5" in text
    assert "assert 4.0 == 5" in text
    assert "pytest_plugin.py" not in text
    assert "dry/run.py" not in text
    assert "Captured syncs call" in text
    assert "No line makes" not in text


def test_wrong_marker_arguments(marked: tuple[Path, str]) -> None:
    """Wrong marker arguments are reported in one sentence."""
    assert "@pytest.mark.syncs takes max and fake: (), {'maximum': 1}" in failure(marked[1], "test_wrong_name")
    assert "hidden" not in marked[1]
    assert '@pytest.mark.syncs: "max" must be an int >= 0: -1' in failure(marked[1], "test_wrong_number")
    assert "@pytest.mark.syncs: \"fake\" must be True or False: 'no'" in failure(marked[1], "test_wrong_fake")
    assert "not coroutines" in failure(marked[1], "test_coroutine")


def test_xdist(marked: tuple[Path, str]) -> None:
    """The results are the same when pytest-xdist distributes the tests."""
    _, text = run(marked[0], "-p", "xdist", "-n", "2", "-v", "-k", "clean or waits or own_failure")
    expected = {
        name: EXPECTED[name] for name in ("test_clean", "test_waits", "test_own_failure", "test_unit_clean")
    }
    assert expected == {name: outcome for outcome, name in re.findall(r"([A-Z]{6}) \S+::(test_\w+)", text)} | {}, (
        text
    )


def test_fixture(tmp_path: Path) -> None:
    """The fixture checks one function and raises the function's own exceptions."""
    (tmp_path / "test_it.py").write_text(FIXTURE)
    code, text = run(tmp_path, "-v")
    expected = {
        "test_report": "PASSED",
        "test_fake": "PASSED",
        "test_allowed": "PASSED",
        "test_step_fails": "FAILED",
    }
    assert (1, expected) == (code, outcomes(text)), text
    assert "own message" in text
    assert "dry/run.py" not in text


@pytest.mark.gpu
def test_live_with_a_gpu(tmp_path: Path) -> None:
    """With a GPU the marked tests run on it."""
    (tmp_path / "test_it.py").write_text(MARKED)
    _, text = run(tmp_path, "-v", "-k", "clean or waits or within or own_failure", gpu=True)
    names = ("test_clean", "test_waits", "test_within", "test_own_failure", "test_unit_clean")
    assert {name: EXPECTED[name] for name in names} == outcomes(text), text
    assert "(live)" in failure(text, "test_waits")


LIGHT = """
import sys


def test_light():
    assert "torch" not in sys.modules
    loaded = {name for name in sys.modules if name.startswith("instrument")}
    plugin = {"instrument.start.pytest_plugin", "instrument.start.pytest_budget"}
    assert loaded <= {"instrument", "instrument.start", *plugin}
"""


def test_plugin_does_not_import_torch(tmp_path: Path) -> None:
    """The plugin imports neither torch nor the library for tests that do not use it."""
    (tmp_path / "test_it.py").write_text(LIGHT)
    code, text = run(tmp_path, start=functools.partial(subprocess.run, capture_output=True, text=True))
    assert 0 == code, text


def test_entry_point(tmp_path: Path) -> None:
    """The installed plugin loads by itself; `-p no:instrument` disables it."""
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\ninstrument = "instrument.start.pytest_plugin"\n' in project
    installed = tmp_path / "installed" / "probe-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pytest11]\ninstrument = instrument.start.pytest_plugin\n")
    path = os.pathsep.join([SOURCE, str(installed.parent)])
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.syncs\ndef test(): assert 0\n")
    only = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "", "PYTHONPATH": path}
    code, text = run(tmp_path, "--markers", plugin=False, **only)
    assert (0, True) == (code, "@pytest.mark.syncs(max=0, fake=False)" in text)
    _, text = run(tmp_path, "-p", "no:instrument", plugin=False, **only)
    assert "'syncs' not found in `markers`" in text
