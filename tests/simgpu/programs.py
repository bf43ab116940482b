"""Runs a program in a process of its own with the simulated GPU: for faults that last, and fresh starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(source: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run source text with settings of the simulated GPU, by their names in lower case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIMGPU_")}
    environment |= {f"SIMGPU_{name.upper()}": str(value) for name, value in settings.items()}
    environment |= {"SIMGPU": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def output(source: str, **settings: object) -> str:
    """Return what a program writes to stdout; AssertionError with its stderr if it fails."""
    done = run(source, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout
