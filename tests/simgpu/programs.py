"""Runs a program in a process of its own with the simulated GPU: for faults that last, and fresh starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**settings: object) -> dict[str, str]:
    """Return the environment of a process with settings of the simulated GPU, by their names in lower case."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    kept |= {f"SIMGPU_{name.upper()}": str(value) for name, value in settings.items()}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return kept | {"SIMGPU": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(source: str, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run source text with arguments and settings."""
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    return subprocess.run(command, env=environment(**settings), capture_output=True, text=True, timeout=60)


def output(source: str, *arguments: str, **settings: object) -> str:
    """Return what a program writes to stdout; AssertionError with its stderr if it fails."""
    done = run(source, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout
