"""A run that ends early reports its findings so far, and its exit code says how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from instrument.base.early_stop import EarlyStop
from instrument.explain.waits.report import SyncReport
from instrument.start.cli import app
from instrument.syncs.dryrun.run import dry_run_file
from tests.support import warm
from tests.support.programs import environment

from .reports import script

pytestmark = pytest.mark.process

TRAIN = """\
import atexit
import sys
import time

import torch
from torch import nn

if "exit" in sys.argv:
    atexit.register(print, "at exit")
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(4, 1).to(device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    print("before", model(torch.ones(2, 4, device=device)).sum().item())
try:
    for number in range(int(sys.argv[1])):
        batch = torch.randn(8, 4).to(device)
        loss = model(batch).square().mean()
        print("found", bool(loss > 0))
        loss.backward()
        optimizer.step()
        print("update", number, loss.item(), flush=True)
        if number == 2:
            open("ready", "w").close()
        time.sleep(float(sys.argv[2]))
finally:
    print("finally")
"""


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return script(tmp_path, "train.py", TRAIN)


def counts_by_line(report: SyncReport) -> dict[int, dict[int | None, int]]:
    """Return the synchronizations by line and step."""
    return {found.site.line: dict(found.steps) for found in report.syncs if found.site}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_step_limit(train: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    """After the limit of steps the script ends normally; synchronizations after the last step count to it."""
    report = dry_run_file(train, None, args=["100", "0"], steps=steps)
    out = capsys.readouterr().out
    assert steps == out.count("update")
    assert out.endswith("finally\n")
    assert (steps, True, None) == (report.steps, report.finished, report.error)
    each = dict.fromkeys(range(steps), 1)
    found = counts_by_line(report)
    assert {17: each, 19: each, 22: each} == {line: found[line] for line in (17, 19, 22)}
    assert {14: {None: 1}} == {14: found[14]} or steps == 1
    assert f"stopped after {steps} step" in str(report)


def test_step_limit_not_reached(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that is not reached has no effect."""
    report = dry_run_file(train, None, args=["2", "0"], steps=5)
    assert 2 == report.steps == capsys.readouterr().out.count("update")
    assert "ended after" not in str(report)


def test_steps_of_a_function(tmp_path: Path) -> None:
    """Steps are counted from the function's call, without those made by importing its file."""
    code = f"{TRAIN.replace('sys.argv[1]', '2').replace('sys.argv[2]', '0')}\n\ndef more():\n"
    code += "    for _ in range(9):\n        model(batch).sum().backward()\n        optimizer.step()\n"
    path = script(tmp_path, "more.py", code)
    report = dry_run_file(path, "more", steps=3)
    assert (3, True) == (report.steps, report.finished)


def test_script_that_catches_the_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that catches every exception is ended again at its next step, before another update."""
    code = TRAIN.replace("    loss = model(batch)", "    try:\n            loss = model(batch)").replace(
        ".mean()\n", ".mean()\n        except BaseException:\n            print('caught')\n"
    )
    path = script(tmp_path, "swallow.py", code)
    report = dry_run_file(path, None, args=["4", "0"], steps=2)
    out = capsys.readouterr().out
    assert (2, 2) == (report.steps, out.count("update"))


def test_hooks_are_removed(train: Path) -> None:
    """Signal handlers, timers and optimizer hooks are restored after the run."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)  # that of pytest's time limit
    dry_run_file(train, None, args=["9", "0"], steps=1, time_limit=60)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM))
    assert (0.0, 0.0) == signal.getitimer(signal.ITIMER_REAL)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_time_limit(train: Path) -> None:
    """After the time limit a script ends the same way, even while it sleeps."""
    result = CliRunner().invoke(app, ["syncs", "train.py", "--time-limit", "1", "--", "5", "99"])
    assert 1 == result.exit_code
    assert "finally" in result.stdout
    assert "train.py:19" in result.stdout
    assert "stopped after 1 s, the time limit" in result.stdout


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals(train: Path, name: str) -> None:
    """After a signal the report is printed, JSON and SARIF are complete, and the exit code is that signal's."""
    command = [sys.executable, "-m", "instrument", "syncs", "--json", "--sarif", "out.sarif", "train.py"]
    process = subprocess.Popen(
        [*command, "--", "9999", "0.02", "exit"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not Path("ready").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=120)
    assert 128 + getattr(signal, name) == process.returncode, err
    report = json.loads(out)
    assert {"SIGINT": "interrupted by Ctrl-C", "SIGTERM": "terminated by SIGTERM"}[name] == report["error"]
    assert not report["finished"]
    assert {17, 19, 22} <= {found["site"]["line"] for found in report["findings"]}
    assert err.index("finally") < err.index("at exit")
    assert "terminated" in Path("out.sarif").read_text() or name == "SIGINT"
    assert json.loads(Path("out.sarif").read_text())["runs"]


def test_script_with_its_own_handler(tmp_path: Path) -> None:
    """A script that handles SIGTERM itself continues."""
    code = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('mine'))\n"
    path = script(tmp_path, "own.py", f"{code}os.kill(os.getpid(), signal.SIGTERM)\n")
    assert dry_run_file(path, None).finished


