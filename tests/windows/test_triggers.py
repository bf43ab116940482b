"""Triggers open windows while a loop runs, change nothing else, and are gone when it ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import instrument
from instrument.base import process_id
from instrument.base.files import LineFile
from instrument.record.planning import agreement, command_files
from instrument.record.planning.command_files import CommandFiles, ask, commands_of
from instrument.record.planning.requests import WindowRequest
from instrument.record.planning.triggers import periods, times_of_day, touches
from instrument.record.windows.profile import Profile
from instrument.start.cli import app

from ..support import programs, warm
from ..support.finishing import eventually
from .training import manifest, train

pytestmark = pytest.mark.process

LIMIT_S = 20


def loop(out: Path, act: Callable[[], object], **arguments: Any) -> Any:
    """Train until a window is recorded; call ``act`` after some steps; return the profile."""
    deadline = time.monotonic() + LIMIT_S
    with instrument.profile(out, **arguments) as prof:

        def numbers() -> Any:
            number = 0
            while time.monotonic() < deadline and not prof.windows:
                yield number
                number += 1

        train(numbers(), prof.step, lambda number: (act() if number == 5 else None, time.sleep(0.005)))
    return prof


def opened_by(out: Path) -> list[str]:
    return [reason for line in manifest(out) if line["status"] == "recorded" for reason in line["opened_by"]]


def test_a_signal(out: Path) -> None:
    """The program's own handler is called too, and is back in place afterwards."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    mine = signal.getsignal(signal.SIGUSR2)
    try:
        loop(out, lambda: os.kill(os.getpid(), signal.SIGUSR2), triggers="signal=SIGUSR2", trigger_steps=2)
        assert mine is signal.getsignal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (["signal SIGUSR2"], [signal.SIGUSR2]) == (opened_by(out), seen)
    first, last = manifest(out)[0]["steps"]
    assert 2 == last - first + 1


def test_a_touched_file(out: Path, tmp_path: Path) -> None:
    """A file that was there before opens nothing until it is touched; no trace of the watch is left."""
    file = tmp_path / "go"
    file.touch()
    os.utime(file, (1, 1))
    prof = loop(out, file.touch, triggers=[f"file={file}"])
    assert [f"file {file} touched"] == opened_by(out)
    assert "recorded" == prof.windows[0]["status"]


def test_a_file_in_the_folder_of_the_run(out: Path) -> None:
    """`touch OUT/trigger` is enough."""
    loop(out, (out / "trigger").touch, triggers="file")
    assert [f"file {out / 'trigger'} touched"] == opened_by(out)


def test_periods_and_times_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A period is due once each time it has passed, however late it is checked; a time of day once a day."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    every = periods(10)
    found = []
    for now[0] in (100, 109.9, 110, 115, 120.5, 165, 169, 170):
        found.append(next(every) is not None)
    assert [False, False, True, False, True, True, False, True] == found
    daily = times_of_day(3, 30)
    assert next(daily) is None
    assert next(daily) is None


def test_the_time_opens_a_window(out: Path) -> None:
    """A period opens a window in a loop that runs longer."""
    loop(out, lambda: None, triggers="every=0.6s")
    assert ["every 0.6 s"] == opened_by(out)[:1]


def test_a_command(out: Path) -> None:
    """`instrument trigger FOLDER` and `instrument trigger PID` open a window with the steps and reason given."""
    called: list[subprocess.CompletedProcess[str]] = []
    command = [sys.executable, "-m", "instrument", "trigger"]

    def start() -> None:
        def run() -> None:
            for target, steps in ((str(out), "2"), (str(os.getpid()), "1")):
                line = [*command, target, "--steps", steps, "--reason", f"asked for {steps}"]
                called.append(subprocess.run(line, capture_output=True, text=True, check=False))

        thread.append(threading.Thread(target=run))
        thread[0].start()

    thread: list[threading.Thread] = []
    with instrument.profile(out, triggers="command") as prof:
        assert 0o600 == commands_of(str(out))[0].stat().st_mode & 0o777
        start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(prof.windows) < 2:
            train(1, prof.step)
        thread[0].join()
    assert [0, 0] == [each.returncode for each in called]
    assert f"process {os.getpid()}, rank 0, step " in called[0].stdout
    assert ["asked for 2", "asked for 1"] == opened_by(out)
    assert [2, 1] == [line["steps"][1] - line["steps"][0] + 1 for line in manifest(out)]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    with pytest.raises(LookupError, match="no process with the trigger"):
        commands_of(str(out))


