"""Which profilers of the vendors are on this machine, and in which version."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

COMMANDS = {"nsys": "nsys", "ncu": "ncu", "rocprof": "rocprofv3", "vtune": "vtune"}
"""The tools by the name that the command line has for them."""


@dataclass(frozen=True)
class Tool:
    """A profiler that can be run.

    Attributes:
        name: as in `COMMANDS`.
        path: of its program.
        version: as far as it told, such as (2022, 4, 2); empty if it did not.
    """

    name: str
    path: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{COMMANDS[self.name]} {'.'.join(map(str, self.version)) or 'of unknown version'}"


def help_of(tool: Tool, *words: str) -> str:
    """Return what ``tool`` prints of its options, or of those of a subcommand; empty where it fails."""
    try:
        done = subprocess.run(
            [tool.path, *words, "--help"], capture_output=True, text=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def find(name: str) -> Tool | None:
    """Return the tool called ``name`` in `COMMANDS`, as ``PATH`` has it; None where it is not installed."""
    path = shutil.which(COMMANDS[name])
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Tool(name, path, ())
    found = re.search(r"\d+\.\d+(\.\d+)*", done.stdout + done.stderr)
    return Tool(name, path, tuple(map(int, found[0].split("."))) if found else ())