def test_nothing_moved_to_a_gpu(tmp_path: Path) -> None:
    """The advice to pass a device option is for complete runs; a stopped run may not have reached its GPU code."""
    path = script(tmp_path, "cpu.py", "import time\nimport torch\n\ntorch.ones(2).sum().item()\ntime.sleep(2)\n")
    assert "an option such as --device cuda?" in dry_run_file(path, None).unavailable_reason
    stopped = dry_run_file(path, None, time_limit=0.5)
    assert "the run ended before anything was moved to the GPU" == stopped.unavailable_reason


def test_signal_skips_further_targets() -> None:
    """After a signal the command does not start further scripts."""
    Path("first.py").write_text("raise KeyboardInterrupt\n")
    result = CliRunner().invoke(app, ["syncs", "first.py", "train.py", "--", "1", "0"])
    assert 130 == result.exit_code
    assert "interrupted by Ctrl-C" in result.stdout
    assert "update" not in result.stdout


@pytest.mark.parametrize(("option", "value"), [("--steps", "3"), ("--step-on", "backward")])
def test_limits_are_refused_for_traces(option: str, value: str) -> None:
    """An option for running scripts is refused for a trace."""
    result = CliRunner().invoke(app, ["syncs", "trace.json", option, value])
    assert 2 == result.exit_code
    assert f"{option} is for scripts, and trace.json is a trace" in result.stderr


CATCHES = """\
import os
import signal
import time

import torch

model = torch.nn.Linear(4, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(9):
    try:
        print("begins", number)
        model(torch.ones(2, 4).to("cuda")).sum().backward()
        optimizer.step()
        loss = model.weight.sum().item()
        WAIT
    except:
        print("caught", number)
print("went on")
"""


@pytest.mark.parametrize(
    ("wait", "options", "why", "code"),
    [
        ("pass", ["--steps", "2"], "stopped after 2 steps", 1),
        ("pass", ["--steps", "2", "--json"], "stopped after 2 steps", 1),
        ("time.sleep(20)", ["--time-limit", "1.5"], "stopped after 1.5 s", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", [], "interrupted by Ctrl-C", 130),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", [], "terminated by SIGTERM", 143),
    ],
)
def test_script_that_catches_everything(
    tmp_path: Path, wait: str, options: list[str], why: str, code: int
) -> None:
    """A script that catches every exception ends the second time, with the report."""
    script(tmp_path, "catches.py", CATCHES.replace("WAIT", wait))
    command = [sys.executable, "-m", "instrument", "syncs", "catches.py", "--sarif", "out.sarif", *options]
    done = warm.run(command, environment(), timeout=120)
    output = done.stdout + done.stderr
    assert code == done.returncode, output
    assert 1 == sum(line.startswith("caught") for line in output.splitlines()), output
    assert "went on" not in output
    assert why in done.stdout
    assert "catches.py" in done.stdout
    assert json.loads(Path("out.sarif").read_text())["runs"]
    if "--json" in options:
        assert 14 in {found["site"]["line"] for found in json.loads(done.stdout)["findings"]}


def test_cleanup_after_the_limit(tmp_path: Path) -> None:
    """Code in a ``finally`` block, such as a last evaluation, may run after the limit."""
    code = "import time\nfrom contextlib import suppress\n\ntry:\n    time.sleep(9)\nfinally:\n"
    script(tmp_path, "last.py", f"{code}    time.sleep(2.5)\n    print('saved')\n")
    result = CliRunner().invoke(app, ["syncs", "last.py", "--time-limit", "0.3"])
    assert "saved" in result.stdout
    assert "stopped after 0.3 s, the time limit" in result.stdout
    assert "did not end" not in result.stdout


def test_early_stop_text() -> None:
    """The text of an `EarlyStop` is its one-line reason."""
    assert ("why", 3) == (str(EarlyStop("why", 3)), EarlyStop("why", 3).code)
