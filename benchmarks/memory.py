"""The cost of reading a memory snapshot, all that is said of it, and its page: 3 MB and 100 MB.

Each is measured in a new process.

python benchmarks/memory.py
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import verdict

SIZES = {3_000_000: (1, 300), 100_000_000: (15, 600)}  # bytes: at most so many s of the CPU, and MB of memory
PAGE_SECONDS, PAGE_MEGABYTES = 3, 0.5  # at most, after the breakdown
STACKS, FRAMES, FILES = 1000, 25, 200
LIVE = 500  # allocations in use at a time


def frame(stack: int, depth: int) -> dict[str, Any]:
    """Return a frame as torch describes it; stacks share their outer frames by value, not as objects."""
    own = stack if depth < 5 else depth
    return {"name": f"forward_{own % 50}", "filename": f"/home/me/model_{own % FILES}.py", "line": own}


def write(path: Path, size: int) -> None:
    """Write a snapshot of about ``size`` bytes: events, each three for an allocation, and the blocks that stay."""
    stacks = [[frame(number, depth) for depth in range(FRAMES)] for number in range(STACKS)]
    data: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    events = data["device_traces"][0]
    part = size // 1000  # less than all
    while not path.exists() or path.stat().st_size < size:
        for number in range(len(events) // 3, len(events) // 3 + part // 3):
            for action, owner in (
                ("alloc", number),
                ("free_requested", number - LIVE),
                ("free_completed", number - LIVE),
            ):
                events.append(event(action, owner, stacks))
        path.write_bytes(pickle.dumps(data, 4))
        each = path.stat().st_size / len(events)
        part = max(int((size - path.stat().st_size) / each), 300)


def event(action: str, number: int, stacks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return an event of allocation ``number``."""
    return {
        "action": action, "addr": 1 << 40 | number % 4096 << 20, "size": 4096 * (1 + number % 997), "stream": 0,
        "time_us": 1_795_000_000_000_000 + number, "compile_context": "N/A", "user_metadata": "",
        "frames": [*stacks[number % STACKS]],  # as torch writes them: a list of its own, of shared frames
    }  # fmt: skip


def read(path: str) -> None:
    """Print the CPU seconds of what the command says and of the page; MB of the page and of the process."""
    import instrument
    from instrument.read.memory.snapshot import as_dict

    began = time.process_time()
    snapshot = instrument.read_memory(path)
    found = as_dict(snapshot, 0, limit_bytes=80_000_000_000)
    assert found["peak_bytes"] == sum(use["bytes"] for use in found["uses"])
    read = time.process_time()
    page = snapshot.to_html(f"{path}.html")
    made = time.process_time()
    status = Path("/proc/self/status").read_text().split()  # getrusage counts the process before, too
    memory = int(status[status.index("VmHWM:") + 1]) / 1000
    print(read - began, made - read, page.stat().st_size / 1e6, memory)


def main() -> None:
    """Print the figures of each size beside what they must reach."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.pickle")
        for size, (seconds, megabytes) in SIZES.items():
            path.unlink(missing_ok=True)
            write(path, size)
            command = [sys.executable, __file__, str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took, page, written, used = map(float, done.stdout.split())
            print(f"\nA memory snapshot of {path.stat().st_size / 1e6:.1f} MB")
            verdict("CPU time", took, seconds, "s")
            verdict("CPU time of the page", page, PAGE_SECONDS, "s")
            verdict("the page", written, PAGE_MEGABYTES, "MB")
            verdict("memory of the process", used, megabytes, "MB")


if __name__ == "__main__":
    read(sys.argv[1]) if len(sys.argv) > 1 else main()
