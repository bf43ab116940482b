"""Command line: ``python -m scripts.gpu_check [CHECK...] [--rehearse] [--out FILE]``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import costs, driver, edges, lengths, regions, tools
from .check import KEEP, LOG, ROOT, Check, FailedError, Given, SkippedError

CHECKS = [
    Check("environment", driver.environment, 60),
    Check("fork", driver.fork, 90),
    Check("untouched", driver.untouched, 60),
    Check("detector", edges.detector, 60),
    Check("graph", edges.graph, 150),
    Check("regions", regions.tree, 60),
    Check("lanes", regions.lanes, 90),
    Check("handles", regions.handles, 60),
    Check("lengths", lengths.ahead, 60, alone=True),
    Check("launches", costs.launches, 60, alone=True),
    Check("checkpointing", costs.checkpointing, 90, alone=True),
    Check("compiled", costs.compiled, 90, alone=True),
    Check("doctor", tools.doctor, 100, alone=True),
    Check("ncu", tools.ncu, 120, alone=True),
    Check("nsys", tools.nsys, 120, alone=True),
    Check("tests", tools.tests, 420, alone=True),  # what is left of the time
]
MODULE = ["-m", "scripts.gpu_check"]
_RESULT = "result.json"
_LEAST_S = 10
Result = dict[str, Any]


def child(check: Check, given: Given) -> None:
    """Run ``check`` in this process and write down how it ended."""
    try:
        result: Result = {"status": "passed", "figures": check.run(given)}
    except SkippedError as error:
        result = {"status": "skipped", "reason": str(error)}
    except FailedError as error:
        result = {"status": "failed", "reason": str(error)}
    except Exception as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    (given.folder / _RESULT).write_text(json.dumps(result, default=str))


def run(check: Check, device: str, limit_s: float) -> Result:
    """Run ``check`` in a child for at most ``limit_s`` and return how it ended."""
    if limit_s < _LEAST_S:
        return {"status": "not run", "reason": "the time was over", "seconds": 0.0}
    limit_s = min(limit_s, check.limit_s)
    with tempfile.TemporaryDirectory(prefix=f"gpu-check-{check.name}-", ignore_cleanup_errors=True) as name:
        command = [sys.executable, *MODULE, check.name, "--child", name, "--device", device]
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        began = time.monotonic()
        log = Path(name) / LOG
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=name, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        result = Path(name) / _RESULT
        if result.exists():
            ended: Result = json.loads(result.read_text())
        else:
            how = f"did not end in {limit_s:.0f} s" if code is None else f"ended with code {code}"
            ended = {"status": "failed", "reason": f"{how}: {log.read_text(errors='replace')[-1500:]}"}
        return ended | {"seconds": round(time.monotonic() - began, 1)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what the check started as well, which is in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def line(name: str, result: Result) -> str:
    """Return the line of the table."""
    figures = ", ".join(f"{key} {value}" for key, value in result.get("figures", {}).items())
    return f"{name:14} {result['status']:8} {result['seconds']:6.1f} s  {result.get('reason') or figures}"


def machine(device: str) -> dict[str, str]:
    """Return what the checks run on, found out in a child: this process is to initialize nothing."""
    code = (
        "import json, platform, torch; "
        f"gpu = torch.cuda.get_device_name(0) if {device!r} == 'cuda' and torch.cuda.is_available() else ''; "
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'gpu': gpu}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the table; 0 where none failed, 1 where one did, 2 without a GPU."""
    by_name = {check.name: check for check in CHECKS}
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(by_name)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU; figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.json", help="the results as JSON")
    parser.add_argument("--limit", type=float, default=570, metavar="S", help="for everything (default 570)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.checks) - set(by_name))
    if unknown:
        parser.error(f"unknown checks {', '.join(unknown)}; known are {', '.join(by_name)}")
    if args.out.exists() and not args.out.is_file():
        parser.error(f"--out must be a regular file: {args.out}")
    if args.child is not None:
        child(by_name[args.checks[0]], Given(args.child, args.device))
        return 0
    if os.environ.get(KEEP):
        os.environ[KEEP] = str(Path(os.environ[KEEP]).absolute())  # checks run in folders of their own
    device = "cpu" if args.rehearse else "cuda"
    began, found = time.monotonic(), machine(device)
    if device == "cuda" and not found["gpu"]:
        print("torch can use no GPU here; --rehearse runs the checks on the CPU", file=sys.stderr)
        return 2
    print(f"{found['gpu'] or 'no GPU'}, torch {found['torch']}, Python {found['python']}", flush=True)
    chosen = [check for check in CHECKS if check.name in (args.checks or by_name)]
    results: dict[str, Result] = {}

    def one(check: Check) -> Result:
        return run(check, device, args.limit - (time.monotonic() - began))

    def note(name: str, result: Result) -> None:
        results[name] = result
        print(line(name, result), flush=True)
        _write(args.out, found | {"rehearsal": args.rehearse, "checks": results})

    with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2))) as pool:
        running = {pool.submit(one, check): check.name for check in chosen if not check.alone}
        for ended in as_completed(running):
            note(running[ended], ended.result())
    for check in chosen:
        if check.alone:
            note(check.name, one(check))
    if args.rehearse:
        print("A rehearsal: of a GPU nothing is proved, and figures mean nothing.")
    print(f"{time.monotonic() - began:.0f} s; results in {args.out}")
    return int(any(result["status"] not in ("passed", "skipped") for result in results.values()))


def _write(path: Path, results: dict[str, Any]) -> None:
    """Write what is known so far, so that a run that is cut short leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(results, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
