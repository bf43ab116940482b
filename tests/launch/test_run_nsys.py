"""Runs under the real Nsight Systems: its reports, the summary, and an unaffected program."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import instrument
from tests.support.nsys import alone, nsys, recorded
from tests.support.programs import environment, run

from .stubs import launching

pytestmark = [pytest.mark.vendor, pytest.mark.nsys]

TRAIN = """
import os, signal, subprocess, sys, time
import instrument

out, how, value = sys.argv[1:4]
prof = instrument.profile(out, schedule=instrument.schedule(wait=1, active=2, repeat=2))
prof.start()
for step in range(8):
    with instrument.annotate("forward"):
        time.sleep(0.005)
    prof.step()
prof.stop()
print("trained", flush=True)
if how == "exit":
    sys.exit(int(value))
if how == "die":
    os.kill(os.getpid(), int(value))
if how == "listen":
    got = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: got.append(number))
    print("ready", flush=True)
    while len(got) < 3:
        time.sleep(0.01)
    print("got", *map(int, got), flush=True)
    sys.exit(9)
if how == "wait":
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def exclusively() -> Iterator[None]:
    """Run one recording at a time."""
    nsys()
    with alone():
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def launched(
    script: Path, how: str = "exit", value: int = 0, *, python: Any = (sys.executable,), **others: Any
) -> subprocess.CompletedProcess[str]:
    out = script.parent / "out"
    command = [*python, script, out, how, str(value)]
    before = {*out.glob("*")}

    def record() -> subprocess.CompletedProcess[str]:
        for path in {*out.glob("*")} - before:  # of a failed attempt
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        line = launching("nsys", out, command, **others)
        return run(line, environment({"COLUMNS": "100"}), check=False, timeout=120)

    return recorded(record)


def reports(script: Path) -> list[str]:
    """Return the names of the reports, without the time."""
    found = (script.parent / "out").glob("*.nsys-rep")
    return sorted(re.sub(r"\d{8}T\d{6}-\d+", "TIME", path.name) for path in found)


BOTH = ["nsys-TIME.1.nsys-rep", "nsys-TIME.2.nsys-rep"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str], list[str]]:
    """Return the script, how its first run ended, with exit code 255, and its reports."""
    script = tmp_path_factory.mktemp("first") / "train.py"
    script.write_text(TRAIN)
    nsys()
    with alone():
        return script, launched(script, "exit", 255), reports(script)


def test_the_run_ends_with_the_summary_of_its_reports(
    first: tuple[Path, subprocess.CompletedProcess[str], list[str]],
) -> None:
    """Each window has one report; the summary adds up their regions; code and output are the program's."""
    _, done, written = first
    assert 255 == done.returncode, done.stderr
    assert BOTH == written
    assert "trained\n" in done.stdout
    assert re.search(r"Where the step went: \d.* \(mean of steps \d.*\)", done.stderr)
    assert re.search(r"\nforward +1 +\d", done.stderr)
    assert 2 == done.stderr.count("instrument: Nsight Systems wrote ")


@pytest.mark.parametrize("windows", [1, None, 0])
def test_how_many_windows(script: Path, windows: int | None) -> None:
    """At most the requested reports are written; all of an endless plan; one of the whole run."""
    done = launched(script, windows=windows)
    assert 0 == done.returncode, done.stderr
    assert (BOTH if windows is None else ["nsys-TIME.nsys-rep"]) == reports(script)
    listed = re.search(r"\nSteps [-0-9, ]+: ([0-9., ]+) .s", done.stderr)
    assert listed is not None
    assert len(listed[1].split(", ")) == (2 if windows == 1 else 4)


def test_a_second_run_leaves_the_reports_of_the_first(
    first: tuple[Path, subprocess.CompletedProcess[str], list[str]],
) -> None:
    """The reports of each run have different names."""
    script, *_ = first
    launched(script)
    assert 4 == len(reports(script))


@pytest.mark.parametrize(("value", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (signal.SIGTERM, 143)])
def test_signals_that_kill_the_program(script: Path, value: int, code: int) -> None:
    """The exit code is the shell's for that signal, and the reports exist."""
    done = launched(script, "die", value)
    assert (code, BOTH) == (done.returncode, reports(script))


