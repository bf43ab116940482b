"""The process that finishes windows stays out of the program's child processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instrument.record.handover import background_process, finalizer_process
from instrument.record.handover.background_process import BackgroundProcess
from instrument.record.handover.finalizer_process import FinalizerProcess

from ..support import programs, warm
from ..support.finalizers import LOOKS_OFTEN, eventually, processes
from .training import manifest, statuses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process is a child on other systems")


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
from instrument.record.handover.finalizer_process import FinalizerProcess

def begin():
    ended = threading.Event()
    process = FinalizerProcess(lambda answer: None, lambda process: ended.set())
    return process, ended

def begin_and_end():
    process, ended = begin()
    process._process.kill()
    assert ended.wait(60)
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
    """Leave the priority as it is for programs, as tests here are about it."""


@pytest.fixture(params=[False, True])
def as_child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as children too, as where the program is process 1."""
    if request.param:
        monkeypatch.setattr(background_process, "_libc", lambda: None)


@pytest.fixture(params=[-5, 0, 5])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the program seem to have this autogroup priority; return the one of its process while it waits."""
    own, read = Path("/proc/self/autogroup"), background_process._autogroup
    if read(own) is None:
        pytest.skip("the kernel has no autogroups")
    if not os.access(own, os.W_OK):
        pytest.skip("/proc cannot be written")
    seen: int = request.param
    monkeypatch.setattr(background_process, "_autogroup", lambda file: seen if file == own else read(file))
    return max(seen, 0)


@pytest.mark.usefixtures("as_child")
def test_a_priority_of_its_own(share: int) -> None:
    """The process gets the lowest share of the CPU, as `nice` acts within a share, and then that of the program.

    A program that has more than the normal share gives only that.
    """
    ours, child_end = socket.socketpair()
    with ours, child_end:
        process = BackgroundProcess(["/bin/sh", "-c", "read line"], child_end, {})
        child_end.close()
        if process._libc is not None:
            process.note(json.loads(ours.recv(100)))
        number = process._member
        assert number is not None
        file = Path(f"/proc/{number}/autogroup")

        def change(to: Callable[[], None], end: str) -> bool:
            to()
            return file.read_text().endswith(end)

        eventually(lambda: change(process.yield_cpu, " nice 19\n"))
        nice = os.getpriority(os.PRIO_PROCESS, number)
        assert min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19) == nice
        eventually(lambda: change(process.take_share, f" nice {share}\n"))
        process.kill()
        process.wait()


@pytest.mark.usefixtures("as_child")
def test_the_process_takes_its_share_of_the_cpu_while_the_program_waits(
    share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first job on it gives way; from the call of `end` on it does not, also before its imports."""
    lowered, raised = tmp_path / "lowered", tmp_path / "raised"
    slow_to_start = f"""
import pathlib, time
limit = time.monotonic() + 30
for nice, told in ("19", {str(lowered)!r}), ("{share}", {str(raised)!r}):
    while time.monotonic() < limit:
        if pathlib.Path("/proc/self/autogroup").read_text().endswith(" nice " + nice + "\\n"):
            open(told, "w").close()
            break
        time.sleep(0.01)
"""
    monkeypatch.setattr(finalizer_process, "_CODE", slow_to_start + finalizer_process._CODE)
    process = FinalizerProcess(lambda answer: None, lambda process: None)

    def work() -> bool:
        process.send({"kind": "wake", "job": 1})
        return lowered.exists()

    eventually(work)
    assert not raised.exists()
    process.end(60)
    assert "ended with exit code 0" == process.ended
    assert raised.exists()


def test_the_priority_of_an_ended_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its number."""
    process = FinalizerProcess(lambda answer: None, lambda process: None)
    process._process.kill()
    eventually(lambda: process.ended is not None)
    changes: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *given: changes.append(1))
    process.close()
    process.end(60)
    assert [] == changes


WITH_HANDLER = f"""{BEGIN}
calls = []
signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
"""


def test_a_handler_of_sigchld(tmp_path: Path) -> None:
    """The handler is called for each child of the program, and never for the library's process."""
    code = f"""{WITH_HANDLER}
for _ in range(3):
    begin_and_end()
process, ended = begin()
process.end(60)
print(len(calls), process.ended, signal.getsignal(signal.SIGCHLD).__name__)
for _ in range(3):
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {{}}), 0)
print(len(calls))
"""
    assert ["0 ended with exit code 0 <lambda>", "3"] == run(code, tmp_path).splitlines()


