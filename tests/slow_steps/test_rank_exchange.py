"""Rank 0 gets the times of the ranks over a store that no rank waits for, and that keeps nothing afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from instrument.base.guard import guard
from instrument.record.slow_steps import rank_exchange
from instrument.record.slow_steps.rank_exchange import RankExchange
from instrument.record.slow_steps.rank_judging import RankTimes

from ..support.finishing import eventually

RANKS = 3


class Connection(torch.distributed.PrefixStore):
    """A connection to a store, which notes what is read."""

    reads: ClassVar[list[list[str]]] = []

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads.append(keys)
        return super().multi_get(keys)


class Job:
    """A store of one process, which can fail, and the ranks of a job on it."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self.fails = False
        self.intervals: list[dict[int, int]] = []  # the step of each rank that was there
        self.ranks: dict[int, RankExchange] = {}

    def connect(self, prefix: str) -> Any:
        if self.fails:
            raise ConnectionError("the store is gone")
        return Connection(prefix, self.store)

    def join(self, rank: int, size: int = RANKS) -> None:
        self.ranks[rank] = exchange = RankExchange(rank, size, self._interval)
        eventually(lambda: self.fails or exchange._store is not None, every_s=0.002)

    def _interval(self, ranks: dict[int, RankTimes]) -> None:
        self.intervals.append({rank: times.step for rank, times in ranks.items()})

    def publish(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].publish(RankTimes(step, 1e6, {"cpu": {"backward": 5e5 + rank}}))
            eventually(lambda rank=rank: rank == 0 or self.fails or self._last(rank) == step, every_s=0.002)

    def _last(self, rank: int) -> int:
        """Return the last step in the key of a rank; -1 without one."""
        store = self.connect(f"{rank_exchange._PREFIX}0/")
        lines = store.get(str(rank)).splitlines() if store.check([str(rank)]) else []
        return json.loads(lines[0])[0] if lines else -1

    def has(self, count: int) -> bool:
        return len(self.intervals) == count


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job()
    monkeypatch.setattr(rank_exchange, "job_store", job.connect)
    monkeypatch.setattr(rank_exchange, "_LOOK_S", 0.005)
    Connection.reads.clear()
    yield job
    for exchange in job.ranks.values():
        exchange.end()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_arrive_and_no_times_stay(job: Job, order: tuple[int, ...]) -> None:
    """Each rank has one key, however many intervals there are, and none afterwards."""
    for rank in range(RANKS):
        job.join(rank)
    for interval in range(20):
        job.publish(interval, 2, 1, 0)
        eventually(lambda count=interval + 1: job.has(count))
    assert [{0: step, 1: step, 2: step} for step in range(20)] == job.intervals
    assert job.store.num_keys() == RANKS - 1  # rank 0 needs none
    for rank in order:
        job.ranks[rank].end()
    assert job.store.num_keys() == 1  # that says that rank 0 has ended


def test_rank_0_does_not_wait_for_a_late_rank(job: Job) -> None:
    """Two intervals later it judges without it; what arrives then is compared with nothing."""
    for rank in range(RANKS):
        job.join(rank)
    for step in range(3):
        job.publish(step, 1, 0)
    eventually(lambda: job.has(3))
    assert [{0: step, 1: step} for step in range(3)] == job.intervals
    job.publish(1, 2)
    job.publish(3, 2, 1, 0)
    eventually(lambda: job.has(4))
    assert dict.fromkeys(range(RANKS), 3) == job.intervals[-1]


def test_a_rank_that_lags_behind(job: Job) -> None:
    """Only times of the same steps are compared: rank 0 waits up to seven intervals for its times."""
    for rank in range(2):
        job.join(rank, 2)
    job.publish(0, 1, 0)
    eventually(lambda: job.has(1))
    for half in range(1, 10):  # without collectives
        job.publish(2 * half - 1, 0)
        job.publish(2 * half, 0)
        eventually(lambda count=2 * half + 1: job.ranks[0]._intervals == count, every_s=0.002)
        job.publish(half, 1)
        eventually(lambda count=half + 1: len(job.intervals) >= count)
    job.publish(99, 1)
    eventually(lambda: job.has(19))
    assert [*({0: step, 1: step} for step in range(7)), {0: 7}] == job.intervals[:8]
    assert all(len(set(steps.values())) == 1 for steps in job.intervals)