def test_a_program_that_leaves_a_process(tmp_path: Path) -> None:
    """It has the caller's variables and those that nsys adds; the process continues, and is not waited for."""
    start = time.monotonic()
    code = """
import json, os, subprocess
print("ENV", json.dumps(dict(os.environ)))
print("pid", subprocess.Popen(["sleep", "97"], stdin=-3, stdout=-3, stderr=-3).pid)
"""
    line = launching("nsys", tmp_path, [sys.executable, "-c", code], windows=0)
    done = recorded(lambda: run(line, environment({"MINE": "a b 'c'"})))
    left = int(re.search(r"pid (\d+)", done.stdout)[1])  # type: ignore[index]
    assert b"sleep\x0097\x00" == Path(f"/proc/{left}/cmdline").read_bytes()
    subprocess.run(["kill", str(left)], check=True)
    assert time.monotonic() - start < 90
    (shown,) = re.findall(r"ENV (\{.*\})", done.stdout)
    arrived = json.loads(shown)
    assert "a b 'c'" == arrived["MINE"]
    assert arrived["NVTX_INJECTION64_PATH"].endswith("libToolsInjection64.so")


def signalled(script: Path, how: str, *signals: int) -> tuple[int, str]:
    out = script.parent / "out"
    line = launching("nsys", out, [sys.executable, script, out, how, "0"])
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "ready" in text:
                break
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        output = process.stdout.read()
        return process.wait(60), output


def test_signals_that_the_program_handles(script: Path) -> None:
    """Each signal reaches the program once, the program ends by itself, and nsys finishes its reports."""
    sent = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    code, output = signalled(script, "listen", *sent)
    assert f"got {' '.join(str(int(number)) for number in sent)}\n" in output
    assert (9, BOTH) == (code, reports(script))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_that_end_the_program(script: Path, number: int, code: int) -> None:
    """The exit code is the shell's for that signal, and the reports exist."""
    assert code == signalled(script, "wait", number)[0]
    assert BOTH == reports(script)


def test_a_window_that_never_opened(tmp_path: Path) -> None:
    """Nsys silently writes no report: the likely reason is printed, and the program's exit code returned."""
    line = launching("nsys", tmp_path, [sys.executable, "-c", "print(1); raise SystemExit(6)"])
    done = recorded(lambda: run(line, environment(), check=False))
    assert 6 == done.returncode
    assert "wrote no report: the program ended with exit code 6 before a window opened" in done.stderr


def test_each_rank_has_its_own_windows(script: Path) -> None:
    """With torchrun inside, each rank and window has a report, although the ranks are not in step."""
    text = script.read_text().replace("prof.start()", "time.sleep(0.4 * int(os.environ['RANK']))\nprof.start()")
    script.write_text(text)
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    done = launched(script, python=[torchrun, "--nproc-per-node=2"])
    assert 0 == done.returncode, done.stderr
    names = [f"nsys-TIME-rank{rank}.{window}.nsys-rep" for rank in (0, 1) for window in (1, 2)]
    assert names == reports(script)
    for path in (script.parent / "out").glob("*.nsys-rep"):
        trace = instrument.read_trace(path)
        assert isinstance(trace, instrument.read.tables.trace.Trace)  # type: ignore[attr-defined]
        assert (int(path.name.split("rank")[1][0]), 2) == (trace.rank, len(trace.steps))
    assert "2 of 2 ranks" in done.stderr


def test_torchrun_outside(script: Path) -> None:
    """Each rank launches its own nsys, and its number is in the report's name."""
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    out = script.parent / "out"
    inner = launching("nsys", out, [sys.executable, script, out, "exit", "0"])
    done = run([str(torchrun), "--nproc-per-node=2", "--no-python", *inner], environment())
    assert [f"nsys-TIME-rank{rank}.{window}.nsys-rep" for rank in (0, 1) for window in (1, 2)] == reports(script)
    assert 1 == done.stderr.count("Where the step went")
