"""What follows a window is done by a process of its own, for which training does not wait."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.config import settings
from instrument.descriptors import OwnSocket
from instrument.guard import guard
from instrument.windows import window_finalizer as module
from instrument.windows.finalizer_process import FEATURE, FinalizerProcess

from ..support import programs
from ..support.finalizers import LOOKS_OFTEN, eventually, finalizer, processes
from .training import manifest, recorded, statuses, traces, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
KILLED = "not compressed: the process that finishes windows was ended by SIGKILL"


def window(prof: Any) -> None:
    """Record a window of one step."""
    torch.ones(3).sum()
    prof.step()


def every_step(out: Path, count: int, **arguments: Any) -> Any:
    return instrument.profile(out, schedule=instrument.schedule(active=1, repeat=count), **arguments)


def sockets() -> int:
    """How many sockets are open."""
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return sum("socket:" in link for link in links)


def run(code: str, folder: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in ``folder``, which records into ``folder / "out"``."""
    arguments.setdefault("env", programs.environment())
    options = {"capture_output": True, "text": True, "check": True, "timeout": 100}
    script = programs.program(code, folder)
    return subprocess.run([sys.executable, str(script)], cwd=folder, **{**options, **arguments})


def test_the_training_process_imports_nothing_of_it(tmp_path: Path) -> None:
    """Windows with a summary import neither the reader, the report and rich, nor structlog."""
    code = """
        import random, sys, torch, instrument
        before = random.getstate()
        for _ in instrument.steps(range(6), "out", wait=1, warmup=1, active=2):
            with instrument.annotate("forward"):
                torch.ones(3).sum()
        assert before == random.getstate()
        print([name for name in sorted(sys.modules) if name.split(".")[0] in ("rich", "structlog", "msgspec")
               or name.startswith(("instrument.traces", "instrument.report", "instrument.diagnosis"))])
    """
    done = run(code, tmp_path)
    assert "[]\n" == done.stdout
    assert 1 == done.stderr.count("Where the step went")
    assert "forward" in done.stderr


def test_nothing_of_the_program_reaches_it(tmp_path: Path) -> None:
    """It imports no module of the current folder or of PYTHONPATH, and sees no GPU and no setting of ours."""
    traps = {"json.py", "torch.py", "rich.py", "numpy.py", "msgspec.py", "sitecustomize.py", "usercustomize.py"}
    for name in traps:
        (tmp_path / name).write_text(f"import os; open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ')")
    program = tmp_path / "elsewhere"
    program.mkdir()
    code = """
        import os, sys
        sys.path[:] = [folder for folder in sys.path if folder != os.environ["TRAPS"]]
        os.remove(os.environ["TRAPS"] + "/sprung")  # by the sitecustomize, in this process
        import torch, instrument
        sys.path.append("/nowhere"), sys.path.append(os.environ["TRAPS"])
        os.chdir(os.environ["TRAPS"])
        with instrument.profile("out", schedule=instrument.schedule(active=1, repeat=0)) as prof:
            torch.ones(3).sum()
            prof.step()
            sys.path.append(os.environ["ROOT"])
            from tests.support.finalizers import finalizer
            environment = open(f"/proc/{finalizer()}/environ").read().split(chr(0))
            print(sorted(name for name in environment if name.startswith(("INSTRUMENT", "CUDA", "HIP"))))
    """
    paths = os.pathsep.join([str(programs.ROOT / "src"), str(tmp_path)])
    env = programs.environment() | {"PYTHONPATH": paths, "INSTRUMENT_RUN": "", "TRAPS": str(tmp_path)}
    env["ROOT"] = str(programs.ROOT)
    done = run(code, program, env=env)
    assert "['CUDA_VISIBLE_DEVICES=', 'HIP_VISIBLE_DEVICES=', 'INSTRUMENT=0']\n" == done.stdout
    assert not (tmp_path / "sprung").exists()
    assert 1 == done.stderr.count("Where the step went")
    assert ("recorded", None) == (manifest(tmp_path / "out")[0]["status"], manifest(tmp_path / "out")[0]["reason"])


