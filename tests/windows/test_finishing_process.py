"""The finishing process is not a child of the program, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import instrument
from instrument.base import process_id
from instrument.record.handover import finishing_process
from instrument.record.handover.finishing_process import FinishingProcess

from ..support import programs, warm
from ..support.finishing import eventually, finishing_pid, processes
from .training import manifest, statuses, train

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def run(code: str, folder: Path, **options: Any) -> str:
    """Run a program, which must exit with code 0, and return its output."""
    env = programs.environment()
    script = programs.program(code, folder)
    done = subprocess.run(
        [sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, timeout=100, **options
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


# Starts the process that finishes windows on its own; a program that trains takes longer to start.
BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from instrument.record.handover.finishing_process import FinishingProcess

def begin(on_answer=lambda answer: None):
    return FinishingProcess(Path("out"), on_answer, lambda process: None)
"""
TRAIN = """
import os, signal, time, torch, instrument
for _ in instrument.steps(range(4), "out", wait=1, warmup=1, active=1, repeat=3):
    torch.ones(3).sum()
"""


def test_a_program_that_waits_for_all_its_children(tmp_path: Path) -> None:
    """`os.wait` returns the program's own children and then raises, before the last window is finished."""
    code = f"""{TRAIN}
own = {{os.posix_spawn("/bin/true", ["true"], {{}}) for _ in range(3)}}
found = set()
try:
    while True:
        found.add(os.wait()[0])
except ChildProcessError:
    print(found == own)
"""
    command = programs.python(programs.program(code, tmp_path))
    assert "True\n" == warm.run(command, programs.environment(), cwd=tmp_path, check=True).stdout
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))[:1]


@pytest.fixture(autouse=True)
def normal_priority() -> None:
    """Leave the priority as it is for programs, as a test here is about it."""


def test_the_process_gives_way_until_the_program_waits(tmp_path: Path) -> None:
    """It is nicer than the program; with the privilege, not any more once the program waits for it."""
    process = FinishingProcess(tmp_path, lambda answer: None, lambda process: None)
    number, own = finishing_pid(), os.getpriority(os.PRIO_PROCESS, 0)
    assert min(own + 10, 19) == os.getpriority(os.PRIO_PROCESS, number)
    seen: list[int] = []
    os.kill(number, signal.SIGSTOP)

    def waiting() -> None:
        if not seen:
            seen.append(os.getpriority(os.PRIO_PROCESS, number))
            os.kill(number, signal.SIGCONT)

    process.end(60, waiting)
    assert "ended with exit code 0" == process.ended
    if os.geteuid() == 0:
        assert [own] == seen


def test_a_handler_that_reaps_all_children(tmp_path: Path) -> None:
    """The program misses none of its own, whenever they end, and the start succeeds."""
    code = f"""{BEGIN}
pids, dead = set(), []

def reap(*_):
    while True:
        try:
            number = os.waitpid(-1, os.WNOHANG)[0]
        except ChildProcessError:
            return
        if not number:
            return
        dead.append(number)

signal.signal(signal.SIGCHLD, reap)
started = []
for number in range(20):
    pids.add(os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.00{{number % 8}}"], {{}}))
    started.append(begin())
for process in started:
    process.end(60)
print(pids <= set(dead), {{process.ended for process in started}})
"""
    assert "True {'ended with exit code 0'}\n" == run(code, tmp_path)


@pytest.mark.parametrize("how", ["SIG_IGN", "another thread"])
def test_another_waiter_for_children(tmp_path: Path, how: str) -> None:
    """The start succeeds although the kernel or a thread takes the exit status of the launching shell."""
    other = """
def wait():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            pass
threading.Thread(target=wait, daemon=True).start()
"""
    code = f"""{BEGIN}
{"signal.signal(signal.SIGCHLD, signal.SIG_IGN)" if how == "SIG_IGN" else other}
for _ in range(3):
    process = begin()
    process.end(60)
    print(process.ended)
"""
    assert 3 * ["ended with exit code 0"] == run(code, tmp_path).splitlines()


