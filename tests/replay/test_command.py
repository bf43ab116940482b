"""`instrument whatif`, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import instrument
from instrument.start.cli import app
from tests.support.loops import Loop


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record five steps with a slow region and a synchronization."""
    folder = tmp_path_factory.mktemp("whatif")
    loop = Loop()
    for number in range(5):
        with loop.step(number):
            start = loop.cpu
            loop.work(400)
            loop.add("user_annotation", "slow", start, loop.cpu)
            for _ in range(10):
                loop.launch(50)
            loop.synchronize()
    loop.trace(folder)
    return folder / "trace.json"


def whatif(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["whatif", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_text(trace: Path) -> None:
    """The prediction, the error and the critical path are printed."""
    shown = " ".join(whatif(trace, "--without", "region:slow").split())
    assert "Without region:slow, a step would take 506 us instead of 906 us (-44.2 %)." in shown
    assert "Error of the replay without a change: 0.00 % (median of 5 steps), at most 0.00 %." in shown
    assert "critical path of a step (mean)" in shown


def test_without_a_change(trace: Path) -> None:
    """Without a change, the step and its critical path are shown."""
    shown = whatif(trace)
    assert "A step takes 906 us (mean of 5 steps)." in shown
    assert "overhead: slow" in shown


def test_json(trace: Path) -> None:
    """The JSON has all numbers, and its parts add up."""
    data = json.loads(whatif(trace, "--without", "region:slow", "--speed", "kernel:sgemm=2x", "--json"))
    assert (data["before_ns"], data["self_error"], data["abstained"]) == (906_000, 0, None)
    assert data["win_ns"] == data["before_ns"] - data["step_ns"] > 400_000
    path = data["critical_path"]
    assert sum(each["ns"] for each in path["classes"].values()) == path["total_ns"]
    assert sum(each["ns"] for each in path["parts"]) == path["total_ns"]
    guess = instrument.diagnose(trace).what_if(without=["region:slow"], speed={"sgemm": 2})
    assert guess.step_ns == data["step_ns"]


@pytest.mark.parametrize(
    "speed",
    ["kernel:sgemm=2x", ["sgemm=2x"], {"sgemm": 2}, {"kernel:sgemm": 2.0}],
    ids=["text", "list", "map", "kind"],
)
def test_the_same_words(trace: Path, speed: Any) -> None:
    """The words of the command are those of Python, one alone or several."""
    data = json.loads(whatif(trace, "--without", "region:slow", "--speed", "kernel:sgemm=2x", "--json"))
    guess = instrument.diagnose(trace).what_if(without="region:slow", speed=speed)
    assert (guess.change, guess.step_ns) == (data["change"], data["step_ns"])


@pytest.mark.parametrize(
    "words", [{"without": 3}, {"without": {"sync": 1}}, {"overlap": b"communication"}, {"replace": 3}]
)
def test_words_of_another_type(trace: Path, words: Any) -> None:
    """What is neither a text nor several is refused, with its name and value."""
    ((name, value),) = words.items()
    with pytest.raises(TypeError, match=f'"{name}" must be a text or several: {re.escape(repr(value))}'):
        instrument.diagnose(trace).what_if(**words)


def test_lane(trace: Path, tmp_path: Path) -> None:
    """A copy with the critical path is written, but not twice into one file."""
    out = tmp_path / "path.json.gz"
    whatif(trace, "--add-critical-path", out)
    assert out.exists()
    assert "already has such lanes" in whatif(out, "--add-critical-path", tmp_path / "other.json", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--without", "slow"], "--without must hold dataloader, copies, sync, sync:FILE:LINE or region:NAME"),
        (["--without", "region:slw"], "no region 'slw'; close names are: slow"),
        (["--without", "dataloader"], "the trace has no ranges of a DataLoader"),
        (["--without", "copies"], "the trace has no memcpys"),
        (["--without", "sync:train.py:3"], "the trace has no lines of synchronizations"),
        (["--speed", "sgemm"], "such as kernel:gemm=2x: 'sgemm'"),
        (["--speed", "kernel:=2x"], "such as kernel:gemm=2x: 'kernel:=2x'"),
        (["--speed", "kernel:sgemm=0x"], "--speed must hold numbers from 0.001 on: 0.0"),
        (["--speed", "kernel:a=2x", "--speed", "kernel:a=3x"], "--speed must hold each regular expression once"),
        (["--without", "sync:"], "--without must hold dataloader"),
        (["--speed", "kernel:(=2x"], "--speed must hold regular expressions"),
        (["--speed", "kernel:nothing=2x"], "no kernel, memcpy or memset has a name with 'nothing'"),
        (["--speed", "region:slw=2x"], "no region 'slw'; close names are: slow"),
        (["--speed", "region:=2x"], "--speed must hold kernel:REGEX=Nx or region:NAME=Nx"),
        (["--launch", "2x"], "--launch must be a part from 0 to 1, such as 0.1x: '2x'"),
        (["--launch", "fast"], "--launch must be a part from 0 to 1, such as 0.1x: 'fast'"),
        (["--replace", "sgemm"], "--replace must hold kernel:REGEX=DURATION, such as kernel:gemm=50us"),
        (["--replace", "sgemm=50"], "--replace must be a number > 0 with a unit (ns, us, ms, s)"),
        (["--replace", "nothing=50us"], "no kernel, memcpy or memset has a name with 'nothing'"),
        (["--workers", "0"], "--workers must be a number from 1, or how many times as many, such as 2x: '0'"),
        (["--workers", "4"], "the trace has no ranges of a DataLoader"),
        (["--fuse", "model"], "--fuse must hold \"optimizer\": 'model'"),
        (["--fuse", "optimizer"], "the trace has no range of an optimizer"),
        (["--fix", "fp32"], "--fix must hold names of rules, which docs/rules.md lists: 'fp32'"),
        (["--fix", "input-wait"], "the rule 'input-wait' abstains: the trace has no ranges of a DataLoader"),
        (["--fix", "memory-growth"], "the rule 'memory-growth' "),
        (["--overlap", "copies"], "--overlap must hold \"communication\": 'copies'"),
        (["--overlap", "communication"], "the trace has no kernels that communicate"),
    ],
)
def test_refused(trace: Path, arguments: list[str], message: str) -> None:
    """What cannot be replayed is said in one sentence."""
    assert message in " ".join(whatif(trace, *arguments, code=2).split())


def test_nothing_to_replay(tmp_path: Path) -> None:
    """A trace without events on the CPU has no prediction."""
    path = tmp_path / "trace.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "pid": 0, "tid": 7}]}'
    )
    assert "No prediction: the trace has no events on the CPU." in whatif(path, "--without", "sync")
    assert "--without must hold" in whatif(path, "--without", "everything", code=2)
    assert "no critical path can be added" in whatif(path, "--add-critical-path", tmp_path / "out.json", code=2)
