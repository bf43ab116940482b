"""`instrument run` at a real terminal, and the ends of a program that Python or the user cuts short."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bootstrap.programs import RUN, TRAIN, entries_in, run, write
from tests.support.finishing import eventually, finishing_pid
from tests.support.programs import environment

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def at_terminal(folder: Path, size: tuple[int, int], *command: str, **variables: str) -> str:
    """Run a command at a terminal of so many rows and columns; return what it shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        line = ["/bin/sh", "-c", f'stty rows {size[0]} cols {size[1]}; exec "$@"', "sh", *command]
        os.execve("/bin/sh", line, environment(variables))
    shown = b""
    while select.select([terminal], [], [], 120)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the program has ended
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()


@pytest.mark.parametrize("variables", [{}, {"COLUMNS": "0"}])
def test_a_terminal_without_columns(tmp_path: Path, variables: dict[str, str]) -> None:
    """The summary is as wide as without a terminal."""
    write(tmp_path, TRAIN)
    shown = at_terminal(tmp_path, (0, 0), *RUN, "--", "train.py", **variables)
    assert "Where the step went" in shown
    assert re.search(r"backward +1 ", shown)


def test_a_program_that_leaves_by_os_exit(tmp_path: Path) -> None:
    """`os._exit` saves an open window and prints the summary; exit codes are as without."""
    ends = "import os\npid = os.fork()\nif pid == 0:\n    os._exit(4)\n"
    ends += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\nos._exit(status=3)\n"
    write(tmp_path, TRAIN + ends)
    done = run(tmp_path, [*RUN, "--out", "out", "--steps", "2-100", "--", "train.py"])
    assert (3, "4\n") == (done.returncode, done.stdout)
    assert done.stderr.count("Where the step went") == 1
    (entry,) = entries_in(tmp_path / "out")
    assert ("partial", [2, 4]) == (entry["status"], entry["steps"])


@pytest.mark.parametrize("by", ["run", "steps"])
def test_ctrl_c_while_the_end_waits(tmp_path: Path, by: str) -> None:
    """A second Ctrl-C ends the wait for the windows with one line; they are finished all the same."""
    items = "__import__('itertools').count()"
    if by == "steps":
        items = f"__import__('instrument').steps({items}, 'out', every=50)"
    rest = "    if _ == 60:\n        print(flush=True)\n        __import__('time').sleep(100)\n"
    write(tmp_path, TRAIN.replace("range(5)", items) + rest)
    line = [sys.executable, "train.py"]
    if by == "run":
        line = [*RUN, "--out", "out", "--every", "50", "--", "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    training = subprocess.Popen(line, cwd=tmp_path, env=environment(), text=True, **pipes)  # type: ignore[call-overload]
    eventually(lambda: (tmp_path / "out" / "window-0001").is_dir())
    finishing = finishing_pid(training.pid)
    os.kill(finishing, signal.SIGSTOP)
    training.stdout.readline()
    training.send_signal(signal.SIGINT)
    time.sleep(3)
    training.send_signal(signal.SIGINT)
    _, errors = training.communicate(timeout=30)
    os.kill(finishing, signal.SIGCONT)
    assert training.returncode in (130, -signal.SIGINT)
    assert "Exception ignored" not in errors
    assert errors.count("Traceback") == 1
    assert errors.count("instrument: not waiting; another process finishes the windows\n") == 1
    assert "failed and was skipped" not in errors
    eventually(lambda: (tmp_path / "out" / "manifest.jsonl").is_file())


def test_the_commands_of_a_killed_program(tmp_path: Path) -> None:
    """They go with the process that finishes windows, with the next command, or with the next program."""
    write(tmp_path, TRAIN + "import signal, os\nos.kill(os.getpid(), signal.SIGKILL)\n")
    line = [*RUN, "--out", "out", "--trigger", "command", "--steps", "100", "--", "train.py"]
    run(tmp_path, line)
    (left,) = (tmp_path / "out").glob(".*.commands")
    asked = run(tmp_path, [*RUN[:-1], "trigger", "out"])
    assert (1, "instrument: no process answers\n") == (asked.returncode, asked.stderr)
    assert not left.exists()
    run(tmp_path, line)
    assert len(list((tmp_path / "out").glob(".*.commands"))) == 1
    write(tmp_path, TRAIN)
    run(tmp_path, line)
    assert list((tmp_path / "out").glob(".*.commands")) == []
