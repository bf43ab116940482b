"""What a window and `detect_syncs` leave on a GPU: a loop of small kernels before and after them.

python benchmarks/attached.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import ROUNDS

import instrument

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCHES = 2000


def launch_ns() -> float:
    """Return the median time of a launch on the CPU in ns; the GPU is idle when a round begins."""
    small = torch.ones(16, device=DEVICE)
    times = []
    for _ in range(ROUNDS):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(LAUNCHES):
            small.add_(1)
        times.append((time.perf_counter_ns() - start) / LAUNCHES)
    return statistics.median(times)


def window(folder: str) -> None:
    """Record one window of a launch."""
    with instrument.profile(folder):
        torch.ones(16, device=DEVICE).add_(1)


def measure() -> None:
    """Print each median, and its ratio to the first."""
    launch_ns()  # warm-up
    with tempfile.TemporaryDirectory() as folder:
        before = launch_ns()
        rows = [("before", before)]
        for number in (1, 2):
            window(f"{folder}/{number}")
            rows.append((f"after window {number}", launch_ns()))
        with instrument.detect_syncs():
            torch.ones(16, device=DEVICE).sum().item()
        rows.append(("after detect_syncs", launch_ns()))
    for name, ns in rows:
        print(f"  {name:32} {ns:10,.0f} ns a launch {ns / before:7.2f} x before")


if __name__ == "__main__":
    if sys.argv[1:] == ["--one"]:
        measure()
        sys.exit()
    if DEVICE == "cpu":
        print("No GPU: these are calls of an operator on the CPU")
    for teardown in ("", "1"):
        print(f"\nTEARDOWN_CUPTI={teardown}", flush=True)
        environment = {**os.environ, "TEARDOWN_CUPTI": teardown, "INSTRUMENT_SUMMARY": "0"}
        subprocess.run([sys.executable, Path(__file__), "--one"], env=environment, check=True)
