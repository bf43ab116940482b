"""What a window costs the steps after it, and the memory of many windows.

python benchmarks/windows.py [EVENTS] [WINDOWS]

`benchmarks/stalls.py` measures what the end of a window costs the loop.
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
from measure import verdict

import instrument

EVENTS = int(sys.argv[1]) if len(sys.argv) > 1 else 400_000
WINDOWS = int(sys.argv[2]) if len(sys.argv) > 2 else 2500


def work(calls: int) -> float:
    """Call small operators, and return how long it took in s."""
    start = time.perf_counter()
    for _ in range(calls):
        torch.ones(2)
    return time.perf_counter() - start


def steps_after(out: str) -> None:
    """Compare the steps after a window with the median step."""
    times = []
    with instrument.profile(out, schedule=instrument.schedule(at=5)) as prof:
        for number in range(25):
            times.append(work(EVENTS // 3 if number == 5 else 40_000))
            start = time.perf_counter()
            prof.step()
            if number == 5:
                stop = time.perf_counter() - start
    median = statistics.median(times[:5] + times[20:])
    print(f"\nA window of {EVENTS:,} events; the median step takes {median:.3f} s")
    print(f"        torch's stop and export in the loop: {stop:.2f} s")
    verdict("the step after it", times[6] / median, 1.5, "x the median step")
    verdict("the ten steps after it", sum(times[6:16]) / 10 / median, 1.5, "x the median step")


def resident(process: int) -> float:
    """Return the memory of a process in MB."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def members(group: int) -> list[int]:
    """Return the processes of a process group."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if _group(entry.name) == group]


def _group(process: str) -> int | None:
    try:
        return os.getpgid(int(process))
    except (ValueError, OSError):  # not a process, or gone
        return None


def memory(out: str) -> None:
    """Compare the memory after many windows with that after a tenth of them, and with torch's profiler alone."""
    seen = []
    with instrument.profile(out, schedule=instrument.schedule(active=1, repeat=0)) as prof:
        for number in range(1, WINDOWS + 1):
            work(1)
            prof.step()
            while len(prof._sender._jobs) > 20:  # windows of a real loop do not follow each other so closely
                time.sleep(0.01)
            if number in (WINDOWS // 10, WINDOWS):
                finishing = members(prof._sender._process._group)
                seen.append((resident(os.getpid()), sum(map(resident, finishing))))
    print(f"\nFrom window {WINDOWS // 10:,} to {WINDOWS:,}")
    for name, before, after in zip(("training", "the finishing process"), *seen, strict=True):
        verdict(f"memory of {name}, {before:.0f} MB before", after / before, 1.05)
    alone = memory_with_torch(f"{out}/torch")
    growth = seen[1][0] / seen[0][0]
    verdict(f"growth of training to that with torch's profiler alone, {alone:.3f} x", growth / alone, 1.05)


def memory_with_torch(out: str) -> float:
    """Return the growth of memory with as many windows of torch's profiler alone, in a process of its own."""
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import windows; windows.torch_alone({out!r})"
    command = [sys.executable, "-c", code, str(EVENTS), str(WINDOWS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def torch_alone(out: str) -> None:
    """Print by how much memory grows from a tenth of the windows to all of them."""
    Path(out).mkdir(parents=True)
    seen = []
    for number in range(1, WINDOWS + 1):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
            work(1)
        prof.export_chrome_trace(f"{out}/trace.json")
        if number in (WINDOWS // 10, WINDOWS):
            seen.append(resident(os.getpid()))
    print(seen[1] / seen[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        memory(f"{folder}/memory")  # first: what a large window leaves would hide it
        steps_after(f"{folder}/stall")
