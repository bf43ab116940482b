"""Finds the process that finishes the windows of a training process, which is not a child of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# For a program whose end is to be noticed sooner than after 5 s.
LOOKS_OFTEN = """
from instrument.windows import process
line = "exec_module(package)\\n"
more = "import instrument.windows.finalizer_main as at; at._LOOK_S = 0.2\\n"
process._CODE = process._CODE.replace(line, line + more)
"""


def processes(training: int) -> dict[int, list[str]]:
    """The command lines, by number, of all that the training process started to finish windows."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):  # not a process, or gone
            line = Path(f"/proc/{int(entry.name)}/cmdline").read_text(errors="replace").split("\0")
            if any(f"instrument.windows.finalizer_main import main\nmain({training})\n" in part for part in line):
                found[int(entry.name)] = line
    return found


def finalizer(training: int | None = None) -> int:
    """The Python process among them, once it runs; of this process if none is given."""
    running: list[int] = []

    def found() -> bool:
        lines = processes(training or os.getpid()).items()
        running[:] = [number for number, line in lines if line[0] != "/bin/sh"]
        return len(running) == 1

    eventually(found)
    return running[0]


def eventually(check: Callable[[], bool]) -> None:
    """Wait until ``check()`` is true."""
    for _ in range(600):
        if check():
            return
        time.sleep(0.05)
    raise AssertionError("not within 30 s")
