"""`FinishingProcess`: in the training process, starts `finish.main` as a program and talks to it through files.

A hidden folder in the folder of the run, ``.WRITER.jobs`` with the name of the training process, has four files:

- ``jobs``: the training process appends a line for each job, without waiting for anything;
- ``answers``: the program appends a line for each job that is done, and for uploads;
- ``program``: the number and the start of the shell that waits for the program;
- ``exit_code``: the shell that started the program writes it when the program has ended.

Each side looks for new lines several times a second: the training process on a thread, or in `end` where no
thread can be started, as at exit from Python 3.12 on. So a process that hangs, dies or is stopped holds nothing
up, a fork has no part in it, and Ctrl-C loses no line.

A shell starts the program in the background and exits, for which the constructor waits, a millisecond or two. So
the program is not a child of this process: `os.wait` neither returns it nor waits for it. It has a process group
of its own, so that Ctrl-C does not reach it, and no open file of this process. A second shell, its parent, waits
for its exit code. Where orphans become children of this process, as in process 1 of a container, `os.wait` returns
that shell.

The program ends after the job "end", which `close` sends, when ``jobs`` is removed, as by `give_up`, or when this
process has exited, for which it looks once a second. This process removes the folder when the program has ended;
the program does so if this process has exited, and the next one removes what both left.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ...base import process_id
from ...base.errors import CaptureError
from ...base.files import LineFile, make_folder
from ...base.guard import exiting, guard
from ...base.interrupts import Suppressed, is_interrupt

FEATURE = "finishing a window"
FOLDER_NAME = rf"\.{process_id.WRITER}\.jobs"
JOBS, ANSWERS, PROGRAM, EXIT_CODE = "jobs", "answers", "program", "exit_code"
UPLOAD = "INSTRUMENT_UPLOAD"
_CODE = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path += [folder for folder in {path!r} if folder not in sys.path]
spec = spec_from_file_location("instrument", {init!r}, submodule_search_locations=[{package!r}])
sys.modules["instrument"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from instrument.finish.main import main
main({folder!r}, {parent})
"""
# Isolated mode ignores the current folder, and the package is loaded from the folder of this file.

_PACKAGE = Path(__file__).resolve().parents[2]
_SHELL = "/bin/sh"
_IN_BACKGROUND = '{ "$@"; echo $? >"$0"; } </dev/null >/dev/null 2>&1 & echo $!'
_NICER_BY = 10
_POLL_S = 0.1
_KILL_S = 5  # time limit for the exit of the killed process
_TOO_LONG = "was killed because it took too long"
_ENVIRONMENT = {
    "INSTRUMENT": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OPENBLAS_NUM_THREADS": "1",
}


