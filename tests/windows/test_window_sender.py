"""A separate process finishes windows: training does not wait for it."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.config import settings
from instrument.base.files import LineFile
from instrument.base.guard import guard
from instrument.record.handover import window_sender as module
from instrument.record.handover.finishing_process import FEATURE, FinishingProcess
from instrument.record.windows import timing

from ..support import programs, warm
from ..support.finishing import eventually, finishing_pid, processes, unfinished
from .training import manifest, recorded, statuses, traces, train

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
KILLED = "not compressed: the process that finishes windows was ended by SIGKILL"


def record_window(prof: Any) -> None:
    """Record a window of one step."""
    torch.ones(3).sum()
    prof.step()


def profile_every_step(out: Path, count: int, **arguments: Any) -> Any:
    return instrument.profile(out, schedule=instrument.schedule(active=1, repeat=count), **arguments)


def count_files() -> int:
    """Return the number of open files."""
    return len(list(Path("/proc/self/fd").iterdir()))


def run_warm(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in ``folder`` for which it makes no difference when torch is imported."""
    command = programs.python(programs.program(code, folder))
    return warm.run(command, programs.environment(variables), cwd=folder, timeout=100, check=True)


def run(code: str, folder: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in ``folder`` that records into ``folder / "out"``."""
    arguments.setdefault("env", programs.environment())
    options = {"capture_output": True, "text": True, "check": True, "timeout": 100}
    script = programs.program(code, folder)
    return subprocess.run([sys.executable, str(script)], cwd=folder, **{**options, **arguments})


def test_the_training_process_imports_no_reader_or_report(tmp_path: Path) -> None:
    """Windows with a summary import neither the reader, the report, rich, msgspec nor structlog."""
    code = """
        import random, sys, torch, instrument
        before = random.getstate()
        for _ in instrument.steps(range(6), "out", wait=1, warmup=1, active=2):
            with instrument.annotate("forward"):
                torch.ones(3).sum()
        assert before == random.getstate()
        wings = tuple(f"instrument.{wing}" for wing in ("read", "explain", "show", "finish"))
        print([name for name in sorted(sys.modules) if name.split(".")[0] in ("rich", "structlog", "msgspec")
               or name.startswith(wings)])
    """
    done = run(code, tmp_path)
    assert "[]\n" == done.stdout
    assert 1 == done.stderr.count("Where the step went")
    assert "forward" in done.stderr


def test_the_process_is_isolated_from_the_program(tmp_path: Path) -> None:
    """The process imports nothing from the current folder or PYTHONPATH, and gets no GPU and no settings."""
    traps = {"json.py", "torch.py", "rich.py", "numpy.py", "msgspec.py", "sitecustomize.py", "usercustomize.py"}
    for name in traps:
        (tmp_path / name).write_text(f"import os; open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ')")
    program = tmp_path / "elsewhere"
    program.mkdir()
    code = """
        import os, sys
        sys.path[:] = [folder for folder in sys.path if folder != os.environ["TRAPS"]]
        os.remove(os.environ["TRAPS"] + "/sprung")  # written by the sitecustomize of this process
        import torch, instrument
        sys.path.append("/nowhere"), sys.path.append(os.environ["TRAPS"])
        os.chdir(os.environ["TRAPS"])
        with instrument.profile("out", schedule=instrument.schedule(active=1, repeat=0)) as prof:
            torch.ones(3).sum()
            prof.step()
            sys.path.append(os.environ["ROOT"])
            from tests.support.finishing import finishing_pid
            environment = open(f"/proc/{finishing_pid(os.getpid())}/environ").read().split(chr(0))
            names = ("INSTRUMENT", "CUDA", "HIP")
            of_torch = "CUDA_MODULE_LOADING="  # torch 2.6 sets it
            print(sorted(name for name in environment if name.startswith(names) and not name.startswith(of_torch)))
    """
    paths = os.pathsep.join([str(programs.ROOT / "src"), str(tmp_path)])
    env = programs.environment() | {"PYTHONPATH": paths, "INSTRUMENT_RUN": "", "TRAPS": str(tmp_path)}
    env["ROOT"] = str(programs.ROOT)
    done = run(code, program, env=env)
    assert "['CUDA_VISIBLE_DEVICES=', 'HIP_VISIBLE_DEVICES=', 'INSTRUMENT=0']\n" == done.stdout
    assert not (tmp_path / "sprung").exists()
    assert 1 == done.stderr.count("Where the step went")
    assert ("recorded", None) == (manifest(tmp_path / "out")[0]["status"], manifest(tmp_path / "out")[0]["reason"])


def test_the_process_lives_while_it_is_needed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process serves all windows; after the last one, or `stop`, no process, thread or file is left."""
    started = []

    def start(*arguments: Any) -> FinishingProcess:
        started.append(FinishingProcess(*arguments))
        return started[-1]

    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr(module, "FinishingProcess", start)
    threads, files = threading.active_count(), count_files()
    with profile_every_step(out, 3) as prof:
        assert not processes(os.getpid())
        record_window(prof)
        first = finishing_pid()
        record_window(prof)
        assert first == finishing_pid()
        record_window(prof)
        for _ in range(20):  # timed for comparison with the windows
            prof.step()
        eventually(lambda: 3 == len(prof.windows) and not processes(os.getpid()))
        assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(prof.windows)
    assert 1 == len(started)
    assert [] == list(out.glob(".*"))
    assert (threads, files) == (threading.active_count(), count_files())
    with instrument.profile(out) as prof:
        record_window(prof)
    assert not processes(os.getpid())
    assert (threads, files) == (threading.active_count(), count_files())


def test_a_process_that_is_killed(out: Path, lenient: None, caplog: pytest.LogCaptureFixture) -> None:
    """The current trace stays as torch wrote it, with a reason, and the next window starts another process."""
    with profile_every_step(out, 4) as prof:
        record_window(prof)
        eventually(lambda: 1 == len(prof.windows))
        first = finishing_pid()
        os.kill(first, signal.SIGSTOP)
        record_window(prof)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: 2 == len(prof.windows))
        record_window(prof)
        assert first != finishing_pid()
        eventually(lambda: 3 == len(prof.windows))
        os.kill(finishing_pid(), signal.SIGKILL)  # idle
        eventually(lambda: not unfinished())
        record_window(prof)
    assert [None, KILLED, None, None] == [entry["reason"] for entry in prof.windows]
    assert prof.windows == manifest(out)
    assert ["recorded"] * 4 == [entry["status"] for entry in prof.windows]
    assert [".gz", ".json", ".gz", ".gz"] == [path.suffix for path in traces(out)]
    assert [[0], [1], [2], [3]] == recorded(out)
    events = [record.__dict__ for record in caplog.records]
    event = next(event for event in events if "was ended by SIGKILL" in event["error"])
    assert (2, 0) == (event["window"], event["rank"])


