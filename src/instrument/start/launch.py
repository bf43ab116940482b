"""Runs a program, or each rank of a job, under a vendor's profiler, and prints a summary of the reports.

One tool around the launcher would merge the windows of all ranks or lose some, as each rank would begin and end
its recording.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from ..base import stderr
from ..base.config import LAUNCHED, settings
from ..base.errors import LaunchError
from ..base.files import make_folder
from ..base.guard import guard
from ..base.interrupts import handling
from ..base.run_folder import NAME, entries_of
from ..read.jobs.trace_files import rank_from_name
from ..record.handover.manifest import size_of
from ..show.terminal.console import print_line
from .vendors import LaunchRequest, Ncu, Nsys, Rocprof, Tool, Vendor, Vtune, find_tool

_PARSERS = {
    "torchrun": ("torch.distributed.run", "get_args_parser"),
    "accelerate": ("accelerate.commands.launch", "launch_command_parser"),
}
MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}


@dataclass(frozen=True)
class Workers:
    """The parts of a launcher's command line.

    Attributes:
        launcher: the launcher with its options.
        program: the program that it starts for each rank.
        restarts: whether it may restart a rank.
    """

    launcher: Sequence[str]
    program: Sequence[str]
    restarts: bool

    def under(self, tool: Sequence[str]) -> list[str]:
        """Return the command line that starts each rank under ``tool``."""
        return [*self.launcher, "--no_python", *tool, *self.program]


def workers(command: Sequence[str], environment: Mapping[str, str]) -> Workers | None:
    """Parse the command line of torchrun or ``accelerate launch``; return None for another or a wrong one."""
    words, name = list(command), Path(command[0]).name
    if name == "torchrun":
        start = 1
    elif name == "accelerate" and words[1:2] == ["launch"]:
        start = 2
    elif words[1:2] == ["-m"] and words[2:3] and words[2] in MODULES:
        name, start = MODULES[words[2]], 3
    else:
        return None
    given = words[start:]
    parsed = _parse(name, given)
    if parsed is None or not parsed.training_script:
        return None
    own = len(given) - len(parsed.training_script_args) - 1
    # After "--" the next word would be taken for the script.
    options = [word for word in given[:own] if word not in ("-m", "--module", "--no_python", "--no-python", "--")]
    program = given[own:]
    if not parsed.no_python:
        python = environment.get("PYTHON_EXEC", sys.executable)  # as torchrun does
        program = [python, "-u", *(["-m"] if parsed.module else []), *program]
    restarts = int(getattr(parsed, "max_restarts", 0) or 0) > 0
    return Workers([*words[:start], *options], program, restarts)


def _parse(launcher: str, words: list[str]) -> Any:
    """Return the launcher's arguments as its own parser parses them; None if it rejects them."""
    try:
        module, name = _PARSERS[launcher]
        parser = getattr(importlib.import_module(module), name)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parser().parse_args(words)
    except (ImportError, SystemExit):  # the launcher will report the error
        return None


_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def run_tool(command: Sequence[str], environment: Mapping[str, str], program: Sequence[str]) -> int:
    """Run ``command``, which starts ``program``, and return the exit code: 128 plus the number of a signal.

    A signal makes the tools end their recording, and some then leave the program running. The tool therefore runs
    in a session of its own without signals, and the program gets each signal once, as it does without the tool.
    """
    tool: subprocess.Popen[bytes] | None = None
    early_signals: list[int] = []

    def forward(number: int, _: FrameType | None = None) -> None:
        if tool is None:
            early_signals.append(number)
            return
        with suppress(ProcessLookupError, PermissionError):
            running = _find(tool.pid, lambda process: _runs(process, program))
            os.kill(running or _find_exec_successor(tool.pid), number)

    with contextlib.ExitStack() as handlers:
        for signal_number in _signals_to_forward():
            handlers.enter_context(handling(signal_number, forward))
        tool = subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
        for number in early_signals:
            forward(number)
        code = tool.wait()
    return code if code >= 0 else 128 - code


def _signals_to_forward() -> list[int]:
    """Return the signals that this thread can handle, without those that are ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _find(root: int, wanted: Callable[[int], bool]) -> int | None:
    """Return the first process for which ``wanted`` is true, out of ``root`` and its descendants."""
    level = [root]
    while level:
        for process in level:
            if wanted(process):
                return process
        level = [child for process in level for child in _children(process)]
    return None


def _find_exec_successor(root: int) -> int:
    """Return the first process that is not the tool's: the program after it called ``exec``."""
    home = _program_folder(root)
    return (home and _find(root, lambda process: _program_folder(process) not in (home, None))) or root


def _program_folder(process: int) -> Path | None:
    """Return the folder of the program that a process runs."""
    with suppress(OSError):
        return Path(f"/proc/{process}/exe").readlink().parent
    return None


