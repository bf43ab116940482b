"""Finds the vendors' profilers on this machine, and their versions."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

COMMANDS = {"nsys": "nsys", "ncu": "ncu", "rocprof": "rocprofv3", "vtune": "vtune"}
"""The program of each tool, by the name of the tool on the command line."""


@dataclass(frozen=True)
class Tool:
    """An installed profiler.

    Attributes:
        name: its name in `COMMANDS`.
        path: the path of its program.
        version: its version, such as (2022, 4, 2); empty if unknown.
    """

    name: str
    path: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{COMMANDS[self.name]} {'.'.join(map(str, self.version)) or 'of unknown version'}"


def help_of(tool: Tool, *words: str) -> str:
    """Return the help of ``tool``, or of its subcommand ``words``; empty if the tool fails."""
    try:
        done = subprocess.run(
            [tool.path, *words, "--help"], capture_output=True, text=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def find_tool(name: str) -> Tool | None:
    """Return the tool ``name`` of `COMMANDS` that is on ``PATH``; None if it is not installed."""
    path = shutil.which(COMMANDS[name])
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Tool(name, path, ())
    found = re.search(r"\d+\.\d+(\.\d+)*", done.stdout + done.stderr)
    return Tool(name, path, tuple(map(int, found[0].split("."))) if found else ())