def train_until(prof: Any, thread: threading.Thread) -> None:
    """Step slowly until a thread ends, a minute at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and thread.is_alive():
        train(1, prof.step)
        time.sleep(0.02)
    thread.join()


def test_a_command_names_the_window_and_waits(out: Path) -> None:
    """The command says the window and where its files will be; with --wait it prints them once they are there."""
    called: list[tuple[int, str]] = []
    with instrument.profile(out, triggers="command") as prof:
        thread = threading.Thread(target=lambda: called.append(triggered(str(out), "--steps", "2", "--wait")))
        thread.start()
        train_until(prof, thread)
    ((code, said),) = called
    (line,) = manifest(out)
    assert code == 0
    folder = out / f"window-{line['window']}"
    assert f"rank 0: window {line['window']}, whose files will be in {folder}" in said
    assert said.splitlines()[-1] == str(out / line["files"][0]["path"])
    assert (out / line["files"][0]["path"]).exists()


def test_a_command_that_waits_too_long(out: Path) -> None:
    """In a step that does not end, --wait gives up after --timeout; the request stays."""
    with instrument.profile(out, triggers="command") as prof:
        code, said = triggered(str(out), "--wait", "--timeout", "0.5", "--steps", "1")
        assert code == 3
        assert f"its files will be in a folder of {out}" in said
        assert "no files within the time of --timeout; the request stays" in said
        train(4, prof.step)
    assert ["instrument trigger"] == opened_by(out)


def test_a_window_that_is_not_reached(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop ends before the window, --wait says so."""
    called: list[tuple[int, str]] = []
    asked, request = threading.Event(), Profile.request

    def requested(prof: Profile, *arguments: Any) -> None:
        request(prof, *arguments)
        asked.set()

    monkeypatch.setattr(Profile, "request", requested)
    with instrument.profile(out, triggers="command") as prof:
        thread = threading.Thread(target=lambda: called.append(triggered(str(out), "--steps", "9", "--wait")))
        thread.start()
        assert asked.wait(30)
        prof.step()  # the warm-up
        time.sleep(1)
    thread.join()
    ((code, said),) = called
    assert code == 1
    assert "the loop ended" in said


