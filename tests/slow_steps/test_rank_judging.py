"""A rank is named if it works longer than the other ranks, or than it did compared with them; others are not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from instrument.record.slow_steps.rank_judging import RankJudge, RankTimes, SlowRank

MS = 1e6
STEP = 12.0
USUAL = {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}
WARM = 24  # intervals, after which a rank's past counts

Change = Callable[[int, int, str], float]  # ms more, by interval, rank and phase


def judged(
    ranks: int, intervals: int, change: Change, *, noise: float = 0.02, signal: str = "cpu", patience: int = 3
) -> tuple[list[tuple[int, SlowRank]], list[tuple[int, SlowRank]]]:
    """Return the slow ranks told, and those that no longer are, each with its interval."""
    draw, judge = random.Random(ranks), RankJudge(patience)
    told: list[tuple[int, SlowRank]] = []
    over: list[tuple[int, SlowRank]] = []
    for interval in range(intervals):
        rows = {}
        for rank in range(ranks):
            work = {
                phase: (ms * draw.lognormvariate(0, noise) + change(interval, rank, phase)) * MS
                for phase, ms in USUAL.items()
            }
            rows[rank] = RankTimes(interval, STEP * MS, {signal: work})
        new, ended = judge.judge(rows)
        told += [(interval, slow) for slow in new]
        over += [(interval, slow) for slow in ended]
    return told, over


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_no_false_alarm(ranks: int) -> None:
    """Ranks that do the same work are not named, whatever the noise; nor are all that get slower at once."""
    for noise in (0.02, 0.2):
        intervals = 1000 if ranks < 64 else 50
        assert ([], []) == judged(ranks, intervals, lambda *_: 0.0, noise=noise)
    assert ([], []) == judged(ranks, 60, lambda interval, *_: 10.0 * (interval > 30))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_rank_that_becomes_slow(ranks: int) -> None:
    """It is named with its phase in the third interval, once, and later is no longer slow."""
    slow = ranks - 1

    def change(interval: int, rank: int, phase: str) -> float:
        return 2.0 if (rank, phase) == (slow, "backward") and 30 <= interval < 50 else 0.0

    told, over = judged(ranks, 70, change)
    assert [(32, slow, "backward")] == [(interval, each.rank, each.phase) for interval, each in told]
    assert "the other ranks and its own past" == told[0][1].against
    assert 2.0 * MS == pytest.approx(told[0][1].excess_ns, rel=0.2)
    assert [52] == [interval for interval, _ in over]


def test_a_rank_that_is_slow_from_the_start() -> None:
    """It has no better past: the other ranks show it."""
    told, _ = judged(4, 12, lambda _, rank, phase: 3.0 * ((rank, phase) == (2, "forward")))
    assert [(2, "forward", "the other ranks")] == [(each.rank, each.phase, each.against) for _, each in told]


def test_ranks_with_different_work() -> None:
    """Stages of a pipeline differ all the time; the one that grows is named against its own past."""

    def change(interval: int, rank: int, phase: str) -> float:
        stage = 4.0 * rank if phase == "backward" else 0.0
        return stage + 2.0 * ((rank, phase) == (0, "backward") and interval >= WARM + 4)

    told, _ = judged(4, WARM + 12, change)
    assert [("backward", "its own past")] == [(each.phase, each.against) for _, each in told if each.rank == 0]


def test_a_rank_that_becomes_faster() -> None:
    """The other, which works as before, is now the slow one, but not compared with its past."""
    told, _ = judged(2, 60, lambda interval, rank, _: -0.9 * (rank == 1 and interval >= 30))
    assert {(0, "the other ranks")} == {(each.rank, each.against) for _, each in told}


def test_what_is_small_or_rare_is_not_named() -> None:
    """Less than 5 % of a step is not worth a message; two intervals in a row may be chance."""
    assert [] == judged(4, 60, lambda _, rank, phase: 0.3 * ((rank, phase) == (1, "forward")))[0]
    assert [] == judged(4, 90, lambda interval, rank, phase: 5.0 * (rank == 1 and interval % 3 != 0))[0]


def test_missing_ranks_and_signals() -> None:
    """Ranks come and go; a slow one keeps its state meanwhile. One rank alone is compared with nobody."""
    judge, told = RankJudge(3), []
    for interval in range(40):
        there = {0, 1, 2} if interval != 31 else {0, 2}  # 1 is late once
        if interval > 35:
            there = {0}
        rows = {
            rank: RankTimes(
                interval, STEP * MS, {"wall": {"data": (5.0 if rank == 1 and interval >= 30 else 1.0) * MS}}
            )
            for rank in there
        }
        if interval == 20:
            rows[2] = RankTimes(interval, STEP * MS, {})
        told += [(interval, slow) for slow in judge.judge(rows)[0]]
    assert [(33, 1, "data", "wall")] == [(interval, each.rank, each.phase, each.signal) for interval, each in told]
    assert "rank 1 takes 5.00 ms a step in data, the others 1.00 ms: 4.00 ms more, compared with" in str(
        told[0][1]
    )
    assert told[0][1].others_ns == MS