def test_a_process_that_cannot_be_started(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Traces stay as torch wrote them, and the manifest has the reason."""
    monkeypatch.setattr(settings, "summary", True)
    with monkeypatch.context() as patch, profile_every_step(out, 2) as prof:
        patch.setattr(sys, "executable", "/nowhere/python")
        record_window(prof)
        record_window(prof)
    reason = (
        "not compressed: the process that finishes windows could not be started: "
        "[Errno 2] No such file or directory: '/nowhere/python'"
    )
    assert [("recorded", reason)] * 2 == [(entry["status"], entry["reason"]) for entry in manifest(out)]
    assert [[0], [1]] == recorded(out)
    assert reason.removeprefix("not compressed: ") in caplog.text


def test_an_interrupt_while_the_process_is_started(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process, such as the one that the end of the program starts, finishes the window."""
    summaries: list[str] = []
    monkeypatch.setattr(settings, "summary", True)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), profile_every_step(out, 3, on_summary=summaries.append) as prof:
        record_window(prof)
    entry = manifest(out)[0]
    assert ("recorded", None) == (entry["status"], entry["reason"])
    assert entry["timing"] is not None
    assert [".gz"] == [path.suffix for path in traces(out)]
    assert 1 == len(summaries)
    assert [] == caplog.records
    eventually(lambda: not processes(os.getpid()))  # the first process, which waits a second for this one's end


