"""`OwnWork`: samples how long a rank itself works in each phase, which its waits for other ranks do not change."""

from __future__ import annotations

from collections.abc import Iterable
from time import thread_time_ns
from typing import Any

from ...base.compat import gpu
from ...base.guard import guard
from .judging import NOT_IN_STEPS, OTHER
from .step_clock import StepClock

FEATURE = "sampling the work of a rank"
_SKIPPED = 2  # steps after the call, in which loops log what they log every so many steps
_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, spread evenly
_SHARE = 100  # one step in so many is sampled, as each reading of CPU time takes 0.2 to 1 us


class OwnWork:
    """Times the phases of some steps with the CPU clock of their thread, and of one step on the GPU.

    In these steps it stands in for the clock of the loop, which it reads together with its own at each boundary of
    a phase and of a step. Where the program uses a GPU, CPU time shows no work, as a thread that waits for the GPU
    computes as well. Then an event of the GPU is recorded at each boundary.

    Args:
        clock: the clock of the loop.

    Raises:
        ValueError: another one samples on this clock; each would take the other's time for the usual one.
    """

    def __init__(self, clock: StepClock) -> None:
        if clock.sampler is not None:
            raise ValueError('"on_steps" must have one slow_ranks() at most')
        clock.sampler = self
        self._clock = clock
        self._columns = (OTHER, *clock.phases)
        self._usual = clock.now
        self._first = self._end = 0  # the sampled steps
        self._before_ns = 0  # CPU time at the last boundary
        self._cpu_ns: list[int] = []  # in the sampled steps, by column
        self._events: list[tuple[int | None, Any]] = []  # at each boundary, with the column before it
        self._cuda: Any = None  # `torch.cuda` if it is in use
        self._is_whole = False  # so far; a profiler that records takes CPU time as well

    def is_on(self, clock: StepClock) -> bool:
        """Return whether it samples on this clock."""
        return self._clock is clock

    def sample(self, interval: int) -> None:
        """Sample some of the next ``interval`` steps; called at the end of a step.

        They are others in each interval, as a rank may have more work every so many steps, and the same on all
        ranks, as batches differ.
        """
        self.stop()
        module = gpu.in_use()
        self._cuda = gpu.initialized("cuda") if module is not None else None
        self._events = []
        self._cpu_ns = [0] * len(self._columns) if module is None else []
        begin, steps = self._clock.step_num, max(interval // _SHARE, 1) if module is None else 1
        skipped = min(_SKIPPED, interval - 1)
        turn = begin // interval * _GOLDEN % 1
        self._first = begin + skipped + int(turn * max(interval - skipped - steps + 1, 1))
        self._end = self._first + steps
        self._is_whole = True
        self._before_ns = thread_time_ns()
        self._usual, self._clock.now = self._clock.now, self._read

    def result(self) -> dict[str, dict[str, float]]:
        """End the sample; return the times in ns, a step, by the signal, "cpu" or "gpu", and the phase."""
        steps = min(self._end, self._clock.step_num) - self._first
        self.stop()
        sampled: dict[str, dict[str, float]] = {}
        if self._is_whole and steps > 0:
            if any(self._cpu_ns):
                sampled["cpu"] = self._by_phase(ns / steps for ns in self._cpu_ns)
            if self._events and self._events[-1][1].query():
                sampled["gpu"] = self._gpu_times()
        return sampled

    def stop(self) -> None:
        """Give the clock its time back."""
        if self._clock.now == self._read:
            self._clock.now = self._usual

    def _read(self) -> int:
        """Return the time of the loop's clock; note the work since the last boundary."""
        step = self._clock.step_num
        if step >= self._end:
            self.stop()
        elif step >= self._first - 1:
            column = self._clock.open_column
            if column is None:
                self._is_whole = False
            else:
                self._note(column if step >= self._first else None)
        return self._usual()

    def leave_out(self) -> None:
        """Take what ran since the last boundary for no work of the loop."""
        if self._clock.now == self._read and self._first - 1 <= self._clock.step_num < self._end:
            self._note(None)

    def _note(self, column: int | None) -> None:
        """Note the work since the last boundary, in no column if it does not count."""
        if self._cpu_ns:
            cpu_ns = thread_time_ns()
            if column is not None:
                self._cpu_ns[column] += cpu_ns - self._before_ns
            self._before_ns = cpu_ns
        elif self._cuda is not None:
            self._record(column)

    @guard.contained(FEATURE)
    def _record(self, column: int | None) -> None:
        if gpu.current_stream_capturing():
            self._is_whole = False
            return
        event = self._cuda.Event(enable_timing=True)
        event.record()
        self._events.append((column, event))

    def _gpu_times(self) -> dict[str, float]:
        times = [0.0] * len(self._columns)
        for (_, begin), (column, end) in zip(self._events, self._events[1:], strict=False):
            if column is not None:
                times[column] += begin.elapsed_time(end) * 1e6
        return self._by_phase(times)

    def _by_phase(self, times: Iterable[float]) -> dict[str, float]:
        named = zip(self._columns, times, strict=True)
        return {phase: ns for phase, ns in named if ns and phase not in NOT_IN_STEPS}
