"""Finds the process that finishes the windows of a training process, of which it is not a child."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from instrument.record.handover.finishing_process import FinishingProcess

# On a busy machine, the finishing process would get no turn in the time that ranks have for each other.
NORMAL_PRIORITY = """
from instrument.record.handover import finishing_process
finishing_process._NICER_BY = 0
"""


# With the folder of its run, each process that this process has started.
started = weakref.WeakKeyDictionary[FinishingProcess, Path]()


def unfinished() -> list[FinishingProcess]:
    """Return the finishing processes of this process that have not ended."""
    return [process for process in started if process.ended is None]


def processes(training: int) -> dict[int, list[str]]:
    """Return the command lines, by process id, of all finishing processes that the training process started."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):  # not a process, or it has ended
            line = Path(f"/proc/{int(entry.name)}/cmdline").read_text(errors="replace").split("\0")
            if any("finish.main import main\nmain(" in part and f", {training})\n" in part for part in line):
                found[int(entry.name)] = line
    return found


def finishing_pid(training: int | None = None) -> int:
    """Return the Python process among the finishing processes, once it runs.

    By default, that of this process, which `started` has.
    """
    found: dict[int, list[str]] = {}

    def one() -> bool:
        lines = processes(training or os.getpid())
        found.clear()
        found.update({number: line for number, line in lines.items() if line[0] != "/bin/sh"})
        if training is None:  # without those of earlier tests, which may still be about to exit
            folders = {f"{started[each].absolute()}/." for each in unfinished()}
            for number in [each for each, line in found.items() if not any(map("".join(line).count, folders))]:
                del found[number]
        return len(found) == 1

    try:
        eventually(one)
    except AssertionError as error:
        raise AssertionError(f"not one finishing process but {found}") from error
    return next(iter(found))


def eventually(check: Callable[[], bool], every_s: float = 0.05) -> None:
    """Wait until ``check()`` is true, which is called again after ``every_s``."""
    for _ in range(int(30 / every_s)):  # longer where the check takes time
        if check():
            return
        time.sleep(every_s)
    raise AssertionError("not within 30 s")
