"""`slow_ranks`: says on rank 0 which rank of a running job is slow, and in which phase."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from ...base import log
from ...base.guard import guard
from ...base.units import integer
from .judging import NOT_IN_STEPS, OTHER
from .own_work import OwnWork
from .rank_exchange import RankExchange
from .rank_judging import RankJudge, RankTimes, SlowRank
from .step_clock import StepClock
from .step_numbers import PREFIX, StepNumbers

FEATURE = "on_slow of slow_ranks"
_numbers = count()


class SlowRanks:
    """A function for ``on_steps`` that compares the ranks of the job; made by `slow_ranks`.

    Attributes:
        slow: on rank 0, the ranks that are slow now, by rank and phase.
        numbers: on rank 0, what the next `StepNumbers` of all functions have as well, without the prefix.
    """

    def __init__(
        self, on_slow: Callable[[SlowRank], Any] | None, local_phases: tuple[str, ...], patience: int
    ) -> None:
        self._on_slow = on_slow
        self._local_phases = local_phases
        self._patience = patience
        self._number = next(_numbers)  # the same on all ranks, which make as many
        self._found: deque[SlowRank] = deque()  # by the thread, for the loop
        self._work: OwnWork | None = None
        self._judge: RankJudge | None = None
        self._exchange: RankExchange | None = None
        self._job = 0, 0  # the rank and the number of ranks
        self._group: Callable[[], Any] = lambda: None  # weak: a group that is held would not end
        self._step = -1
        self.slow: dict[tuple[int, str], SlowRank] = {}
        self.numbers: dict[str, int | float] = {}

    def use_clock(self, clock: StepClock) -> None:
        """Sample the work of this rank in the steps of ``clock`` from now on.

        Raises:
            ValueError: another function does so, or the clock has no such phases.
        """
        if self._work is not None and self._work.is_on(clock):
            return
        self._stop_sampling()
        self._work = None
        known = (OTHER, *(phase for phase in clock.phases if phase not in NOT_IN_STEPS))
        unknown = [phase for phase in self._local_phases if phase not in known]
        if unknown:
            raise ValueError(f'"local_phases" must be phases of the loop, of {", ".join(known)}: {unknown!r}')
        self._work = OwnWork(clock)

    def __call__(self, numbers: StepNumbers) -> None:
        """Pass on the times of an interval, and begin the next one."""
        step = int(numbers[f"{PREFIX}step"])
        group = _process_group()
        if numbers.world_size < 2 or group is None or self._work is None or step == self._step:
            return
        mean_s = numbers.get(f"{PREFIX}step_time_mean_s")
        job = numbers.rank, numbers.world_size
        if job != self._job or group is not self._group() or step < self._step:  # back, as in an elastic restart
            self._begin(job, group)
        elif mean_s is not None and self._exchange is not None:
            self._exchange.publish(RankTimes(step, mean_s * 1e9, self._own(numbers, self._work.result())))
        self._step = step
        self._work.sample(step + 1 - numbers.first_step)
        self._tell()

    def _own(self, numbers: StepNumbers, work: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Return the times that show work: of the GPU and of the clock, only in phases without waits."""
        walls = {phase: numbers.get(f"{PREFIX}phase_{phase}_s", 0) * 1e9 for phase in self._local_phases}
        own = {"wall": walls}
        for signal, times in work.items():
            own[signal] = {phase: ns for phase, ns in times.items() if (phase in walls) == (signal == "gpu")}
        return own

    def _begin(self, job: tuple[int, int], group: Any) -> None:
        """Compare from the next interval on."""
        if self._exchange is not None:
            self._exchange.end(0)
        self._job, self._group = job, weakref.ref(group)
        self.slow, self.numbers = {}, {}
        self._judge = judge = RankJudge(self._patience)
        self._exchange = RankExchange(*job, lambda ranks: self._compare(judge, ranks), self._number)

    def _compare(self, judge: RankJudge, ranks: dict[int, RankTimes]) -> None:
        """Judge an interval, on the thread."""
        new, over = judge.judge(ranks)
        if judge is not self._judge:  # the comparison has ended meanwhile
            return
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

    def _tell(self) -> None:
        """Call ``on_slow`` with the ranks that were found since."""
        while self._found:
            slow = self._found.popleft()
            if self._on_slow is not None:
                with guard.contained(FEATURE):
                    self._on_slow(slow)

    def _stop_sampling(self) -> None:
        if self._work is not None:
            self._work.stop()

    def close(self) -> None:
        """End the comparison, and tell what it still found; the loop does this when it ends."""
        self._stop_sampling()
        if self._exchange is not None:
            self._exchange.end()
        self._judge, self._exchange, self._job, self._step, self.numbers = None, None, (0, 0), -1, {}
        self._tell()


def _process_group() -> Any:
    """Return the default process group; None without one."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return getattr(getattr(distributed, "group", None), "WORLD", None)


def slow_ranks(
    on_slow: Callable[[SlowRank], Any] | None = None,
    *,
    local_phases: Iterable[str] = ("data",),
    patience: int = 3,
) -> SlowRanks:
    """Return a function for ``on_steps`` that says on rank 0 which rank of the job is slow, and in which phase.

    At every interval each rank publishes the times of its own work through the store of the job, from a thread: no
    collective, and no wait. Rank 0 compares what has arrived. As the ranks wait for the slowest one in their
    collectives, a phase with collectives is as long on all of them: the work there is the CPU time of the thread,
    in sampled steps. In ``local_phases`` it is their time by the clock and, in a sampled step, on the GPU. For
    several loops, all ranks make as many of these functions, in the same order.

    A slow rank is logged as a warning. The numbers that rank 0 gets next have ``ranks`` (how many were compared),
    ``slow_ranks`` (how many are slow) and, for the slowest in a phase, ``slow_rank_PHASE`` and
    ``slow_rank_PHASE_excess_s``.

    Args:
        on_slow: called on rank 0, on the loop's thread, with the `SlowRank`, once for each rank and phase until it
            is no longer slow.
        local_phases: those without collectives, in which no rank waits for another. With DDP "forward" often
            is one.
        patience: the intervals in a row in which a rank has to be slow.

    Raises:
        TypeError, ValueError: an argument is not accepted; the message gives its name and value.

    Example:
        >>> with black_box(on_steps=[slow_ranks(), wandb.log]) as box:
        ...     train(model, loader)
    """
    if on_slow is not None and not callable(on_slow):
        raise TypeError(f'"on_slow" must be a function: {on_slow!r}')
    if isinstance(local_phases, str) or not isinstance(local_phases, Iterable):
        raise TypeError(f'"local_phases" must be several names of phases: {local_phases!r}')
    phases = tuple(local_phases)
    if not all(isinstance(phase, str) for phase in phases):
        raise TypeError(f'"local_phases" must be several names of phases: {local_phases!r}')
    return SlowRanks(on_slow, phases, integer("patience", patience, least=1))