def _runs(process: int, program: Sequence[str]) -> bool:
    """Return whether a process runs ``program``, directly or by the interpreter of a script."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    except OSError:
        return False
    more = len(words) - len(program)
    if more not in (0, 1):
        return False
    return words[more + 1 :] == list(program[1:]) and Path(words[more]).name == Path(program[0]).name


def _children(process: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children


def print_outcome(vendor: Vendor, request: LaunchRequest, report: Path, manifest: int, code: int) -> None:
    """Print a summary of the reports on standard error or, if there are none, the reason.

    Args:
        vendor: the profiler.
        request: the program that ran.
        report: the path of the reports without the suffix that the tool adds.
        manifest: the size of the manifest before the run.
        code: the program's exit code.
    """
    text = io.StringIO()  # standard error may be closed or full
    console = Console(file=text, width=Console(stderr=True).width)
    with guard.contained("reading the report"):
        reports = vendor.reports(report)
        if reports:
            _print_reports(vendor, reports, rank_from_name(report), console)
        else:
            reason = missing_report_reason(request, list(entries_of(request.out, manifest)), code)
            print_line(console, f"instrument: {vendor.title} wrote no report: {reason}")
    with suppress(OSError, ValueError, AttributeError):  # closed, broken or missing
        stderr.write(text.getvalue(), sys.stderr)


def _print_reports(vendor: Vendor, reports: Sequence[Path], rank: int | None, console: Console) -> None:
    for path in reports:
        print_line(console, f"instrument: {vendor.title} wrote {path}")
    if not settings.summary or rank:  # only the first of ranks that were each launched this way
        return
    try:
        vendor.show(reports, console)
    except Exception as error:  # a truncated report, a tool that fails to export it: the run itself succeeded
        print_line(console, f"instrument: the report cannot be summarized: {error}")


def missing_report_reason(request: LaunchRequest, windows: Sequence[dict[str, Any]], code: int) -> str:
    """Return the likely reason for a missing report, and how to fix it.

    Args:
        request: the program that ran.
        windows: the outcome of each window, as in the manifest.
        code: the program's exit code.
    """
    ended = f"the program ended with exit code {code}"
    if request.windows == 0:
        return f"{ended}; see the profiler's messages above" if code else "see its messages above"
    if any(window.get("status") in ("recorded", "partial") for window in windows):
        return "a window opened, but was not recorded; see its messages above, and run it again"
    if windows:
        first = windows[0]
        span = "-".join(str(step) for step in dict.fromkeys(first.get("planned_steps", ())) if step is not None)
        fix = "; choose earlier steps" if first.get("status") == "not reached" else ""
        return f"window {first.get('window')} (steps {span}) was {first.get('status')}, {first.get('reason')}{fix}"
    if code:
        return f"{ended} before a window opened, or the profiler could not start it; see its messages above"
    return (
        "no window opened, because no steps were found: the program needs a supported framework, an optimizer "
        "or instrument.profile; or record the whole run: --steps all"
    )


__all__ = ["VENDORS", "LaunchRequest", "command_line", "launch"]

VENDORS: Mapping[str, Vendor] = {"nsys": Nsys(), "ncu": Ncu(), "rocprof": Rocprof(), "vtune": Vtune()}

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def command_line(profiler: str, request: LaunchRequest, tool: Tool | None = None) -> list[str]:
    """Return the command line for the installed version of a profiler.

    Args:
        profiler: a key of `VENDORS`.
        request: the program to run.
        tool: the installed profiler; by default the one on ``PATH``.

    Raises:
        LaunchError: the profiler or the program is not installed; the message says where to get the profiler.
        ValueError: ``profiler`` is unknown.
    """
    return _prepare(profiler, request, tool)[0]


def launch(profiler: str, request: LaunchRequest) -> int:
    """Run a program under a profiler, and print a summary of the reports on standard error.

    Signals go to the program. If the profiler wrote no report, the reason is printed.

    Returns:
        The program's exit code; 128 plus the number of the signal that ended it.

    Raises:
        LaunchError, ValueError: as for `command_line`.
    """
    command, report = _prepare(profiler, request, None)
    make_folder(request.out)
    manifest = size_of(request.out / NAME) or 0
    code = run_tool(command, {**request.environment, LAUNCHED: "1"}, request.command)
    print_outcome(VENDORS[profiler], request, report, manifest, code)
    return code


def _prepare(profiler: str, request: LaunchRequest, tool: Tool | None) -> tuple[list[str], Path]:
    """Return the command line, and the path of the report without the suffix that the tool adds."""
    if profiler not in VENDORS:
        raise ValueError(f'"profiler" must be one of {", ".join(VENDORS)}: {profiler!r}')
    vendor = VENDORS[profiler]
    tool = tool or find_tool(profiler)
    if tool is None:
        raise LaunchError(f"{vendor.title} is not installed or not on PATH; get it from {vendor.get}")
    if not request.command:
        raise LaunchError("no program to run")
    if shutil.which(request.command[0], path=request.environment.get("PATH")) is None:
        raise LaunchError(f"program not found: {request.command[0]}")
    report = _new_report_path(request, profiler)
    name = str(report).replace("%", vendor.percent)
    job = workers(request.command, request.environment) if vendor.rank is not None else None
    if job is None:
        return [*vendor.prefix(request, tool, name, workers=False), *request.command], report
    name += f"-rank{vendor.rank}"
    if job.restarts:
        name += f"-restart{vendor.rank}".replace("RANK", "TORCHELASTIC_RESTART_COUNT")
    return job.under(vendor.prefix(request, tool, name, workers=True)), report


def _new_report_path(request: LaunchRequest, profiler: str) -> Path:
    """Return the path of a new report without its suffix; no tool overwrites an existing one."""
    name = f"{profiler}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    given = (request.environment.get(variable, "") for variable in _RANKS)
    rank = next((f"-rank{rank}" for rank in given if rank.isdecimal()), "")
    number, report = 1, request.out.absolute() / f"{name}{rank}"
    while any(report.parent.glob(f"{glob.escape(report.name)}[!0-9]*")) or report.exists():
        number += 1
        report = request.out.absolute() / f"{name}-{number}{rank}"
    return report
