"""scripts/gpu_check: each check is rehearsed without a GPU; how they end, and what is kept."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import costs, driver, edges, lengths, regions, tools
from scripts.gpu_check.check import Check, FailedError, Figures, Given, Run, SkippedError

from instrument.config import settings

# The others start many processes, whose parts are tested where they belong.
REHEARSED = [
    driver.untouched,
    edges.detector,
    regions.tree,
    regions.lanes,
    regions.handles,
    lengths.ahead,
    costs.launches,
]


@pytest.mark.parametrize("check", REHEARSED, ids=lambda check: check.__name__)
def test_rehearsal(tmp_path: Path, check: Run) -> None:
    """A check runs to its end on the CPU, where each operator of a trace is given a kernel."""
    assert isinstance(check(Given(tmp_path, "cpu")), dict)


def test_a_broken_promise_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail shows nothing."""
    monkeypatch.setattr(settings, "enabled", False)
    with pytest.raises(FailedError, match="one window of the steps"):
        edges.detector(Given(tmp_path, "cpu"))


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and what can be done."""
    monkeypatch.setattr(command, "machine", lambda _: {"gpu": "", "torch": "2", "python": "3"})
    assert command.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def passing(given: Given) -> Figures:
    return {"threads": 3}


def failing(given: Given) -> Figures:
    raise FailedError("3 is not 4")


def skipping(given: Given) -> Figures:
    raise SkippedError("no tool")


def wrong(given: Given) -> Figures:
    raise ZeroDivisionError("a mistake")


def dying(given: Given) -> Figures:
    print("last words", flush=True)
    os._exit(3)


def hanging(given: Given) -> Figures:
    time.sleep(60)
    return {}


CHECKS = [
    Check("passing", passing, 30),
    Check("failing", failing, 30),
    Check("skipping", skipping, 30),
    Check("wrong", wrong, 30),
    Check("dying", dying, 30, alone=True),
    Check("hanging", hanging, 3, alone=True),
]


def main() -> None:
    """Run the checks above, in a process whose children find them here too."""
    command.CHECKS[:] = CHECKS
    sys.exit(command.main())


def test_how_checks_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in the table and in the file, also one that crashed or did not end; then the exit code is 1."""
    program = tmp_path / "program.py"
    program.write_text("from tests.test_gpu_check import main\nmain()\n")
    monkeypatch.setattr(command, "CHECKS", CHECKS)
    monkeypatch.setattr(command, "MODULE", [str(program)])
    monkeypatch.setattr(command, "machine", lambda _: {"gpu": "", "torch": "2", "python": "3"})
    out = tmp_path / "build" / "results.json"
    assert command.main(["--rehearse", "--out", str(out)]) == 1
    checks = json.loads(out.read_text())["checks"]
    assert {name: result["status"] for name, result in checks.items()} == {
        "passing": "passed",
        "failing": "failed",
        "skipping": "skipped",
        "wrong": "failed",
        "dying": "failed",
        "hanging": "failed",
    }
    assert checks["passing"]["figures"] == {"threads": 3}
    assert checks["wrong"]["reason"] == "ZeroDivisionError: a mistake"
    assert checks["dying"]["reason"] == "ended with code 3: last words\n"
    assert checks["hanging"]["reason"].startswith("did not end in 3 s")
    assert "skipping       skipped" in capsys.readouterr().out


def test_what_the_time_is_over_for_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and counts as not passed."""
    monkeypatch.setattr(command, "CHECKS", CHECKS[:1])
    monkeypatch.setattr(command, "machine", lambda _: {"gpu": "", "torch": "2", "python": "3"})
    out = tmp_path / "results.json"
    assert command.main(["--rehearse", "--limit", "1", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["checks"]["passing"]["status"] == "not run"


def test_an_unknown_check(capsys: pytest.CaptureFixture[str]) -> None:
    """The known ones are named."""
    with pytest.raises(SystemExit):
        command.main(["nothing"])
    assert "unknown checks nothing; known are environment, fork" in capsys.readouterr().err


def test_a_place_for_the_results_that_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before the first check: a device would be replaced, a folder found out about at the end."""
    with pytest.raises(SystemExit):
        command.main(["untouched", "--rehearse", "--out", str(tmp_path)])
    assert f"--out must be a regular file: {tmp_path}" in capsys.readouterr().err


def test_small_traces_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, under the name of the check, where a folder for them is named; never those of a rehearsal."""
    monkeypatch.setenv("INSTRUMENT_KEEP_TRACES", str(tmp_path / "kept"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.1.pt.trace.json").write_text('{"traceEvents": []}')
    Given(tmp_path, "cpu").trace(tmp_path / "run", "name")
    assert not (tmp_path / "kept").exists()
    Given(tmp_path, "cuda").trace(tmp_path / "run", "name")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["check_name.json.gz"]


def test_a_tool_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is skipped, and says which."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkippedError, match="ncu is not on the PATH"):
        tools.ncu(Given(tmp_path, "cpu"))