class FinishingProcess:
    """Sends jobs to a program that it starts, and passes on the answers.

    Args:
        folder: the folder of the run.
        on_answer: called with each answer, a mapping with the number of its ``job``; it raises nothing.
        on_exit: called after the last answer.
        upload: the URL, for the environment of the program alone: it may hold a password, and ``jobs`` is a file.

    Attributes:
        ended: how the program ended, in words.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        folder: Path,
        on_answer: Callable[[dict[str, Any]], None],
        on_exit: Callable[[FinishingProcess], None],
        upload: str | None = None,
    ) -> None:
        self._on_answer = on_answer
        self._on_exit = on_exit
        self._upload = upload
        self._owner = os.getpid()
        self._folder = folder.absolute() / f".{process_id.writer()}.jobs"
        self._jobs = LineFile(self._folder / JOBS)
        self._answers = LineFile(self._folder / ANSWERS)
        self._failure: str | None = None  # in words
        self._closed = False
        self.ended: str | None = None
        make_folder(self._folder)
        try:
            for file in (self._jobs, self._answers):
                file.create()
            self._group, self._shell = self._start()
            self._shell_start = process_id.start_time(self._shell)
            (self._folder / PROGRAM).write_text(f"{self._shell} {self._shell_start or ''}", "ascii")
            self._set_nice(_NICER_BY)
            self._thread = self._start_thread()
        except BaseException:
            self._remove_folder()  # a program that was started ends
            raise

    def _start(self) -> tuple[int, int]:
        """Start the program; return the numbers of its process group and of the shell that waits for it."""
        python = [sys.executable or "", *(["-B"] if sys.dont_write_bytecode else []), "-I"]
        Path(python[0]).stat()  # raises now if the file is missing: the shell's error would be lost
        # In the session of the program, `nice` counts on systems that divide the CPU between sessions.
        group: Any = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
        command = [_SHELL, "-c", _IN_BACKGROUND, str(self._folder / EXIT_CODE), *python, "-c", self._code()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=self._environment(), **group) as first:
            said = first.communicate()[0]
        if first.returncode or not said.strip().isdigit():  # the shell cannot fork
            raise OSError(f"{_SHELL} ended with exit code {first.returncode}")
        return first.pid, int(said)

    def _code(self) -> str:
        path = [folder for folder in sys.path if Path(folder).is_absolute()]
        package = str(_PACKAGE)
        folder = str(self._folder)
        return _CODE.format(
            path=path, init=str(_PACKAGE / "__init__.py"), package=package, folder=folder, parent=os.getpid()
        )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
        return kept | _ENVIRONMENT | ({UPLOAD: self._upload} if self._upload else {})

    def _start_thread(self) -> threading.Thread | None:
        follow = guard.contained(FEATURE)(self._follow)
        thread = threading.Thread(target=follow, name="instrument", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

    @property
    def takes_jobs(self) -> bool:
        """Whether the program runs, was not told to end and has its folder; never in a fork of this process."""
        over = self._closed or self.ended or self._owner != os.getpid()
        return not over and self._jobs.path.exists()

    def send(self, job: Mapping[str, Any]) -> None:
        """Send a job, without waiting.

        Raises:
            Exception: sending failed, and the process is abandoned.
        """
        try:
            self._jobs.append(job)
        except Exception as error:
            if not is_interrupt(error):
                self.give_up(error)
            raise

    def close(self) -> None:
        """Let the program end when its work is done."""
        if self.takes_jobs:
            self.send({"kind": "end", "job": 0})
            self._closed = True

    def end(self, timeout: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the work is done and all answers are passed on; kill the program after ``timeout`` s.

        ``waiting`` is called ten times a second meanwhile.
        """
        if self._owner != os.getpid():
            return
        self.close()
        self._set_nice(0)
        if not self._has_ended_within(timeout, waiting):
            self._failure = self._failure or _TOO_LONG
            with Suppressed(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
            self._has_ended_within(_KILL_S, waiting)

    def _has_ended_within(self, timeout: float, waiting: Callable[[], None]) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._thread is not None and self._thread.is_alive():
                self._thread.join(_POLL_S)
            elif self._pass_on():
                return True
            else:
                time.sleep(_POLL_S)
            waiting()
        return False

    def give_up(self, error: Exception) -> None:
        """Send no more jobs because of ``error``; the program exits after those that it has."""
        self._closed = True
        self._failure = self._failure or f"was abandoned: {error!r}"
        with Suppressed(OSError):
            self._jobs.path.unlink(missing_ok=True)

    def _set_nice(self, nicer_by: int) -> None:
        """Give the program less of the CPU than this one; to give it more again needs a privilege."""
        if self.ended is None:  # later, another process may have its number
            with Suppressed(OSError):
                nice = min(os.getpriority(os.PRIO_PROCESS, 0) + nicer_by, 19)
                os.setpriority(os.PRIO_PGRP, self._group, nice)

    def _follow(self) -> None:
        while not self._pass_on():
            time.sleep(_POLL_S)

    def _pass_on(self) -> bool:
        """Pass on the new answers; return whether the program has ended and these were the last ones."""
        if self.ended is None:
            start = process_id.start_time(self._shell)  # before the last answers are taken
            for answer in self._answers.take():
                self._on_answer(answer)
            if start is None or start != self._shell_start:
                self._note_end()
        return self.ended is not None

    def _note_end(self) -> None:
        with Suppressed(ChildProcessError):  # this process does not adopt orphans
            os.waitpid(self._shell, os.WNOHANG)
        self.ended = self._failure or self._describe_exit()
        self._remove_folder()
        self._on_exit(self)

    def _describe_exit(self) -> str:
        code = None
        with Suppressed(OSError, ValueError):  # the shell was killed, or the folder removed
            code = int((self._folder / EXIT_CODE).read_text("ascii"))
        if code is None:
            return "ended without an exit code"
        if code <= 128:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
        return f"was ended by signal {code - 128}"

    def _remove_folder(self) -> None:
        for name in (JOBS, ANSWERS, PROGRAM, EXIT_CODE):
            with Suppressed(OSError):
                (self._folder / name).unlink(missing_ok=True)
        with Suppressed(OSError):
            self._folder.rmdir()


def is_left(folder: Path) -> bool:
    """Return whether a folder of jobs is that of a process of this machine that has exited, as has its program."""
    name = re.fullmatch(FOLDER_NAME, folder.name)
    if name is None or not process_id.has_exited(name):
        return False
    try:
        number, _, start = (folder / PROGRAM).read_text("ascii").partition(" ")
        return process_id.start_time(int(number)) != start
    except (OSError, ValueError):  # the process exited before it sent a job
        return True


_PROCESSING = "processing a trace"
_TRACE_WAIT_S = 60.0  # how long `finish` waits for each


def _handle_answer(answer: Mapping[str, Any]) -> None:
    for _, error in answer["errors"]:
        guard.note(_PROCESSING, CaptureError(error))


_trace_processes: list[FinishingProcess] = []  # the last one gets the traces
_trace_numbers = count(1)


@guard.contained(_PROCESSING)
def process_trace(trace_path: str | os.PathLike[str]) -> None:
    """Have a trace compressed, summarized and diagnosed by another process; return at once.

    NAME.summary.txt, NAME.diagnosis.json and NAME.diagnosis.html are written beside the trace. A trace that is not
    gzipped is replaced by one that is. No failure reaches the caller: it is logged. The exit of the program waits
    for the files, up to a minute.

    Args:
        trace_path: the file that `torch.profiler.profile.export_chrome_trace` wrote.
    """
    path = Path(trace_path).absolute()
    if not _trace_processes or not _trace_processes[-1].takes_jobs:
        _trace_processes.append(FinishingProcess(path.parent, _handle_answer, lambda process: None))
        atexit.unregister(finish)
        atexit.register(finish)
    _trace_processes[-1].send({"kind": "trace", "job": next(_trace_numbers), "path": str(path)})


@guard.contained(_PROCESSING)
def finish() -> None:
    """Wait until the files of all traces are written, for a minute."""
    with exiting():
        while _trace_processes:
            _trace_processes.pop().end(_TRACE_WAIT_S)
