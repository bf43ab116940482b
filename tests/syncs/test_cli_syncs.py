"""The ``instrument syncs`` command: its output for people, scripts and CI."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instrument.start.cli import app
from tests.support import warm
from tests.support.programs import environment

from .reports import script

pytestmark = pytest.mark.process

TRAIN = """\
import sys

import torch


def step():
    model = torch.nn.Linear(4, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, 4, device="cuda")).sum()
        loss.backward()
        print("loss", loss.item())
        optimizer.step()


def clean():
    torch.ones(4, device="cuda").sum()


def broken():
    torch.ones(4, device="cuda").sum().item()
    raise RuntimeError("it broke")


def needs(batch):
    pass


def mixes():
    torch.ones(4, device="cuda") + torch.ones(4)


async def coroutine():
    pass


def leaves():
    torch.ones(4, device="cuda").sum()
    sys.exit(3)


class Trainer:
    @staticmethod
    def step():
        torch.ones(4, device="cuda").sum()


if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    step()
    sys.exit(0)
"""
TRACE = Path(__file__).parent.parent / "data" / "gpu_two_steps.json"


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return script(tmp_path, "train.py", TRAIN)


def command(*args: str) -> tuple[int, str, str]:
    """Run the command in this process, without importing torch again; return exit code, stdout and stderr."""
    linecache.checkcache()  # a new process has no cached source of an older script
    result = CliRunner().invoke(app, ["syncs", *args], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_function_target() -> None:
    """A function that synchronizes is reported and fails the command, as with a linter."""
    code, out, err = command("train.py::step")
    assert 1 == code
    assert "train.py:12 in step" in out
    assert '> 12 | print("loss", loss.item())' in out
    assert "1 line makes the CPU wait for the GPU: 1 synchronization in most steps" in out
    assert "every step waits for the GPU once; allowed in a step: 0" in err
    assert 0 == command("train.py::step", "--max", "1")[0]
    assert 0 == command("train.py::clean")[0]
    assert 0 == command("train.py::Trainer.step")[0]


def test_fake_tensors() -> None:
    """With `--fake`, the same line is found without data."""
    code, out, _ = command("train.py::step", "--fake")
    assert 1 == code
    assert "train.py:12 in step" in out


def test_script_target() -> None:
    """A script runs as if started by itself, with its arguments; `sys.exit` is not an error."""
    before = sys.argv, list(sys.path)
    code, out, _ = command("train.py", "--max", "1", "--", "--max", "7", "x")
    assert "arguments ['--max', '7', 'x']" in out
    assert "train.py:12" in out
    assert 0 == code
    assert before == (sys.argv, sys.path)


def test_several_targets() -> None:
    """Each report has the name of its target; one failing target fails the command."""
    code, out, err = command("train.py::clean", "train.py::step")
    assert 1 == code
    assert out.index("train.py::clean\nNo line") < out.index("train.py::step\n1 line")
    assert "train.py::step: every step waits for the GPU" in err


def test_failing_script() -> None:
    """An error in the script is reported with the findings so far, and fails the command regardless of --max."""
    code, out, err = command("train.py::broken", "--max", "9")
    assert 1 == code
    assert "RuntimeError: it broke" in out
    assert "train.py:21 in broken" in out
    assert "ended early" in err
    code, out, _ = command("train.py::leaves")
    assert (1, True) == (code, "SystemExit: 3" in out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.py::step"], "missing.py"),
        (["missing.py"], "missing.py"),
        (["train.py::nothing"], "no function nothing in train.py"),
        (["train.py::needs"], "needs arguments: batch"),
        (["train.py::coroutine"], "must be a plain function without arguments"),
        (["::step"], "a function must be FILE.py::FUNCTION: ::step"),
        (["missing.json"], "cannot read missing.json: No such file"),
        (["train.py::clean", "--baseline", "missing"], "cannot read missing: No such file"),
        (["train.py::clean", "--allowlist", "train.py"], "cannot read train.py, line 1: no fingerprint"),
        (["train.py::clean", "--write-baseline", "train.py"], "cannot read train.py, line 1: no fingerprint"),
        (["train.py::clean", "--sarif", "missing/x"], "cannot write missing/x: folder not found"),
        (["train.py::clean", "--write-baseline", "missing/x"], "cannot write missing/x: folder not found"),
        ([str(TRACE), "--", "--lr"], "takes no arguments: --lr"),
    ],
)
def test_unusable_targets(args: list[str], message: str) -> None:
    """A target that cannot be read or called gives one sentence and exit code 2."""
    code, _, err = command(*args)
    assert 2 == code
    assert message in err
    assert 1 == len(err.splitlines())


def test_wrong_options() -> None:
    """Options are checked before anything runs."""
    assert 2 == command("train.py::clean", "--max", "-1")[0]
    assert 2 == command("train.py::clean", "--unknown")[0]
    assert 2 == command()[0]


def test_json() -> None:
    """Standard output is JSON alone, even if the script prints."""
    code, out, err = command("train.py::step", "--json")
    written = json.loads(out)
    assert (1, "train.py::step", 2) == (code, written["target"], written["steps"])
    assert ["item"] == [found["op"] for found in written["findings"]]
    assert "loss" in err
    several = json.loads(command("train.py::step", "train.py::clean", "--json")[1])
    assert ["train.py::step", "train.py::clean"] == [one["target"] for one in several]


def test_sarif() -> None:
    """SARIF is written to one file for all targets."""
    assert 1 == command("train.py::step", "train.py::broken", "--sarif", "out.sarif")[0]
    (run,) = json.loads(Path("out.sarif").read_text())["runs"]
    places = [
        result["locations"][0]["physicalLocation"] for result in run["results"] if result["level"] == "error"
    ]
    assert {12, 21} == {place["region"]["startLine"] for place in places}
    assert {"train.py"} == {place["artifactLocation"]["uri"] for place in places}


def test_baseline(train: Path) -> None:
    """Known synchronizations pass even if lines move; new ones fail; entries not found are reported."""
    code, _, err = command("train.py::step", "--write-baseline", "known.txt")
    assert (0, f"known synchronizations written to {train.parent / 'known.txt'}: 1") == (
        code,
        err.strip().removeprefix("instrument: "),
    )
    assert 0 == command("train.py::step", "--baseline", "known.txt")[0]
    train.write_text("# a line above\n" + TRAIN)
    code, out, _ = command("train.py::step", "--baseline", "known.txt")
    assert 0 == code
    assert "known, in baseline known.txt" in out
    train.write_text(
        TRAIN.replace("        optimizer.step()\n", "        float(loss.detach())\n        optimizer.step()\n")
    )
    code, out, _ = command("train.py::step", "--baseline", "known.txt")
    assert 1 == code
    assert "train.py:13 in step\n    float:" in out
    code, _, err = command("train.py::clean", "--baseline", "known.txt")
    assert 0 == code
    assert "no longer found; remove it from baseline known.txt: train.py in step, item: print" in err


def test_more_synchronizations_than_the_baseline(train: Path) -> None:
    """A known line that synchronizes more often in a step fails."""
    command("train.py::step", "--write-baseline", "known.txt")
    train.write_text(TRAIN.replace('    print("loss"', '    for _ in "123":\n            print("loss"'))
    code, _, err = command("train.py::step", "--baseline", "known.txt")
    assert 1 == code
    assert (
        'more synchronizations than in baseline known.txt: train.py in step, item: print("loss", loss.item()): 3'
        in err
    )


def test_allowlist() -> None:
    """A baseline with reasons is an allowlist; reasons are kept when it is rewritten."""
    command("train.py::step", "--write-baseline", "known.txt")
    known = Path("known.txt")
    assert 2 == command("train.py::step", "--allowlist", "known.txt")[0]
    known.write_text(known.read_text().replace(" 1  #", " 1 shown to the user  #"))
    code, out, _ = command("train.py::step", "--allowlist", "known.txt")
    assert (0, True) == (code, "shown to the user" in out)
    before = known.read_text()
    assert 0 == command("train.py::step", "--baseline", "known.txt", "--write-baseline", "known.txt")[0]
    assert before == known.read_text()


def test_baseline_is_not_written_from_a_partial_run() -> None:
    """A run that ended early does not write a baseline, which would lose entries."""
    code, _, err = command("train.py::broken", "--write-baseline", "known.txt")
    assert 1 == code
    assert "known.txt is not written" in err
    assert not Path("known.txt").exists()


def test_trace_target() -> None:
    """A trace file is audited."""
    code, out, _ = command(str(TRACE))
    assert code in (0, 1)
    assert "(trace" in out


def test_folder_of_traces(tmp_path: Path) -> None:
    """Each trace in a folder is audited."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        (folder / f"rank{rank}.json").write_text(TRACE.read_text())
    written = json.loads(command(str(folder), "--json")[1])
    assert [f"{folder}, rank 0", f"{folder}, rank 1"] == [one["target"] for one in written]
    (folder / "rank2.json").write_text("")
    code, _, err = command(str(folder))
    assert (2, True) == (code, "rank2.json: it is empty" in err)


