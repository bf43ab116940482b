"""What ranks that may have to agree on a window add to a step of two ranks: triggers on, and no window.

python benchmarks/agreement.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from measure import ROUNDS, verdict

import instrument

RANKS = 2
STEPS = 200  # in a round of about a second, in which each rank asks the store twice
LEAST_NOISE = 1.02  # two series of the same steps may differ by chance less than usual

MODES = ("without", "without, again", "triggers on")


def work(rank: int, folder: str) -> None:
    """Time the steps of one rank; rank 0 prints the medians."""
    torch.set_num_threads(1)
    instrument.configure(summary=False)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    times: dict[str, list[int]] = {mode: [] for mode in MODES}
    for number in range(ROUNDS + 1):  # the first round warms up
        for mode in MODES:
            context, step = recorder(mode, f"{folder}/{number}")
            with context:
                found = steps(step)
            times[mode] += found if number else []
    if rank == 0:
        report({mode: statistics.median(each) for mode, each in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def recorder(mode: str, folder: str) -> tuple[AbstractContextManager[Any], Callable[[], None]]:
    """Return the context of a round, and what ends a step in it."""
    if mode != "triggers on":
        return nullcontext(), lambda: None
    profile = instrument.profile(folder, triggers="file")
    return profile, lambda: profile.step()


def steps(end_step: Callable[[], None]) -> list[int]:
    """Return the time of each step in ns: a matmul, and an all-reduce of its result."""
    x = torch.ones(400, 400)
    found = []
    for _ in range(STEPS):
        began = time.perf_counter_ns()
        y = x @ x
        dist.all_reduce(y)
        end_step()
        found.append(time.perf_counter_ns() - began)
    return found


def report(medians: dict[str, float]) -> None:
    """Print the medians, and the ratio to a step without triggers."""
    print(f"\nA step of {RANKS} ranks, median of {ROUNDS} rounds of {STEPS} steps")
    for mode, ns in medians.items():
        print(f"  {mode:16} {ns / 1e6:8.3f} ms")
    first, again, triggers = (medians[mode] for mode in MODES)
    noise = max(first, again) / min(first, again)
    print(f"  two series without triggers differ by {noise:.3f} x")
    verdict("triggers on, to without", 2 * triggers / (first + again), max(LEAST_NOISE, noise))


def main() -> None:
    """Start the ranks."""
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.port)}
    del free
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
