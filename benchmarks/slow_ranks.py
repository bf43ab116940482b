"""What comparing the ranks costs a step, and which slow ranks it names: eight ranks under DDP.

python benchmarks/slow_ranks.py [cost|named|quiet|store]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from measure import ROUNDS, verdict

import instrument
from instrument.record.slow_steps import rank_exchange
from instrument.record.slow_steps.rank_exchange import RankExchange
from instrument.record.slow_steps.rank_judging import RankJudge, RankTimes

sys.path.insert(0, str(Path(__file__).parent.parent))  # the training is a part of the tests

from tests.support import ddp_training

RANKS = 8
INTERVALS = 40  # of 100 steps, in a round of the costs
WORK_MS = 30.0  # of CPU, which a slow rank has to do in a step more than the others
INTERVAL = 1  # step; so short that a minute has hundreds
HELD = 5  # intervals for which a rank is slow
TRIALS = 100
QUIET = 1000  # intervals
WARM_UP = 20  # intervals
STORE_INTERVALS = 12

Phases = ("data", "forward", "backward", "optimizer")


def phases() -> None:
    """Run the regions of a step."""
    for phase in Phases:
        with instrument.annotate(phase):
            pass


def cost(rank: int) -> None:
    """Compare the CPU time of the loop's thread with that of a loop whose function does nothing, in turn."""
    modes: dict[str, Callable[[], Any]] = {
        "a function that does nothing": lambda: lambda _: None,
        "again": lambda: lambda _: None,
        "slow_ranks()": instrument.slow_ranks,
    }
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(ROUNDS + 1):  # the first round warms up
        for mode, function in modes.items():
            with instrument.black_box(slow=1e9, on_steps=function()) as box:
                box.step()
                for _ in range(INTERVALS):
                    began = time.thread_time_ns()
                    for _ in range(100):
                        phases()
                        box.step()
                    times[mode] += [(time.thread_time_ns() - began) / 100] if number else []
                    time.sleep(0.01)  # an interval takes seconds elsewhere; this lets the thread do its part
    if rank == 0:
        medians = {mode: statistics.median(each) for mode, each in times.items()}
        print(
            f"\nCPU time of a step with four empty phases, median of {ROUNDS * INTERVALS:,} intervals of 100 steps"
        )
        for mode, ns in medians.items():
            print(f"  {mode:30} {ns:8,.0f} ns")
        first, again, compared = medians.values()
        print(f"  the same twice: {max(first, again) / min(first, again):.3f} x")
        print(f"  slow_ranks() to nothing: {2 * compared / (first + again):.3f} x")
        verdict("comparing the ranks, a step", compared - (first + again) / 2, 1000, "ns")


def train(intervals: int, is_slow: Callable[[int], bool]) -> list[instrument.SlowRank]:
    """Train under DDP; return the slow ranks that were told."""
    told: list[instrument.SlowRank] = []

    def more_ms(step: int, phase: str) -> float:
        return WORK_MS if phase == "backward" and is_slow(step // INTERVAL) else 0.0

    every = instrument.every(INTERVAL, instrument.slow_ranks(told.append))
    ddp_training.train(intervals * INTERVAL, every, more_ms)
    return told


def named(rank: int) -> None:
    """Let a rank be slow in backward, another one every five intervals; count those that are named."""
    draw = random.Random(7)
    slow = [0]
    while len(slow) < TRIALS:
        slow.append(draw.choice([other for other in range(RANKS) if other != slow[-1]]))
    turns = {WARM_UP + turn * HELD + at: slow[turn] for turn in range(TRIALS) for at in range(HELD)}
    told = train(WARM_UP + TRIALS * HELD + 2, lambda interval: turns.get(interval) == rank)
    if rank == 0:
        right = {
            (each.step // INTERVAL - WARM_UP) // HELD
            for each in told
            if (turns.get(each.step // INTERVAL), "backward") == (each.rank, each.phase)
        }
        print(f"\nRanks that were slow for {HELD} intervals: {len(right)} of {TRIALS} named")
        verdict("slow ranks not named", TRIALS - len(right), 0, "")
        verdict("named wrongly or twice", len(told) - len(right), 0, "")


def quiet(rank: int) -> None:
    """Count the ranks that are named although none is slow."""
    told = train(QUIET, lambda _: False)
    if rank == 0:
        verdict(f"named in {QUIET:,} quiet intervals", len(told), 0, "")


def store(_: int) -> None:
    """Time the thread of rank 0 for an interval, with the keys of many ranks on a server of this process."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank_exchange.job_store = lambda prefix: dist.PrefixStore(prefix, server.clone())
    keys = rank_exchange.job_store(rank_exchange._PREFIX)
    for ranks in 64, 1024:
        for late in 0, 1:
            ms = statistics.median(thread_ms(keys, ranks, late))
            print(f"  an interval of {ranks:,} ranks, {late} of them half a second late: {ms:.2f} ms of CPU")


def thread_ms(keys: dist.Store, ranks: int, late: int) -> list[float]:
    """Return the CPU time of the thread between two intervals, of which it judges each."""
    times: list[float] = []
    judge = RankJudge(3)

    def on_interval(rows: dict[int, RankTimes]) -> None:
        judge.judge(rows)
        times.append(time.thread_time() * 1e3)

    exchange = RankExchange(0, ranks, on_interval)
    names = [str(rank) for rank in range(1, ranks)]
    sent: list[str] = []
    for step in range(STORE_INTERVALS):
        row = RankTimes(
            step, 1e8, {"wall": {"data": 1e6 / 3}, "cpu": dict.fromkeys(("other", *Phases[1:]), 1e8 / 3)}
        )
        sent = [json.dumps(row), *sent][:8]
        in_time, later = names[late:], names[:late]
        keys.multi_set(in_time, ["\n".join(sent)] * len(in_time))
        exchange.publish(row)
        time.sleep(0.5)
        keys.multi_set(later, ["\n".join(sent)] * late)
        time.sleep(0.5)
    exchange.end()
    return [end - begin for begin, end in pairwise(times)]


PARTS = {"cost": (cost, 2), "named": (named, RANKS), "quiet": (quiet, RANKS), "store": (store, 1)}


def work(rank: int, part: str, ranks: int) -> None:
    """Run a part on one rank."""
    torch.set_num_threads(1)
    instrument.configure(summary=False)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    PARTS[part][0](rank)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks of each part."""
    for part in sys.argv[1:] or PARTS:
        free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.port)}
        del free
        torch.multiprocessing.spawn(work, (part, PARTS[part][1]), nprocs=PARTS[part][1])


if __name__ == "__main__":
    main()
