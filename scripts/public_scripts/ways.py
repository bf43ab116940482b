"""The commands that run a script in each way, and the outcome of a run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .script import Script

TIME_LIMIT_S = 300
RECORDED = "instrument-recorded"  # outside of the checkout, so the script does not see it


@dataclass
class Outcome:
    """Output of one run and, under `instrument`, its windows, regions or report."""

    code: int
    out: str
    err: str
    seconds: float
    windows: list[dict[str, Any]] = field(default_factory=list)
    regions: set[str] = field(default_factory=set)
    report: dict[str, Any] | None = None


def middle(script: Script) -> tuple[int, int]:
    """Return the first and last of the three steps for `--steps`, which end with the last step but one."""
    return script.updates - 4, script.updates - 2


def commands(script: Script) -> dict[str, list[str]]:
    """Return the command line of each way, in the order of the runs."""
    program = [*script.launcher, script.file, *shlex.split(script.args)]
    plain = program if script.launcher else [sys.executable, *program]
    run = [sys.executable, "-m", "instrument", "run", "--out", f"{{base}}/{RECORDED}"]
    first, last = middle(script)
    found = {
        "plain": plain,
        "plain again": plain,
        "run": [*run, "--", *program],
        "run --steps A-B": [*run, "--steps", f"{first}-{last}", "--", *program],
        "run --steps all": [*run, "--steps", "all", "--", *program],
    }
    if not script.without_syncs:
        syncs = [sys.executable, "-m", "instrument", "syncs", "--json", script.file]
        found["syncs"] = [*syncs, "--", *shlex.split(f"{script.args} {script.gpu_args}")]
    return found


def _environment(script: Script) -> dict[str, str]:
    """Return an environment without a GPU, in which threads do not change the order of sums."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
    bin_folder = str(Path(sys.executable).parent)  # torchrun
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "HF_HUB_OFFLINE": "1"}
    return {**kept, "PATH": f"{bin_folder}{os.pathsep}{kept.get('PATH', '')}", **fixed, **script.env}


def _manifest(folder: Path) -> list[dict[str, Any]]:
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _regions(folder: Path) -> set[str]:
    """Return the names of the regions in all traces below `folder`, read without `instrument`."""
    names = set()
    for path in folder.glob("window-*/*.trace.json*"):
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
        names |= {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return names


def _execute(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run a command; return its exit code and output. All its processes are ended in any case."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, encoding="utf-8", errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            err = f"{err}\nstopped after {TIME_LIMIT_S} s"
        finally:
            _kill(process)
    return process.returncode, out, err


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(script: Script, way: str, checkout: Path, base: Path) -> Outcome:
    """Run `script` in a fresh copy of `checkout`, always at the same path."""
    root, recorded = base / "checkout", base / RECORDED
    for folder in (root, recorded):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout, root, symlinks=True)
    command = [part.replace("{base}", str(base)) for part in commands(script)[way]]
    began = time.perf_counter()
    code, out, err = _execute(command, root / script.folder, _environment(script))
    outcome = Outcome(code, out, err, time.perf_counter() - began)
    if way.startswith("run"):
        outcome.windows, outcome.regions = _manifest(recorded), _regions(recorded)
    elif way == "syncs":
        outcome.report, outcome.out = _report(outcome.out), outcome.err
    return outcome


def _report(printed: str) -> dict[str, Any] | None:
    """Return the report that `instrument syncs --json` printed, or None if it printed none."""
    try:
        return dict(json.loads(printed))
    except ValueError:
        return None