def test_it_is_there_while_it_is_needed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process serves all windows; after the last one, or `stop`, there is none, and no thread or socket."""
    started = []

    def start(*arguments: Any) -> FinalizerProcess:
        started.append(FinalizerProcess(*arguments))
        return started[-1]

    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr(module, "FinalizerProcess", start)
    threads, files = threading.active_count(), sockets()
    with every_step(out, 3) as prof:
        assert not processes(os.getpid())
        window(prof)
        first = finalizer()
        window(prof)
        assert first == finalizer()
        window(prof)
        for _ in range(20):  # which are timed, to be compared with the windows
            prof.step()
        eventually(lambda: 3 == len(prof.windows) and not processes(os.getpid()))
        assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(prof.windows)
    assert 1 == len(started)
    assert (threads, files) == (threading.active_count(), sockets())
    with instrument.profile(out) as prof:
        window(prof)
    assert not processes(os.getpid())
    assert (threads, files) == (threading.active_count(), sockets())


def test_a_process_that_is_killed(out: Path, lenient: None, caplog: pytest.LogCaptureFixture) -> None:
    """The trace it was at stays as torch wrote it, the manifest says why, and the next window has another one."""
    with every_step(out, 4) as prof:
        window(prof)
        eventually(lambda: 1 == len(prof.windows))
        first = finalizer()
        os.kill(first, signal.SIGSTOP)
        window(prof)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: 2 == len(prof.windows))
        window(prof)
        assert first != finalizer()
        eventually(lambda: 3 == len(prof.windows))
        os.kill(finalizer(), signal.SIGKILL)  # with nothing to do
        eventually(lambda: prof._finalizer._process.ended)
        window(prof)
    assert [None, KILLED, None, None] == [entry["reason"] for entry in prof.windows]
    assert prof.windows == manifest(out)
    assert ["recorded"] * 4 == [entry["status"] for entry in prof.windows]
    assert [".gz", ".json", ".gz", ".gz"] == [path.suffix for path in traces(out)]
    assert [[0], [1], [2], [3]] == recorded(out)
    assert "the process that finishes windows was ended by SIGKILL" in caplog.text


def test_a_process_that_cannot_be_started(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Traces stay as torch wrote them, and the manifest says why."""
    monkeypatch.setattr(settings, "summary", True)
    with monkeypatch.context() as patch, every_step(out, 2) as prof:
        patch.setattr(sys, "executable", "/nowhere/python")
        window(prof)
        window(prof)
    reason = (
        "not compressed: the process that finishes windows could not be started: "
        "[Errno 2] No such file or directory: '/nowhere/python'"
    )
    assert [("recorded", reason)] * 2 == [(entry["status"], entry["reason"]) for entry in manifest(out)]
    assert [[0], [1]] == recorded(out)
    assert reason.removeprefix("not compressed: ") in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
