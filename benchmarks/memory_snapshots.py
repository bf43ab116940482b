"""How long a loop pauses while a memory snapshot is written, beside torch's way; what a region costs meanwhile.

python benchmarks/memory_snapshots.py [EVENTS] [ROUNDS]

The snapshots are made up, as there may be no GPU: what torch itself takes to make one is not measured here.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import medians, show

import instrument
from instrument.record.allocator_history.window_memory import RegionLog, SnapshotDump
from instrument.record.regions import dispatch

EVENTS = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
DEPTH = 30  # frames of a stack
FRAMES = [{"name": f"f{number}", "filename": f"/home/me/{number % 7}.py", "line": number} for number in range(400)]


def snapshot() -> dict[str, Any]:
    """Return a snapshot as torch makes it: each event has a list of its own, of frames that they share."""
    events = [
        {
            "action": "alloc", "addr": 2**46 + 512 * number, "size": 512 + number % 9999, "stream": 0,
            "time_us": 1_795_230_243_371_808 + number, "compile_context": "N/A", "user_metadata": "",
            "frames": [FRAMES[(7 * number + depth) % 400] for depth in range(DEPTH)],
        }
        for number in range(EVENTS)
    ]  # fmt: skip
    return {"segments": [], "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def longest_pause(write: Callable[[dict[str, Any], Path], Callable[[], bool]], folder: Path) -> tuple[float, int]:
    """Return the longest pause in s of a loop in which ``write`` begins to write a snapshot, and the file's size.

    ``write`` returns a function that says whether it goes on.
    """
    path, made = folder / "a.memory.pickle", [snapshot()]
    gc.freeze()
    last = time.perf_counter()
    pauses, goes_on = [], write(made.pop(), path)
    while True:
        now = time.perf_counter()
        pauses.append(now - last)
        last = now
        if not goes_on():
            return max(pauses), path.stat().st_size


def on_a_thread(made: dict[str, Any], path: Path) -> Callable[[], bool]:
    """Write as a window does."""
    dump = SnapshotDump(made, path, 10**12)
    del made
    dump.start()
    return dump._thread.is_alive


def as_torch(made: dict[str, Any], path: Path) -> Callable[[], bool]:
    """Write as `torch.cuda.memory._dump_snapshot` does."""
    with path.open("wb") as file:
        pickle.dump(made, file)
    return lambda: False


def region() -> None:
    """Run an empty region."""
    with instrument.annotate("region"):
        pass


if __name__ == "__main__":
    print(f"{EVENTS:,} events, stacks of {DEPTH} frames, {ROUNDS} rounds: the longest pause of the loop, medians")
    for write in (as_torch, on_a_thread):
        with tempfile.TemporaryDirectory() as folder:
            found = [longest_pause(write, Path(folder)) for _ in range(ROUNDS)]
        print(f"  {write.__name__:20} {1e3 * statistics.median(pause for pause, _ in found):8.1f} ms", end="")
        print(f"  {found[0][1] / 1e6:.1f} MB")
    times = medians({"idle": region}, 1000)
    log = RegionLog()
    dispatch.active.add(log)
    times |= medians({"noted for a snapshot": region}, 1000)
    dispatch.active.remove(log)
    show("An empty region", times, "idle")
