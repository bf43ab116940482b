"""`slow_ranks`: says on rank 0 which rank of a running job is slow, and in which phase."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ...base import log
from ...base.guard import guard
from ...base.units import integer
from .own_work import OwnWork
from .rank_exchange import RankExchange
from .rank_judging import RankJudge, RankTimes, SlowRank
from .step_numbers import PREFIX, NumbersSource, StepNumbers

FEATURE = "on_slow of slow_ranks"


class SlowRanks(NumbersSource):
    """A function for ``on_steps`` that compares the ranks of the job; made by `slow_ranks`.

    Attributes:
        slow: on rank 0, the ranks that are slow now, by rank and phase.
        numbers: on rank 0, what the next `StepNumbers` of all functions have as well, without the prefix.
    """

    def __init__(self, on_slow: Callable[[SlowRank], Any] | None, alone: tuple[str, ...], patience: int) -> None:
        self._on_slow = on_slow
        self._alone = alone
        self._patience = patience
        self._found: deque[SlowRank] = deque()  # by the thread, for the loop
        self._work: OwnWork | None = None
        self._exchange: RankExchange | None = None
        self._job: tuple[object, ...] = ()
        self._step = -1
        self.slow: dict[tuple[int, str], SlowRank] = {}
        self.numbers: dict[str, int | float] = {}

    def __call__(self, numbers: StepNumbers) -> None:
        """Pass on the times of an interval, and begin the next one."""
        if numbers.world_size < 2 or numbers.clock is None:
            return
        mean_s = numbers.get(f"{PREFIX}step_time_mean_s")
        if not self._joins_job(numbers) and mean_s is not None and self._exchange and self._work:
            self._exchange.publish(RankTimes(self._step, mean_s * 1e9, self._own(numbers, self._work.result())))
        if self._work is None:
            self._work = OwnWork(numbers.clock)
        self._work.sample(self._step + 1 - numbers.first_step)
        while self._found:
            slow = self._found.popleft()
            if self._on_slow is not None:
                with guard.contained(FEATURE):
                    self._on_slow(slow)

    def _own(self, numbers: StepNumbers, work: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Return the times that show work: of the GPU and of the clock, only in phases without waits."""
        walls = {phase: numbers.get(f"{PREFIX}phase_{phase}_s", 0) * 1e9 for phase in self._alone}
        own = {"wall": walls}
        for signal, times in work.items():
            own[signal] = {phase: ns for phase, ns in times.items() if (phase in walls) == (signal == "gpu")}
        return own

    def _joins_job(self, numbers: StepNumbers) -> bool:
        """Begin anew in another process group, or after the steps went back, as in an elastic restart.

        Returns:
            Whether this is such a beginning, with an interval that is not compared.
        """
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        group = getattr(getattr(distributed, "group", None), "WORLD", None)
        job = numbers.rank, numbers.world_size, id(group)
        step = int(numbers[f"{PREFIX}step"])
        joins = job != self._job or step <= self._step
        if joins:
            if self._exchange is not None:
                self._exchange.end(0)
            self._job, self.slow, self.numbers = job, {}, {}
            judge = RankJudge(self._patience)
            self._exchange = RankExchange(
                numbers.rank, numbers.world_size, lambda ranks: self._judge(judge, ranks)
            )
        self._step = step
        return joins

    def _judge(self, judge: RankJudge, ranks: dict[int, RankTimes]) -> None:
        """Judge an interval, on the thread."""
        new, over = judge.judge(ranks)
        for slow in new:
            log.warning(f"slow rank: {slow}", score=round(slow.score, 1), step=slow.step)
            self._found.append(slow)
        for slow in over:
            log.info(f"rank {slow.rank} is no longer slow in {slow.phase}")
        self.slow = judge.slow.copy()
        numbers: dict[str, int | float] = {
            "ranks": len(ranks),
            "slow_ranks": len({rank for rank, _ in self.slow}),
        }
        for slow in sorted(self.slow.values(), key=lambda slow: slow.excess_ns):  # the worst one of a phase stays
            numbers[f"slow_rank_{slow.phase}"] = slow.rank
            numbers[f"slow_rank_{slow.phase}_excess_s"] = slow.excess_ns / 1e9
        self.numbers = numbers

    def close(self) -> None:
        """End the comparison; the loop does this when it ends."""
        if self._work is not None:
            self._work.stop()
        if self._exchange is not None:
            self._exchange.end()
        self._work, self._exchange, self._job, self._step = None, None, (), -1


def slow_ranks(
    on_slow: Callable[[SlowRank], Any] | None = None, *, alone: Iterable[str] = ("data",), patience: int = 3
) -> SlowRanks:
    """Return a function for ``on_steps`` that says on rank 0 which rank of the job is slow, and in which phase.

    At every interval each rank publishes the times of its own work through the store of the job, from a thread: no
    collective, and no wait. Rank 0 compares what has arrived. As the ranks wait for the slowest one in their
    collectives, a phase with collectives is as long on all of them: the work there is the CPU time of the thread,
    in sampled steps. In the phases ``alone`` it is their time by the clock and, in a sampled step, on the GPU.

    A slow rank is logged as a warning. The numbers that rank 0 gets next have ``ranks`` (how many were compared),
    ``slow_ranks`` (how many are slow) and, for the slowest in a phase, ``slow_rank_PHASE`` and
    ``slow_rank_PHASE_excess_s``.

    Args:
        on_slow: called on rank 0, on the loop's thread, with the `SlowRank`, once for each rank and phase until it
            is no longer slow.
        alone: the phases in which ranks do not wait for one another. With DDP that is often true of "forward".
        patience: the intervals in a row in which a rank has to be slow.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> with black_box(on_steps=[slow_ranks(), wandb.log]) as box:
        ...     train(model, loader)
    """
    if on_slow is not None and not callable(on_slow):
        raise TypeError(f'"on_slow" must be a function: {on_slow!r}')
    if isinstance(alone, str) or not isinstance(alone, Iterable):
        raise TypeError(f'"alone" must be several names of phases: {alone!r}')
    phases = tuple(alone)
    if not all(isinstance(phase, str) for phase in phases):
        raise TypeError(f'"alone" must be several names of phases: {alone!r}')
    return SlowRanks(on_slow, phases, integer("patience", patience, least=1))