def test_no_thread_can_be_started(out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """As at exit from Python 3.12 on: the end waits for the process, and has its summary."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    told: list[str] = []
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(module, "_WAIT_S", 0.1 if hangs else 60)
    with every_step(out, 2, on_summary=told.append) as prof:
        window(prof)
        if hangs:
            os.kill(finalizer(), signal.SIGSTOP)
        window(prof)
    entries = manifest(out)
    assert ["recorded"] * 2 == [entry["status"] for entry in entries]
    killed = "the process that finishes windows was killed as it took too long"  # before it compressed, or after
    assert [hangs] * 2 == [(entry["reason"] or "").endswith(killed) for entry in entries]
    assert [[0], [1]] == recorded(out)
    assert (0 if hangs else 1) == len(told)
    assert not processes(os.getpid())


def test_the_end_of_an_epoch_does_not_wait(out: Path) -> None:
    """While windows are to come; `windows` waits, and the next epoch goes on after that."""
    batches = instrument.steps(range(3), out, at="1,4")
    for number in batches:
        torch.ones(3).sum()
        if number == 2:
            eventually(lambda: batches.profile._finalizer._process is not None)
            os.kill(process := finalizer(), signal.SIGSTOP)
    assert [] == batches.profile._outcomes.entries
    os.kill(process, signal.SIGCONT)
    assert [(1, "recorded")] == statuses(batches.profile.windows)
    for _ in batches:
        torch.ones(3).sum()
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    assert [[1], [4]] == recorded(out)


def test_a_large_job_blocks_nobody() -> None:
    """A job larger than the connection is passed on by the thread, also to a process that reads nothing so far."""
    answers: list[int] = []
    process = FinalizerProcess(lambda answer: answers.append(len(answer["errors"])), lambda process: None)
    try:
        os.kill(finalizer(), signal.SIGSTOP)
        for _ in range(3):
            process.send({"kind": "wake", "job": 0, "filling": "x" * 2_000_000})  # it would never return
    finally:
        os.kill(finalizer(), signal.SIGCONT)
    process.end(60)
    assert "ended with exit code 0" == process.ended
    assert len(answers) >= 4
    assert not any(answers)


def test_a_window_that_cannot_be_handed_over(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training process writes its line, in front of those of later windows."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("for the job")

    with every_step(out, 2) as prof:
        with monkeypatch.context() as patch:
            patch.setattr(module.WindowFinalizer, "_register", fail)
            window(prof)
        window(prof)
    reasons = [(entry["status"], entry["reason"]) for entry in manifest(out)]
    assert [("recorded", "not compressed: MemoryError: for the job"), ("recorded", None)] == reasons
    assert [[0], [1]] == recorded(out)
    assert "finishing a window failed and was skipped" in caplog.text


@pytest.mark.parametrize("method", ["sendall", "recv"])
@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "no room"), MemoryError("no room")])
def test_a_connection_that_fails(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """The process is given up without being waited for, each window has one line, and the next one has another."""
    original = getattr(socket.socket, method)
    failures, before = [error], guard.failures[FEATURE]

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments)

    monkeypatch.setattr(OwnSocket, method, failing, raising=False)
    with every_step(out, 2) as prof:
        window(prof)
        eventually(lambda: 1 == len(prof.windows))
        window(prof)
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    given_up = f"not compressed: the process that finishes windows was given up: {error!r}"
    assert {given_up, None} >= {entry["reason"] for entry in manifest(out)}
    assert guard.failures[FEATURE] > before
    assert [[0], [1]] == recorded(out)
    assert not processes(os.getpid())


def test_a_connection_that_the_program_closes(out: Path, lenient: None) -> None:
    """As daemons do; each window has one line, which says why it is not compressed."""
    with every_step(out, 2) as prof:
        window(prof)
        eventually(lambda: 1 == len(prof.windows))
        os.close(prof._finalizer._process._socket.fileno())
        window(prof)
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    assert "closed the connection" in manifest(out)[1]["reason"]
    assert [[0], [1]] == recorded(out)
    assert not processes(os.getpid())


def test_a_process_that_is_no_python(out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that embeds Python may name anything as its executable; the window is kept."""
    with monkeypatch.context() as patch, every_step(out, 1) as prof:
        patch.setattr(sys, "executable", "/bin/false")
        window(prof)
    (entry,) = manifest(out)
    assert "not compressed: the process that finishes windows ended with exit code 1" == entry["reason"]
    assert [".json"] == [path.suffix for path in traces(out)]


def test_a_job_that_comes_as_the_process_ends(lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes after the process, and that is not taken for the program's doing."""
    made = threading.Event()
    close = OwnSocket.close

    def closing(own: OwnSocket) -> None:
        made.wait(10)
        close(own)
        process.send({"kind": "line", "job": 1})

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(OwnSocket, "close", closing)
    process = FinalizerProcess(lambda answer: None, lambda process: None)
    made.set()
    process.end(10)
    assert "ended with exit code 1" == process.ended


def test_a_process_that_hangs(out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for it at no time, however many windows there are, and the end does not for ever."""
    count = 300
    with every_step(out, count) as prof:
        window(prof)
        os.kill(finalizer(), signal.SIGSTOP)
        for _ in range(count - 1):
            window(prof)
        assert len(prof.windows) <= 1
        os.kill(finalizer(), signal.SIGCONT)
    assert [(number, "recorded") for number in range(1, count + 1)] == statuses(manifest(out))
    assert all(path.suffix == ".gz" for path in traces(out))
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    with every_step(out / "again", 2) as prof:
        window(prof)
        os.kill(finalizer(), signal.SIGSTOP)
        window(prof)
    reason = "not compressed: the process that finishes windows was killed as it took too long"
    assert reason == manifest(out / "again")[-1]["reason"]
    assert not processes(os.getpid())


ENDED = """
    import os, sys, torch, instrument
    torch.ones(3).sum()
    with instrument.profile(sys.argv[1], schedule=instrument.schedule(active=1, repeat=5)) as prof:
        for _ in range(3):
            torch.ones(1000, 1000).sum()
            prof.step()
        print(os.getpid(), flush=True)
        exec(sys.argv[1])
"""


def test_an_end_of_training_that_no_code_sees(tmp_path: Path) -> None:
    """It finishes the windows that it has, and ends; Ctrl-C at the terminal does not reach it."""
    script = programs.program(ENDED, tmp_path)
    ends = ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.killpg(0, 2)"]
    options: Any = {"cwd": tmp_path, "env": programs.environment(), "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, script, end], start_new_session=True, **options) for end in ends]
    for end, program in zip(ends, started, strict=True):
        number, out = program.communicate(timeout=100)[0].strip(), tmp_path / end
        eventually(lambda number=number: not processes(int(number)))  # type: ignore[misc]
        assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(manifest(out)[:3])
        assert [[0], [1], [2]] == recorded(out)[:3]
        assert all(path.suffix == ".gz" for path in traces(out)[:3])


def test_a_fork_lets_go_of_it(tmp_path: Path) -> None:
    """A fork has no connection to it, waits for nothing, and does not keep it alive when training is gone."""
    code = """
        import os, sys, time, torch, instrument
        prof = instrument.profile("out", schedule=instrument.schedule(active=1, repeat=5))
        prof.start()
        torch.ones(3).sum()
        prof.step()
        reader, writer = os.pipe()
        before = len(os.listdir("/proc/self/fd"))
        fork = os.fork()
        if fork == 0:
            prof.step()
            prof.stop()
            print(before - len(os.listdir("/proc/self/fd")), flush=True)
            sys.stdout.close(), os.close(1), os.close(2)
            os.write(writer, b".")
            time.sleep(60)
        os.read(reader, 1)
        print(os.getpid(), fork, flush=True)
        os._exit(0)
    """
    done = run(LOOKS_OFTEN + textwrap.dedent(code), tmp_path)
    closed, number, fork = done.stdout.split()
    try:
        assert "1" == closed
        eventually(lambda: not processes(int(number)))
        assert Path(f"/proc/{fork}").exists()
    finally:
        os.kill(int(fork), signal.SIGKILL)
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))


def test_nobody_reads_the_summary(tmp_path: Path) -> None:
    """With a standard error that is full the program ends all the same, and as it should."""
    code = """
        import os, sys, torch, instrument
        from instrument.windows import window_finalizer
        window_finalizer._STDERR_S = 0.2
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writer, True)
        sys.stderr = open(writer, "w")
        for _ in instrument.steps(range(3), "out", at=1):
            torch.ones(3).sum()
        print("the result")
    """
    done = run(code, tmp_path)
    assert "the result\n" == done.stdout
    assert "Fatal" not in done.stderr
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))


def test_the_text_of_the_summary(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_summary` gets it once for all windows, also those of an earlier start, as wide as the terminal is."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(out.parent.parent)
    prof = instrument.profile(
        out,
        schedule=instrument.schedule(at=[0, 5, 50]),
        on_summary=lambda text: told.append((text, threading.current_thread().name)),
    )
    for _ in range(2):
        with prof:
            for _ in range(4):
                with instrument.annotate("a region with a long name, which does not fit"):
                    torch.ones(3).sum()
                prof.step()
    first, second = (text for text, _ in told)
    assert {"instrument"} == {thread for _, thread in told}
    assert "(step 0)" in first
    assert "(mean of steps 0, 5)" in second
    assert {1} == {text.count("Where the step went") for text, _ in told}
    lines = [line for line in second.splitlines() if ".json.gz" not in line]
    assert max(map(len, lines)) <= 60
    assert f"  {traces(out)[0].relative_to(out.parent.parent)}" in second.splitlines()
    assert "\x1b" not in second


def test_memory_of_many_windows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window leaves nothing but its line: no object in training, and no memory in the other process."""
    monkeypatch.setattr(settings, "summary", True)
    counts, sizes = [], []
    plan = instrument.schedule(active=1, repeat=0)
    with instrument.profile(out, schedule=plan, on_summary=lambda text: None) as prof:
        for number in range(1, 301):
            with instrument.annotate("forward"):
                window(prof)
            if number in (100, 300):
                eventually(lambda number=number: number == len(prof.windows))  # type: ignore[misc]
                gc.collect()
                counts.append(len(gc.get_objects()))
                pages = int(Path(f"/proc/{finalizer()}/statm").read_text().split()[1])
                sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert counts[1] - counts[0] < 150
    assert sizes[1] - sizes[0] < 4e6


EXHAUSTED = """
    import json, os, resource, sys
    import torch, instrument

    def exhaust():
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return held

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for when in (1, 3, 5):
        out = f"out{when}"
        with instrument.profile(out, schedule=instrument.schedule("1,3,5")) as prof:
            for number in range(8):
                torch.ones(3).sum()
                if number == when:
                    held = exhaust()
                prof.step()
                if number == when:
                    for file in held:
                        os.close(file)
                    path = out + "/manifest.jsonl"
                    written = os.path.exists(path) and "Too many" in open(path).read()
        print(json.dumps([written, prof.windows]))
"""


def test_no_file_can_be_opened(tmp_path: Path) -> None:
    """The window is lost, not its line, which is written when that is possible and says what the system said."""
    for number, output in enumerate(run(EXHAUSTED, tmp_path).stdout.splitlines()):
        at_once, entries = json.loads(output)
        written = manifest(tmp_path / f"out{2 * number + 1}")
        assert sorted(entries, key=str) == sorted(written, key=str)
        assert ["recorded" if other != number else "failed" for other in range(3)] == [
            entry["status"] for entry in sorted(entries, key=lambda entry: entry["window"])
        ]
        (reason,) = [entry["reason"] for entry in entries if entry["status"] == "failed"]
        assert "[Errno 24] " in reason
        assert "Too many open files" in reason
        assert not at_once


@pytest.mark.parametrize("closed", [False, True])
def test_the_summary_is_on_standard_error_as_the_loop_found_it(
    out: Path, closed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loop captures stays its own; where the stream is closed, the current one is written to."""
    monkeypatch.setattr(settings, "summary", True)
    found = io.StringIO()
    with contextlib.redirect_stderr(found):
        prof = instrument.profile(out, schedule="1-2")
        prof.start()
    if closed:
        found.close()
    captured = io.StringIO()
    with contextlib.nullcontext() if closed else contextlib.redirect_stderr(captured):
        train(5, prof.step)
        prof.stop()
    assert "" == captured.getvalue()
    assert "Where the step went" in (capsys.readouterr().err if closed else found.getvalue())