def test_several_comparisons_in_one_job(job: Job) -> None:
    """As of two loops: each has its own times, though their steps have the same numbers."""
    told: dict[int, list[dict[int, float]]] = {1: [], 2: []}

    def note(loop: int, ranks: dict[int, RankTimes]) -> None:
        told[loop].append({rank: times.step_ns for rank, times in ranks.items()})

    loops = {
        loop: [RankExchange(rank, 2, lambda ranks, loop=loop: note(loop, ranks), loop) for rank in range(2)]
        for loop in told
    }
    eventually(lambda: all(each._store is not None for ranks in loops.values() for each in ranks))
    for rank in (1, 0):
        for loop, ranks in loops.items():
            ranks[rank].publish(RankTimes(5, 1e6 * loop, {}))
        time.sleep(0.05)
    eventually(lambda: all(told.values()))
    for ranks in loops.values():
        for each in reversed(ranks):
            each.end()
    assert {loop: [{0: 1e6 * loop, 1: 1e6 * loop}] for loop in (1, 2)} == told


def test_what_rank_0_reads(job: Job) -> None:
    """Only the keys of the ranks whose times are missing, and these less and less often."""
    for rank in range(RANKS):
        job.join(rank)
    job.publish(0, 1, 0)
    eventually(lambda: len(Connection.reads) >= 4)
    time.sleep(0.3)
    first, *others = Connection.reads
    assert ["1", "2"] == first
    assert all(keys == ["2"] for keys in others)
    assert len(others) < 12  # one in 10 ms would be 30
    job.publish(0, 2)
    job.publish(1, 1, 2, 0)
    eventually(lambda: job.has(2))
    assert [dict.fromkeys(range(RANKS), step) for step in range(2)] == job.intervals


def test_keys_that_are_missing(job: Job) -> None:
    """They are not read, as reading them would wait for them; the others are."""
    for rank in range(7):
        job.join(rank, 7)
    job.publish(0, *range(1, 7))
    for rank in (2, 5):
        job.connect(f"{rank_exchange._PREFIX}0/").delete_key(str(rank))
    job.publish(0, 0)
    eventually(lambda: len(Connection.reads) == 1)
    assert [["1", "3", "4", "6"]] == Connection.reads


def test_a_store_that_torch_cannot_clone(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before torch 2.7 no rank is compared, which rank 0 says once."""
    monkeypatch.setattr(rank_exchange, "job_store", lambda prefix: None)
    monkeypatch.setattr(rank_exchange, "_RETRY_S", 0.0)
    for rank in range(2):
        job.ranks[rank] = RankExchange(rank, 2, job._interval)
        for step in range(3):
            job.ranks[rank].publish(RankTimes(step, 1e6, {}))
        job.ranks[rank].end()
    assert 1 == len([record for record in caplog.records if "compares nothing" in record.getMessage()])


def test_a_rank_that_joins_late_and_one_that_dies(job: Job) -> None:
    """The one is there from its first interval on, the other no longer; its key goes with rank 0."""
    job.join(0)
    job.join(1)
    for step in range(3):
        job.publish(step, 1, 0)
    eventually(lambda: job.has(3))
    job.join(2)
    job.publish(3, 2)
    job.publish(3, 1, 0)
    eventually(lambda: job.has(4))
    assert {0, 1, 2} == set(job.intervals[-1])
    for step in range(4, 7):  # rank 1 is dead
        job.publish(step, 2, 0)
    eventually(lambda: job.has(7))
    assert {0: 6, 2: 6} == job.intervals[-1]
    job.ranks[2].end()
    job.ranks[0].end()
    assert job.store.num_keys() == 1


def test_a_store_that_fails(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is noted, nobody is disturbed, and the comparison goes on once the store is back."""
    monkeypatch.setattr(rank_exchange, "_RETRY_S", 0.0)
    failures = guard.failures[rank_exchange.FEATURE]
    job.fails = True
    for rank in range(2):
        job.join(rank, 2)
    job.publish(0, 1, 0)
    eventually(lambda: guard.failures[rank_exchange.FEATURE] >= failures + 4)  # at the start, and then
    job.fails = False
    job.publish(1, 1, 0)
    eventually(lambda: job.has(1))
    assert [{0: 1, 1: 1}] == job.intervals


def test_a_smaller_job_on_the_same_store(job: Job) -> None:
    """What the ranks of a larger job left, such as killed ones, is not read."""
    for rank in range(RANKS):
        job.join(rank)
    job.publish(100, 1, 2)
    killed, job.ranks = job.ranks, {}  # they delete nothing
    for rank in range(2):
        job.join(rank, 2)
    assert -1 == job._last(1)
    job.publish(7, 1, 0)
    eventually(lambda: job.has(1))
    assert [{0: 7, 1: 7}] == job.intervals
    for exchange in killed.values():
        exchange.end()