def test_ctrl_c_leaves_the_request(out: Path) -> None:
    """Ctrl-C ends the waiting command with a message, and the window opens."""
    with instrument.profile(out, triggers="command") as prof:
        line = [sys.executable, "-m", "instrument", "trigger", str(out), "--wait", "--steps", "1"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None
            assert "a window opens" in waiting.stdout.readline()
            waiting.send_signal(signal.SIGINT)
            _, said = waiting.communicate(timeout=60)
        assert waiting.returncode == 130
        assert "the request stays" in said
        train(4, prof.step)
    assert ["instrument trigger"] == opened_by(out)


def triggered(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of `instrument trigger`."""
    done = CliRunner().invoke(app, ["trigger", *arguments])
    return done.exit_code, re.sub(r"process \d+, ", "", done.output).replace("instrument: ", "").strip()


@pytest.mark.parametrize(
    ("ranks", "options", "code", "said"),
    [
        (None, [], 0, "a window opens at the next step"),
        ([1], [], 1, "this rank does not record"),
        (None, ["--ranks", "1"], 1, "this rank does not record"),
        ([1], ["--ranks", "0"], 0, "a window opens at the next step"),
    ],
)
def test_what_a_process_of_its_own_will_do(
    out: Path, ranks: list[int] | None, options: list[str], code: int, said: str
) -> None:
    """A process opens the window at its next step, unless it does not record."""
    with instrument.profile(out, triggers="command", ranks=ranks):
        ended, shown = triggered(str(out), *options)
        assert (code, f"rank 0, step 0: {said}") == (ended, shown.splitlines()[0])


@pytest.mark.parametrize(
    ("ranks", "options", "code", "said"),
    [
        (None, [], 0, "a window opens in about 2 s, at the same step on all ranks that record"),
        ([1], [], 0, "this rank does not record; a window opens in about 2 s on those that do"),
        (None, ["--ranks", "1"], 0, "this rank does not record; a window opens in about 2 s on those that do"),
        (None, ["--ranks", "7"], 1, "this rank does not record"),  # and no such rank is there
    ],
)
def test_what_a_rank_of_a_job_will_do(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[int] | None,
    options: list[str],
    code: int,
    said: str,
) -> None:
    """The ranks agree on a step first, whether this rank records or not."""
    monkeypatch.setattr(agreement, "job_store", lambda prefix: torch.distributed.HashStore())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with instrument.profile(out, triggers="command", ranks=ranks):
        ended, shown = triggered(str(out), *options)
        assert (code, f"rank 0, step 0: {said}") == (ended, shown.splitlines()[0])


def test_an_error_does_not_end_the_service(out: Path, lenient: None, caplog: pytest.LogCaptureFixture) -> None:
    """The command that fails gets no answer, the error is logged, and the next command is answered."""
    errors = [RuntimeError("on purpose")]

    def request(_: WindowRequest) -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return {"rank": 3}

    listening = CommandFiles(out, WindowRequest(""))
    listening.begin(request, lambda _: {})
    (path,) = commands_of(str(out))
    assert None is ask(path, {})
    assert {"rank": 3} == ask(path, {})
    assert "on purpose" in caplog.text
    listening.end()


def test_a_full_disk_does_not_end_the_service(
    out: Path, lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that finds no room is lost, which is logged, and the next command is answered."""
    full, append = [True], LineFile.append

    def append_with_room(file: LineFile, line: dict[str, Any]) -> None:
        if file.path.suffix == ".answers" and full:
            raise OSError(errno.ENOSPC, full.pop() and "No space left on device")
        append(file, line)

    monkeypatch.setattr(LineFile, "append", append_with_room)
    monkeypatch.setattr(command_files, "_TIMEOUT_S", 1.0)
    listening = CommandFiles(out, WindowRequest(""))
    listening.begin(lambda _: {"rank": 3}, lambda _: {})
    (path,) = commands_of(str(out))
    with pytest.raises(TimeoutError):
        ask(path, {})
    assert {"rank": 3} == ask(path, {})
    assert "No space left on device" in caplog.text
    listening.end()


@pytest.mark.parametrize("how", ["removed", "replaced", "closed"])
def test_a_service_that_cannot_go_on(out: Path, lenient: None, how: str) -> None:
    """Its files are gone, so that nobody waits for an answer, and no other file takes their place."""
    asked: list[WindowRequest] = []
    listening = CommandFiles(out, WindowRequest(""))
    listening.begin(lambda request: asked.append(request) or {}, lambda _: {})  # type: ignore[func-returns-value]
    (path,) = commands_of(str(out))
    if how == "closed":
        (number,) = (entry.name for entry in Path("/proc/self/fd").iterdir() if entry.resolve() == path)
        os.close(int(number))
    elif how == "removed":
        path.unlink()
    else:  # by another user, in a folder that others can write to
        other = out / "other"
        other.write_text("{}\n")
        other.replace(path)
    eventually(lambda: not list(out.iterdir()))
    listening.end()
    assert not asked


def test_a_folder_with_a_long_path(tmp_path: Path) -> None:
    """The path of the folder may be long."""
    out = tmp_path / ("long" * 40) / "run"
    with instrument.profile(out, triggers="command") as prof:
        (path,) = commands_of(str(out))
        assert 0 == (ask(path, {"reason": "asked"}) or {})["rank"]
        train(8, prof.step)
    assert ["asked"] == opened_by(out)


@pytest.mark.parametrize("command", [b"", b"nonsense\n", b"[1]\n", b"[" * 70000 + b"\n", b"\xff\n", b"{}"])
def test_what_is_no_command(out: Path, command: bytes) -> None:
    """It opens nothing, and the next command is answered."""
    with instrument.profile(out, triggers="command") as prof:
        (path,) = commands_of(str(out))
        with path.open("ab") as file:
            file.write(command)
        assert {"error"} == (ask(path, {"steps": 0}) or {}).keys()
        train(8, prof.step)
        assert not prof.windows
        assert "rank" in (ask(path, {}) or {})


@pytest.mark.parametrize("command", [{"steps": 0}, {"steps": "1"}, {"ranks": "x"}])
def test_a_wrong_command(out: Path, command: dict[str, Any]) -> None:
    """It is answered with the reason, and opens nothing."""
    with instrument.profile(out, triggers="command") as prof:
        assert {"error"} == (ask(*commands_of(str(out)), command) or {}).keys()
        train(8, prof.step)
        assert not prof.windows


def test_a_process_that_does_not_answer(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so after some time."""
    monkeypatch.setattr(command_files, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(LineFile, "take", lambda file: iter(()))
    with instrument.profile(out, triggers="command"):
        code, said = triggered(str(out))
    assert code == 1
    assert said.splitlines()[0].endswith(".commands: timed out")
    assert "no process answers" in said


def test_a_dead_process(out: Path) -> None:
    """The file of a killed process does not count as a process that answers, and is removed."""
    code = (
        "import sys, os, signal, instrument\n"
        "instrument.profile(sys.argv[1], triggers='command').start()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    warm.run([sys.executable, "-c", code, str(out)], programs.environment())
    assert commands_of(str(out))
    done = subprocess.run(
        [sys.executable, "-m", "instrument", "trigger", str(out)], capture_output=True, text=True, check=False
    )
    assert (1, "no process answers") == (done.returncode, done.stderr.strip().removeprefix("instrument: "))
    assert [] == list(out.iterdir())


def test_a_process_of_another_machine(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked."""
    with instrument.profile(out, triggers="command"):
        monkeypatch.setattr(process_id, "machine", lambda: "0000abcd")
        assert (1, "no process answers") == triggered(str(out))


def test_the_exit_codes(out: Path) -> None:
    """It is 1 where no process records, whether a folder or a number is given, and 2 for wrong arguments."""
    out.mkdir(parents=True)
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert (1, f'no process with the trigger "command" records into {out}') == triggered(str(out))
    assert (1, f"cannot look into process {ended.pid}: No such file or directory; give the folder of its run") == (
        triggered(str(ended.pid))
    )
    own = os.getpid()
    assert (1, f'process {own} has no running profile with the trigger "command"') == triggered(str(own))
    assert 2 == triggered(str(out / "nowhere"))[0]
    assert 2 == triggered(str(out), "--ranks", "x")[0]


@pytest.mark.parametrize(
    "given", ["signal=SIGTERM", "signal", "every=3", "every=0s", "at=25:00", "nonsense", "file="]
)
def test_triggers_that_are_not_accepted(out: Path, given: str) -> None:
    """The message names the argument, the value and what is accepted."""
    with pytest.raises(ValueError, match='"triggers" must') as error:
        instrument.profile(out, triggers=given)
    assert repr(given) in str(error.value)


def test_nothing_is_planned_with_triggers(out: Path) -> None:
    """With triggers and no schedule a loop records nothing by itself, in `profile` and in `steps`."""
    with instrument.profile(out, triggers="file") as prof:
        train(5, prof.step)
    for _ in instrument.steps(range(5), out, triggers="file"):
        pass
    assert not (out / "manifest.jsonl").exists()


def test_loss_does_not_change(out: Path) -> None:
    """Triggers change no bit of a training."""
    plain = train(40)
    with instrument.profile(out, triggers="command, file, signal=SIGUSR2, every=1h, at=04:00") as prof:
        assert plain == train(
            40, prof.step, lambda number: os.kill(os.getpid(), signal.SIGUSR2) if number == 9 else None
        )
    assert ["signal SIGUSR2"] == opened_by(out)


def test_a_forked_child_leaves_the_commands(out: Path) -> None:
    """A child of the process neither answers nor removes the files."""
    with instrument.profile(out, triggers="command") as prof:
        child = os.fork()
        if not child:
            prof.stop()
            os._exit(0)
        os.waitpid(child, 0)
        (path,) = commands_of(str(out))
        assert os.getpid() == (ask(path, {}) or {})["process"]


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    """Removing the file opens nothing; making it anew does."""
    file = tmp_path / "trigger"
    watched = touches(file)
    found = [next(watched)]
    file.touch()
    found.append(next(watched))
    file.unlink()
    found += [next(watched), next(watched)]
    file.touch()
    found.append(next(watched))
    assert [False, True, False, False, True] == [each is not None for each in found]


def test_a_folder_that_takes_no_files(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence says that commands do not reach the process, and the loop goes on."""
    out.parent.mkdir(exist_ok=True)
    out.write_text("a file")
    with instrument.profile(out, triggers="command") as prof:
        train(3, prof.step)
    (text,) = [record.getMessage() for record in caplog.records if "trigger" in record.getMessage()]
    assert text.startswith("instrument: instrument trigger does not reach this process: [Errno ")
