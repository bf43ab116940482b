"""Runs a small Python program in its own process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
# Variables of a profiler around the tests; a program gets only the tool that its test sets.
TOOL_VARIABLES = (
    "NVTX_", "NVTXLOG", "INTEL_", "ITTLOG", "ROCTXLOG", "NSYS_", "CUDA_INJECTION", "INSTRUMENT",
    "ROCP_", "ROCPROF_", "NV_TPS_", "NV_COMPUTE_",
)  # fmt: skip

# Messages of nsys 2022.4 when it fails by itself: once in some hundred runs, of two at a time once in ten.
NSYS_FAILED = (
    "Connection to the Agent lost", "Local Endpoint is not available", "ProcessWaiterImpl.cpp",
    "terminate called without an active exception", "\nEnd of file\n",
)  # fmt: skip
_NUMBERS = itertools.count()


class ToolFailed(AssertionError):
    """Nsight Systems itself failed; `tests.support.nsys.recorded` records again."""


def program(script: str | Path, folder: Path) -> Path:
    """Return the file to run: a `Path` itself, or a `str` as source text written into `folder`."""
    if isinstance(script, Path):
        return script.resolve()
    path = folder / "program.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return path


def shell_script(path: Path, text: str) -> Path:
    """Write an executable shell script, such as a stub of a tool."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without its tools, with the package importable, and with `extra`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(TOOL_VARIABLES)}
    paths = [str(ROOT / "src"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**env, **(extra or {})}


def run(
    command: Sequence[str | Path], env: Mapping[str, str], *, timeout: float = 300, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `command`; with `check`, a failure is an `AssertionError` that shows what it printed.

    After `timeout` seconds it is killed, and whatever it started. It prints into files: a pipe ends only with the
    last process that has it, such as an agent of nsys, which lives on for minutes.
    """
    mark = f"{os.getpid()}-{next(_NUMBERS)}"
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            ended = subprocess.run(
                [str(part) for part in command],
                env={**env, "STARTED_BY_TESTS": mark},
                stdout=stdout,
                stderr=stderr,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            _kill(f"STARTED_BY_TESTS={mark}".encode())
            raise
        done = subprocess.CompletedProcess(ended.args, ended.returncode, _text(stdout), _text(stderr))
    shown = f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    if any(text in shown for text in NSYS_FAILED):
        raise ToolFailed(shown)
    if check and done.returncode:
        raise AssertionError(f"{Path(command[0]).name} ended with {done.returncode}\n{shown}")
    return done


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    text = file.read().decode("utf-8", "backslashreplace")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as subprocess reads a pipe


def _kill(variable: bytes) -> None:
    """Kill the processes that have `variable` in their environment, such as agents that nsys leaves behind."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def python(script: Path, args: Sequence[str] = ()) -> list[str | Path]:
    """The command line that runs `script` under this interpreter."""
    return [sys.executable, script, *args]
