"""Runs a small Python program in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What a profiler around the tests would set; a program gets only the tool that its test gives it.
TOOL_VARIABLES = (
    "NVTX_", "NVTXLOG", "INTEL_", "ITTLOG", "ROCTXLOG", "NSYS_", "CUDA_INJECTION", "INSTRUMENT",
    "ROCP_", "ROCPROF_", "NV_TPS_", "NV_COMPUTE_",
)  # fmt: skip


def program(script: str | Path, folder: Path) -> Path:
    """The file to run: a `Path` as it is, a `str` as source text written into `folder`."""
    if isinstance(script, Path):
        return script.resolve()
    path = folder / "program.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    return path


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its tools, with the package importable, and with `extra`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(TOOL_VARIABLES)}
    paths = [str(ROOT / "src"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**env, **(extra or {})}


def run(
    command: Sequence[str | Path], env: Mapping[str, str], *, timeout: float = 300, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `command`; with `check`, a failure is an `AssertionError` that shows what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        env=env,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=timeout,
    )
    if check and done.returncode:
        shown = f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        raise AssertionError(f"{Path(command[0]).name} ended with {done.returncode}\n{shown}")
    return done


def python(script: Path, args: Sequence[str] = ()) -> list[str | Path]:
    """The command line that runs `script` under this interpreter."""
    return [sys.executable, script, *args]