def test_output_through_a_pipe() -> None:
    """Through a pipe the command prints plain text, with only the report on stdout."""
    result = warm.run([sys.executable, "-m", "instrument", "syncs", "train.py::step"], environment())
    assert 1 == result.returncode
    assert "\x1b" not in result.stdout
    assert "train.py:12 in step" in result.stdout


def test_code_that_would_fail_on_a_gpu() -> None:
    """Code that would fail on a GPU fails the command regardless of --max."""
    code, out, err = command("train.py::mixes", "--max", "99")
    assert 1 == code
    assert "takes tensors on the CPU and on the GPU" in " ".join(out.split())
    assert "train.py::mixes: would not run on a GPU" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_at_all\ndef step(): ...\n", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("from . import other\ndef step(): ...\n", "ImportError: attempted relative import"),
        ("def step(:\n", "SyntaxError: invalid syntax"),
    ],
)
def test_script_that_cannot_be_imported(train: Path, text: str, message: str) -> None:
    """An unreadable target is an error, not a finding."""
    train.write_text(text)
    code, out, err = command("train.py::step")
    assert (2, "") == (code, out)
    assert f"cannot import train.py: {message}" in err


def test_folder_with_colons(train: Path) -> None:
    """Colons may be part of a file name; the last pair separates the function."""
    folder = train.parent / "a::b"
    folder.mkdir()
    script(folder, "train.py", TRAIN)
    assert 1 == command("a::b/train.py", "--", "x")[0]
    code, out, _ = command("a::b/train.py::step")
    assert (1, True) == (code, "a::b/train.py:12 in step" in out)


def test_targets_with_equally_named_modules(train: Path) -> None:
    """Each of several targets imports the modules from its own folder."""
    for name, body in (("a", "x.sum().item()"), ("b", "x.sum()")):
        script(train.parent / name, "helper.py", f"def read(x):\n    return {body}\n")
        script(
            train.parent / name,
            "run.py",
            "import helper\nimport torch\ndef step():\n    helper.read(torch.ones(3, device='cuda'))\n",
        )
    code, out, err = command("a/run.py::step", "b/run.py::step")
    assert 1 == code
    assert "a/run.py::step: the step waits for the GPU" in err
    assert "b/run.py::step: " not in err
    assert "No line makes the CPU wait" in out.partition("b/run.py::step")[2]
