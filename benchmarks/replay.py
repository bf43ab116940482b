"""The cost of replaying a trace, of a diagnosis with replays, and of a comparison: ``make bench``.

A simulated loop has 130,000 events on the CPU and the GPU. INSTRUMENT_TRACES names a folder with the real trace of
56 MB. Times are medians; those of the diagnosis include reading the file.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the simulated machine is a part of the tests

import numpy as np
from measure import ROUNDS, verdict
from tests.replay.machine import Machine

from instrument.explain.comparison.comparison import compare
from instrument.explain.diagnosis.diagnose import diagnose
from instrument.explain.replay.replay import Change, Replayer
from instrument.read.jobs.read import read_trace

REAL = Path(os.environ.get("INSTRUMENT_TRACES", "build/traces")) / "tl_h100_owlv2.json.gz"


def once(work: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of a few calls."""
    return statistics.median(once(work) for _ in range(min(ROUNDS, 5)))


def ratio(work: Callable[[], object], other: Callable[[], object]) -> float:
    """Return the median ratio of the times of two calls that are made in turns."""
    return statistics.median(once(work) / once(other) for _ in range(2 * min(ROUNDS, 5) - 1))


def simulated() -> Machine:
    """Return a loop of ten steps with 6,500 launches each."""
    machine = Machine()
    for _ in range(10):
        with machine.step():
            for _ in range(6_500):
                machine.launch(8_000)
            machine.synchronize()
    return machine


def main() -> None:
    """Measure, and print whether the promises hold."""
    trace = simulated().trace()
    events = len(trace.gpu) + len(trace.runtime)
    change = Change(saved=np.full(len(trace.gpu), 0.5))
    replayer = Replayer(trace)
    build = seconds(lambda: Replayer(trace).errors)
    one = seconds(lambda: replayer.step_ns(change))
    print(f"{events:,} events: graph and first replay {build:.2f} s, another change {one:.2f} s")
    verdict("130,000 events replayed", build + one, 1, "s")
    if not REAL.exists():
        print("no real trace: make traces")
        return
    recorded = read_trace(REAL)
    bare, full = seconds(lambda: diagnose(recorded, what_if=False)), seconds(lambda: diagnose(recorded))
    whole = seconds(lambda: diagnose(REAL))
    print(f"diagnosis of 56 MB: {bare:.2f} s, with replays {full:.2f} s; with reading the file {whole:.2f} s")
    verdict("diagnosis of 56 MB with replays", whole, 2, "s")
    verdict("comparison / diagnosis", ratio(lambda: compare(REAL, REAL), lambda: diagnose(REAL)), 2)


if __name__ == "__main__":
    main()