@pytest.mark.parametrize("hangs", [False, True])
def test_a_thread_that_cannot_be_started(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Without a thread, as at exit since Python 3.12, the end waits for the process and gets its summary."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    summaries: list[str] = []
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(module, "_WAIT_S", 0.1 if hangs else 60)
    with profile_every_step(out, 2, on_summary=summaries.append) as prof:
        record_window(prof)
        if hangs:
            os.kill(finishing_pid(), signal.SIGSTOP)
        record_window(prof)
    entries = manifest(out)
    assert ["recorded"] * 2 == [entry["status"] for entry in entries]
    killed = (
        "the process that finishes windows was killed because it took too long"  # before or after the compression
    )
    first, second = [(entry["reason"] or "").endswith(killed) for entry in entries]
    assert hangs == second
    assert hangs or not first  # which may be finished before the process is stopped
    assert [[0], [1]] == recorded(out)
    assert (0 if hangs else 1) == len(summaries)
    assert not processes(os.getpid())


def test_the_end_of_an_epoch_does_not_wait(out: Path) -> None:
    """The end of an epoch does not wait while windows are planned; `windows` does; the next epoch continues."""
    batches = instrument.steps(range(3), out, at="1,4")
    for number in batches:
        torch.ones(3).sum()
        if number == 2:
            os.kill(process := finishing_pid(), signal.SIGSTOP)
    assert not (out / "manifest.jsonl").exists()
    os.kill(process, signal.SIGCONT)
    assert [(1, "recorded")] == statuses(batches.profile.windows)
    for _ in batches:
        torch.ones(3).sum()
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    assert [[1], [4]] == recorded(out)


def test_a_large_job_does_not_block(out: Path) -> None:
    """Jobs of any size are sent even while the process does not read."""
    answers: list[int] = []
    process = FinishingProcess(out, lambda answer: answers.append(len(answer["errors"])), lambda process: None)
    try:
        os.kill(finishing_pid(), signal.SIGSTOP)
        for number in range(3):
            process.send({"kind": "report", "job": number, "filling": "x" * 2_000_000})
        assert not answers
    finally:
        os.kill(finishing_pid(), signal.SIGCONT)
    process.end(60)
    assert "ended with exit code 0" == process.ended
    assert [0] * 5 == answers  # also of the end, and of what comes before it
    assert [] == list(out.iterdir())


def test_a_window_that_cannot_be_submitted(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training process writes the window's line, before the lines of later windows."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("for the job")

    with profile_every_step(out, 2) as prof:
        with monkeypatch.context() as patch:
            patch.setattr(module.WindowSender, "_register", fail)
            record_window(prof)
        record_window(prof)
    reasons = [(entry["status"], entry["reason"]) for entry in manifest(out)]
    assert [("recorded", "not compressed: MemoryError: for the job"), ("recorded", None)] == reasons
    assert [[0], [1]] == recorded(out)
    assert "finishing a window failed and was skipped" in caplog.text


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no room"), MemoryError("no room")])
def test_a_job_that_cannot_be_sent(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The process is abandoned, each window has one line, and the next window starts another process."""
    original = LineFile.append
    failures, before = [error], guard.failures[FEATURE]

    def failing(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        original(*arguments)

    monkeypatch.setattr(LineFile, "append", failing)
    with profile_every_step(out, 2) as prof:
        record_window(prof)
        eventually(lambda: 1 == len(prof.windows))
        record_window(prof)
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    given_up = f"not compressed: the process that finishes windows was abandoned: {error!r}"
    assert {given_up, None} >= {entry["reason"] for entry in manifest(out)}
    assert guard.failures[FEATURE] > before
    assert [[0], [1]] == recorded(out)
    assert not processes(os.getpid())


def test_a_folder_of_jobs_that_is_removed(out: Path, lenient: None) -> None:
    """The process ends, each window has one line, and the next window starts another process."""
    with profile_every_step(out, 3) as prof:
        record_window(prof)
        eventually(lambda: 1 == len(prof.windows))
        shutil.rmtree(*out.glob(".*.jobs"))
        record_window(prof)
        eventually(lambda: 2 == len(prof.windows))
        record_window(prof)
    assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(manifest(out))
    assert [[0], [1], [2]] == recorded(out)
    assert not processes(os.getpid())


def test_an_executable_that_is_not_python(out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that embeds Python may set any sys.executable; the window is kept."""
    with monkeypatch.context() as patch, profile_every_step(out, 1) as prof:
        patch.setattr(sys, "executable", "/bin/false")
        record_window(prof)
    (entry,) = manifest(out)
    assert "not compressed: the process that finishes windows ended with exit code 1" == entry["reason"]
    assert [".json"] == [path.suffix for path in traces(out)]


def test_a_process_that_hangs(out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop never waits for a process that hangs, and the end waits for a limited time."""
    count = 300
    with profile_every_step(out, count) as prof:
        record_window(prof)
        os.kill(finishing_pid(), signal.SIGSTOP)
        for _ in range(count - 1):
            record_window(prof)
        assert len(prof.windows) <= 1
        os.kill(finishing_pid(), signal.SIGCONT)
    assert [(number, "recorded") for number in range(1, count + 1)] == statuses(manifest(out))
    assert all(path.suffix == ".gz" for path in traces(out))
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    with profile_every_step(out / "again", 2) as prof:
        record_window(prof)
        os.kill(finishing_pid(), signal.SIGSTOP)
        record_window(prof)
    reason = "not compressed: the process that finishes windows was killed because it took too long"
    assert reason == manifest(out / "again")[-1]["reason"]
    eventually(lambda: not processes(os.getpid()))  # it was sent SIGKILL


END_SUDDENLY = """
    import os, sys, torch, instrument
    os.setsid()
    torch.ones(3).sum()
    with instrument.profile(sys.argv[1], schedule=instrument.schedule(active=1, repeat=5)) as prof:
        for _ in range(3):
            torch.ones(1000, 1000).sum()
            prof.step()
        print(os.getpid(), flush=True)
        exec(sys.argv[1])
"""


def test_a_sudden_end_of_training(tmp_path: Path) -> None:
    """The process finishes its windows and ends; Ctrl-C at the terminal does not reach it."""
    script = programs.program(END_SUDDENLY, tmp_path)
    for end in ("os._exit(0)", "os.kill(os.getpid(), 9)", "os.killpg(0, 2)"):
        done = warm.run(programs.python(script, [end]), programs.environment(), cwd=tmp_path)
        number, out = done.stdout.strip(), tmp_path / end
        eventually(lambda number=number: not processes(int(number)))  # type: ignore[misc]
        assert [(1, "recorded"), (2, "recorded"), (3, "recorded")] == statuses(manifest(out)[:3])
        assert [[0], [1], [2]] == recorded(out)[:3]
        assert all(path.suffix == ".gz" for path in traces(out)[:3])


def test_no_work_beside_the_steps_that_are_compared(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is finished only after the steps behind it are timed, and those beside that work are not timed."""
    monkeypatch.setattr(timing, "_MIN_TOTAL_NS", 10**11)  # the search for the process makes a step long
    with instrument.profile(out, schedule="2,40") as prof:
        for _ in range(3):
            record_window(prof)
        number = finishing_pid()
        raw = next(out.glob("window-*/*.json"))
        train(5, prof.step)
        os.kill(number, signal.SIGSTOP)
        try:
            assert raw.exists()
            train(60, prof.step)
        finally:
            os.kill(number, signal.SIGCONT)
    first, second = (line["timing"]["around_steps"] for line in prof.windows)
    assert (first, second) == ([[1, 1], [3, 22]], [[3, 22]])


def test_a_fork_releases_the_process(tmp_path: Path) -> None:
    """A fork holds nothing of it, waits for nothing, and does not keep the process alive after training."""
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
    closed, number, fork = run_warm(code, tmp_path).stdout.split()
    try:
        assert "0" == closed
        eventually(lambda: not processes(int(number)))
        assert Path(f"/proc/{fork}").exists()
    finally:
        os.kill(int(fork), signal.SIGKILL)
    assert [(1, "recorded"), (2, "failed")] == statuses(manifest(tmp_path / "out"))


def test_a_summary_that_is_never_read(tmp_path: Path) -> None:
    """The program ends normally although its standard error is a full pipe."""
    code = """
        import os, sys, torch, instrument
        from instrument.record.handover import summary_output
        summary_output._ROOM_S = 0.2
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
    done = run_warm(code, tmp_path)
    assert "the result\n" == done.stdout
    assert "Fatal" not in done.stderr
    assert [(1, "recorded")] == statuses(manifest(tmp_path / "out"))


def test_the_text_of_the_summary(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_summary` gets one text for all windows, also of an earlier start, as wide as the terminal."""
    summaries: list[tuple[str, str]] = []
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(out.parent.parent)
    prof = instrument.profile(
        out,
        schedule=instrument.schedule(at=[0, 5, 50]),
        on_summary=lambda text: summaries.append((text, threading.current_thread().name)),
    )
    for _ in range(2):
        with prof:
            for _ in range(4):
                with instrument.annotate("a region with a long name, which does not fit"):
                    torch.ones(3).sum()
                prof.step()
    first, second = (text for text, _ in summaries)
    assert {"instrument"} == {thread for _, thread in summaries}
    assert "(step 0)" in first
    assert "(mean of steps 0, 5)" in second
    assert {1} == {text.count("Where the step went") for text, _ in summaries}
    lines = [line for line in second.splitlines() if ".json.gz" not in line]
    assert max(map(len, lines)) <= 60
    assert f"  {traces(out)[0].relative_to(out.parent.parent)}" in second.splitlines()
    assert "\x1b" not in second


def test_the_summary_ends_with_a_diagnosis(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `diagnose=True` the text says what is slow in the last window, as `instrument.diagnose` does."""
    texts: list[str] = []
    monkeypatch.setattr(settings, "summary", True)
    monkeypatch.setenv("COLUMNS", "80")
    for _ in instrument.steps(range(6), out, wait=1, warmup=1, active=3, diagnose=True, on_summary=texts.append):
        torch.ones(3).sum()
    (text,) = texts
    head, _, diagnosis = text.partition("\nWhat is slow in the last window\n")
    assert head.startswith("Where the step went")
    assert diagnosis.startswith(str(instrument.diagnose(out)).partition("\n")[0])


def test_the_diagnosis_of_each_window_is_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `diagnose=True` its JSON and its page are beside each trace, and the manifest names them."""
    monkeypatch.setattr(settings, "summary", True)
    with instrument.profile(out, schedule="2,5", diagnose=True, on_summary=lambda text: None) as prof:
        train(8, prof.step)
    for entry, trace in zip(manifest(out), [path for path in traces(out) if path.suffix == ".gz"], strict=True):
        data, page = (out / file["path"] for file in entry["diagnosis"])
        assert [file["bytes"] for file in entry["diagnosis"]] == [data.stat().st_size, page.stat().st_size]
        stem = trace.name.removesuffix(".pt.trace.json.gz")
        assert [trace.with_name(f"{stem}.diagnosis.{kind}") for kind in ("json", "html")] == [data, page]
        assert instrument.diagnose(trace).verdict == json.loads(data.read_text())["verdict"]
        assert page.read_text().startswith("<!doctype html>")


def test_diagnose_is_true_or_false(out: Path) -> None:
    """A value that is neither fails at once."""
    with pytest.raises(TypeError, match='"diagnose" must be True or False: 1'):
        instrument.profile(out, diagnose=1)  # type: ignore[arg-type]


def test_memory_of_many_windows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a window only its line stays: no object in training, and no memory in the process."""
    monkeypatch.setattr(settings, "summary", True)
    counts, sizes = [], []
    plan = instrument.schedule(active=1, repeat=0)
    with instrument.profile(out, schedule=plan, on_summary=lambda text: None) as prof:
        for number in range(1, 301):
            with instrument.annotate("forward"):
                record_window(prof)
            if number in (100, 300):
                eventually(lambda number=number: number == len(prof.windows))  # type: ignore[misc]
                gc.collect()
                counts.append(len(gc.get_objects()))
                pages = int(Path(f"/proc/{finishing_pid()}/statm").read_text().split()[1])
                sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert counts[1] - counts[0] < 150
    assert sizes[1] - sizes[0] < 4e6


EXHAUST_FILES = """
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


def test_a_limit_of_open_files(tmp_path: Path) -> None:
    """The window is lost, but its line with the system's error is written once that is possible."""
    for number, output in enumerate(run_warm(EXHAUST_FILES, tmp_path).stdout.splitlines()):
        written_at_once, entries = json.loads(output)
        written = manifest(tmp_path / f"out{2 * number + 1}")
        assert sorted(entries, key=str) == sorted(written, key=str)
        assert ["recorded" if other != number else "failed" for other in range(3)] == [
            entry["status"] for entry in sorted(entries, key=lambda entry: entry["window"])
        ]
        (reason,) = [entry["reason"] for entry in entries if entry["status"] == "failed"]
        assert "[Errno 24] " in reason
        assert "Too many open files" in reason
        assert not written_at_once


@pytest.mark.parametrize("closed", [False, True])
def test_the_stream_of_the_summary(
    out: Path, closed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary goes to the standard error of the loop's start, or to the current one if that is closed."""
    monkeypatch.setattr(settings, "summary", True)
    initial = io.StringIO()
    with contextlib.redirect_stderr(initial):
        prof = instrument.profile(out, schedule="1-2")
        prof.start()
    if closed:
        initial.close()
    captured = io.StringIO()
    with contextlib.nullcontext() if closed else contextlib.redirect_stderr(captured):
        train(5, prof.step)
        prof.stop()
    assert "" == captured.getvalue()
    assert "Where the step went" in (capsys.readouterr().err if closed else initial.getvalue())