def test_training_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """The recorded window is finished, also while a fork outlives the killed process."""
    code = f"""{TRAIN}
fork = os.fork()
if fork == 0:
    os.close(1), os.close(2)
    time.sleep(60)
print(fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = programs.python(programs.program(code, tmp_path))
    with warm.started(command, programs.environment(), cwd=tmp_path) as program:
        fork = int(program.wait().stdout)
    try:
        eventually(lambda: not processes(program.pid))
    finally:
        os.kill(fork, signal.SIGKILL)
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))
    assert [] == list((tmp_path / "out").glob(".*.jobs"))


def test_a_program_that_adopts_orphans(tmp_path: Path) -> None:
    """In a program that adopts orphans, as process 1 of a container does, no zombie is left."""
    code = f"""{BEGIN}
import ctypes
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
process = begin()
print(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT))
process.end(60)
print(process.ended)
try:
    os.wait()
except ChildProcessError:
    print("no child")
"""
    assert ["None", "ended with exit code 0", "no child"] == run(code, tmp_path).splitlines()


@pytest.mark.parametrize(
    ("shell", "message"),
    [("/nowhere", "No such file or directory: '/nowhere'"), ("/bin/false", "/bin/false ended with exit code 1")],
)
def test_a_shell_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, message: str) -> None:
    """A failure to start, as at the limit of processes, is raised at once."""
    monkeypatch.setattr(finishing_process, "_SHELL", shell)
    with pytest.raises(OSError, match=message):
        FinishingProcess(tmp_path, lambda answer: None, lambda process: None)
    assert [] == list(tmp_path.iterdir())


def test_an_executable_that_is_not_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that embeds Python may set any sys.executable; the output of that executable is ignored."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'usage: program'; echo 3; echo '{'; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    answers: list[Any] = []
    process = FinishingProcess(tmp_path / "out", answers.append, lambda process: None)
    process.end(60)
    assert ("ended with exit code 2", []) == (process.ended, answers)


def test_a_signal_that_training_ignores(tmp_path: Path) -> None:
    """The process does not inherit blocked and ignored signals, so it ends soon after training."""
    code = f"""{BEGIN}
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
sys.path.append({str(programs.ROOT)!r})
from tests.support.finishing import finishing_pid
answered = threading.Event()
process = begin(lambda answer: answered.set())
process.send({{"kind": "report", "job": 1}})
answered.wait(60)
os.kill(finishing_pid(os.getpid()), signal.SIGALRM)
process.end(60)
print(process.ended)
"""
    assert "was ended by SIGALRM\n" == run(code, tmp_path)


@pytest.mark.parametrize("how", ["removed", "exited"])
def test_the_process_ends_without_jobs(tmp_path: Path, how: str) -> None:
    """Once the jobs are removed, or training has exited, the process finishes what it has and exits."""
    entry = {"window": 1, "timing": None, "memory": None}
    window = {
        "kind": "window",
        "job": 1,
        "entry": entry,
        "folder": str(tmp_path),
        "raw": str(tmp_path / "trace.json"),
        "beside": [],
        "read": False,
        "ranks": [],
        "diagnose": False,
    }
    (tmp_path / "trace.json").write_text("{}")
    training = subprocess.Popen(["/bin/true"])
    training.wait()
    folder = tmp_path / "jobs"
    folder.mkdir()
    jobs = folder / "jobs"
    (folder / "answers").touch()
    jobs.write_text(f"{{no job\n{json.dumps(window)}\n")  # the first as of a disk that was full
    code = f"""
        from instrument.finish.main import main
        main({str(folder)!r}, {training.pid if how == "exited" else os.getpid()})
    """
    command = [sys.executable, programs.program(code, tmp_path)]
    with subprocess.Popen(command, env=programs.environment(), stderr=subprocess.DEVNULL) as process:
        if how == "removed":
            eventually(lambda: (folder / "answers").stat().st_size > 0)
            jobs.unlink()
        try:
            assert 0 == process.wait(60)
        finally:
            process.kill()
    assert [1] == [entry["window"] for entry in manifest(tmp_path)]
    assert (tmp_path / "trace.json.gz").exists()
    assert (how == "removed") == folder.exists()


def test_what_both_processes_left_is_removed(tmp_path: Path) -> None:
    """The next process removes the folder of a program that was killed with its process."""
    with subprocess.Popen(["/bin/true"]) as exited:
        exited.wait()
    left = tmp_path / f".{process_id.place()}-{exited.pid}-1-00000000.jobs"
    left.mkdir()
    (left / "jobs").touch()
    with instrument.profile(tmp_path, schedule="0") as prof:
        train(1, prof.step)
    assert not left.exists()
