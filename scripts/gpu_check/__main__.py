"""Command line: ``python -m scripts.gpu_check [CHECK...] [--rehearse] [--out FILE]``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import costs, driver, edges, lengths, regions, runner, table, tools, windows
from .check import KEEP, ROOT, Check, CheckContext
from .runner import Result, Stop, in_child, run

CHECKS = [  # by value; of those that run concurrently, the longest is first
    Check("graph", edges.graph, 75),
    Check("fork", driver.fork, 60),
    Check("environment", driver.environment, 45),
    Check("detector", edges.detector, 45),
    Check("untouched", driver.untouched, 45),
    Check("regions", regions.tree, 45),
    Check("lanes", regions.lanes, 45),
    Check("handles", regions.handles, 45),
    Check("lengths", lengths.ahead, 30, alone=True),
    Check("launches", costs.launches, 30, alone=True),
    Check("checkpointing", costs.checkpointing, 60, alone=True),
    Check("compiled", costs.compiled, 60, alone=True),
    Check("windows", windows.first, 30),
    Check("terminated", windows.terminated, 60, alone=True),
    Check("region", costs.region, 30, alone=True),
    Check("stall", windows.stall, 30, alone=True),
    Check("growth", windows.growth, 45, alone=True),
    Check("doctor", tools.doctor, 45, alone=True),
    Check("nsys", tools.nsys, 60, alone=True),
    Check("ncu", tools.ncu, 75, alone=True),
    Check("tests-alone", tools.tests_alone, 120, alone=True),
    Check("tests", tools.tests, 120, alone=True),  # last, with all of the time left
]
NEEDED = ("torch", "numpy", "msgspec", "wrapt", "rich", "structlog", "typer")
USED = {
    "nvtx": "ranges for ncu and nsys",
    "pytest": "the tests",
    "hypothesis": "the tests",
    "xdist": "tests at once",
}
TOTAL_S = 570
LAST_S = 10  # to end running checks and write the results
EPILOG = f"""\
It ends in under ten minutes: each check runs in a process of its own with a time limit, and what the
time did not suffice for is named. Ctrl-C and SIGTERM end it with the results so far. Exit code: 0 where no check
failed, 1 where one did or was not run, 2 without a GPU or a package, 128 + N after signal N.

Where the --limit is too small for all, each check gets a smaller part of the time that it may take; one for which
less than {runner.LEAST_S} s are left is not run. Of the limit, {LAST_S} s are for ending what still runs and for
writing the results.

The table at the end has what each check found and, in brackets, what is expected: in "after a window 1.224 ms
(1.02 x, expected at most 1.05 x "before")" the ratio is to the time called "before". The results are written to
build/gpu-check.json (--out) as well, and small traces, gzipped, to the folder that INSTRUMENT_KEEP_TRACES names.

It needs torch, numpy, msgspec, wrapt, rich, structlog and typer; nvtx, pytest, hypothesis, pytest-xdist, Nsight
Systems and Nsight Compute where they are. Nothing has to be installed from this folder.

examples:
  python -m scripts.gpu_check                        all checks
  python -m scripts.gpu_check graph regions          two of them
  python -m scripts.gpu_check --rehearse             without a GPU, on the CPU: figures mean nothing
  INSTRUMENT_KEEP_TRACES=out python -m scripts.gpu_check --out out/results.json
"""


def machine(device: str) -> dict[str, str]:
    """Return the versions and the GPU, found in a child process so that this one does not initialize CUDA."""
    code = (
        "import json, platform, torch; "
        f"gpu = torch.cuda.get_device_name(0) if {device!r} == 'cuda' and torch.cuda.is_available() else ''; "
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'gpu': gpu}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line; exit with an error if one is wrong."""
    names = [check.name for check in CHECKS]
    least_s = LAST_S + runner.LEAST_S
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(names)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU; figures mean nothing")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-check.json", metavar="FILE",
        help="the results as JSON (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=TOTAL_S, metavar="S",
        help=f"seconds for everything, at least {least_s} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.checks) - set(names))
    if unknown:
        parser.error(f"unknown checks {', '.join(unknown)}; known are {', '.join(names)}")
    if args.child is not None and len(args.checks) != 1:
        parser.error(f"--child runs one check: {' '.join(args.checks) or 'none is named'}")
    if args.child is None and args.limit < least_s:
        parser.error(f"--limit must be at least {least_s}, so that a check can run: {args.limit:g}")
    if args.out.exists() and not args.out.is_file():
        parser.error(f"--out must be a regular file: {args.out}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, report each result, and print the table; return the exit code that ``--help`` explains."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks what only a GPU can show of this library, and prints a table of what it found.",
    )  # fmt: skip
    began = time.monotonic()
    args = parse_arguments(parser, arguments)
    if args.child is not None:
        (check,) = (check for check in CHECKS if check.name == args.checks[0])
        in_child(check, CheckContext(args.child, args.device, args.limit))
        return 0
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"not installed: {', '.join(absent)}", file=sys.stderr)
        return 2
    if os.environ.get(KEEP):
        os.environ[KEEP] = str(Path(os.environ[KEEP]).absolute())  # checks run in their own folders
    device = "cpu" if args.rehearse else "cuda"
    try:
        found = machine(device)
    except subprocess.SubprocessError as error:
        print(f"torch cannot be used: {getattr(error, 'stderr', '') or error}", file=sys.stderr)
        return 2
    if device == "cuda" and not found["gpu"]:
        print("torch can use no GPU here; --rehearse runs the checks on the CPU", file=sys.stderr)
        return 2
    print(f"{found['gpu'] or 'no GPU'}, torch {found['torch']}, Python {found['python']}", flush=True)
    for name, use in USED.items():
        if importlib.util.find_spec(name) is None:
            print(f"not installed: {name} ({use})", flush=True)
    print(_traces_notice(args.rehearse), flush=True)
    chosen = [check for check in CHECKS if not args.checks or check.name in args.checks]
    results: dict[str, Result] = {}
    about: dict[str, Any] = found | {"rehearsal": args.rehearse, "checks": results}
    try:
        table.write(args.out, about)
    except OSError as error:
        print(f"--out cannot be written: {error}", file=sys.stderr)
        return 2

    def note(name: str, result: Result) -> None:
        results[name] = result
        table.write(args.out, about)
        _print(f"{len(results):2}/{len(chosen)} {table.heading(name, result)}")

    with Stop() as stop:
        run(chosen, device, began + args.limit - LAST_S, stop, note)
    width = shutil.get_terminal_size((120, 24)).columns
    _print(f"\n{table.HEADER}")
    for check in chosen:
        _print(table.row(check.name, results[check.name], width))
    if args.rehearse:
        _print("This was a rehearsal on the CPU: it proves nothing about a GPU, and its figures mean nothing.")
    _print(f"{table.counts(results)} in {time.monotonic() - began:.0f} s; results in {args.out}")
    if stop.number:
        return 128 + stop.number
    return int(any(result["status"] not in ("passed", "skipped") for result in results.values()))


def _traces_notice(rehearsal: bool) -> str:
    """Return a sentence that says whether and where traces are kept."""
    if rehearsal:
        return "traces are not kept: this is a rehearsal"
    folder = os.environ.get(KEEP)
    return f"small traces are kept in {folder}" if folder else f"traces are not kept: {KEEP} names no folder"


def _print(text: str) -> None:
    """Print; ignore a closed output, as after a hang-up: the file still has the results."""
    with suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