def test_a_child_that_dies_while_the_process_starts(tmp_path: Path) -> None:
    """The program gets one SIGCHLD for each child, at whatever point of the process's start the child dies."""
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
for number in range(40):
    pids.add(os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.00{{number % 8}}"], {{}}))
    process, ended = begin()
    process._process.kill()
    started.append(ended)
    limit = time.monotonic() + 10
    while len(dead) <= number and time.monotonic() < limit:
        time.sleep(0.001)
print(len(dead), len(pids), set(dead) == pids, all(ended.wait(30) for ended in started))
"""
    assert ["40", "40", "True", "True"] == run(code, tmp_path).split()


def test_a_signal_that_is_pending_or_blocked(tmp_path: Path) -> None:
    """A program that blocks SIGCHLD and receives it by `sigwait` gets the signal of its own child only."""
    code = f"""{WITH_HANDLER}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # later threads inherit this
for own in False, True:
    if own:
        child = os.posix_spawn("/bin/true", ["true"], {{}})
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    begin_and_end()
    print(bool(signal.sigtimedwait([signal.SIGCHLD], 0)))
    if own:
        print(os.waitpid(child, 0)[1])
print(len(calls), signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    assert ["False", "True", "0", "0", "True"] == run(code, tmp_path).split()


def test_a_handler_written_in_c(tmp_path: Path) -> None:
    """A handler set in C, as torch sets one for DataLoader workers, is restored with all its flags."""
    code = f"""{BEGIN}
import ctypes
libc, before, after = ctypes.CDLL(None), ctypes.create_string_buffer(1024), ctypes.create_string_buffer(1024)
calls = []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(calls.append)
libc.signal(signal.SIGCHLD, handler)
libc.sigaction(signal.SIGCHLD, None, before)
begin_and_end()
libc.sigaction(signal.SIGCHLD, None, after)
handler_and_mask, flags = slice(0, 16), slice(136, 140)  # the rest is not set
print(*[before.raw[part] == after.raw[part] != bytes(16) for part in (handler_and_mask, flags)], len(calls))
"""
    assert ["True", "True", "0"] == run(code, tmp_path).split()


def test_a_fork_while_sigchld_is_blocked(tmp_path: Path) -> None:
    """A fork made at that moment, as by another thread, has the handler and can start a process itself."""
    code = f"""{WITH_HANDLER}
from instrument.base.sigaction import c_library
from instrument.record.handover.background_process import hidden_sigchld
with hidden_sigchld(c_library()):
    fork = os.fork()
    if fork == 0:
        begin_and_end()
        signal.raise_signal(signal.SIGCHLD)
        os._exit(7 + len(calls))
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), len(calls))
"""
    assert ["8", "0"] == run(code, tmp_path).split()


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
    process, ended = begin()
    process.end(60)
    print(process.ended)
"""
    assert 3 * ["ended with exit code 0"] == run(code, tmp_path).splitlines()


def test_training_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """The recorded window is finished, also while a fork outlives the killed process."""
    code = f"""{LOOKS_OFTEN}{TRAIN}
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


def test_a_program_that_adopts_orphans(tmp_path: Path) -> None:
    """In a program that adopts orphans, as process 1 of a container does, the process is a child and is reaped."""
    code = f"""{BEGIN}
import ctypes
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
process, ended = begin()
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
    "missing",
    ["instrument.record.handover.background_process._SHELL = '/nowhere'", "sys.modules['ctypes'] = None"],
)
def test_a_system_without_a_shell_or_ctypes(tmp_path: Path, missing: str) -> None:
    """Without a shell or ctypes, the process is started as a child."""
    code = f"""{BEGIN}
import instrument.record.handover.background_process
{missing}
process, ended = begin()
process._process.kill()
ended.wait(30)
print(process.ended)
"""
    assert "was ended by SIGKILL\n" == run(code, tmp_path)


def test_a_shell_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to start, as at the limit of processes, is raised at once."""
    monkeypatch.setattr(background_process, "_SHELL", "/bin/false")
    with pytest.raises(OSError, match="/bin/false ended with exit code 1"):
        FinalizerProcess(lambda answer: None, lambda process: None)


def test_an_executable_that_is_not_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that embeds Python may set any sys.executable; the output of that executable is ignored."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'usage: program'; echo 3; echo '{'; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    answers: list[Any] = []
    process = FinalizerProcess(answers.append, lambda process: None)
    process.end(60)
    assert ("ended with exit code 2", []) == (process.ended, answers)


def test_a_signal_that_training_ignores(tmp_path: Path) -> None:
    """The process does not inherit blocked and ignored signals, so it ends soon after training."""
    code = f"""{BEGIN}
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
sys.path.append({str(programs.ROOT)!r})
from tests.support.finalizers import finalizer
answered = threading.Event()
process = FinalizerProcess(lambda answer: answered.set(), lambda process: None)
process.send({{"kind": "wake", "job": 0}})
answered.wait(60)
os.kill(finalizer(), signal.SIGALRM)
process.end(60)
print(process.ended)
"""
    assert "was ended by SIGALRM\n" == run(code, tmp_path)


@pytest.mark.parametrize("gone", [False, True])
def test_the_process_ends_without_readable_input(tmp_path: Path, gone: bool) -> None:
    """After a malformed line, or the end of the training process, the process finishes its jobs and exits."""
    entry = {"window": 1, "timing": None, "memory": None}
    window = {
        "kind": "window",
        "job": 1,
        "entry": entry,
        "folder": str(tmp_path),
        "raw": str(tmp_path / "trace.json"),
        "beside": [],
    }
    (tmp_path / "trace.json").write_text("{}")
    training = subprocess.Popen(["/bin/true"])
    training.wait()
    code = f"""
        from instrument.finish import finalizer_main
        finalizer_main._CHECK_INTERVAL_S = 0.1
        finalizer_main.main({training.pid if gone else os.getpid()})
    """
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, programs.program(code, tmp_path)]
    with subprocess.Popen(command, env=programs.environment(), **options) as process:
        assert process.stdin is not None
        process.stdin.write(
            json.dumps({**window, "read": False, "diagnose": False}).encode() + (b"\n" if gone else b"\n{no job\n")
        )
        process.stdin.flush()  # stdin stays open, as in a fork of training
        try:
            assert 0 == process.wait(60)
        finally:
            process.kill()
    assert [1] == [entry["window"] for entry in manifest(tmp_path)]
    assert (tmp_path / "trace.json.gz").exists()
