"""`OwnWork`: samples how long a rank itself works in each phase, which its waits for other ranks do not change."""

from __future__ import annotations

from time import thread_time_ns
from typing import Any

from ...base.compat import gpu
from ...base.guard import guard
from .judging import OTHER
from .step_clock import StepClock

FEATURE = "sampling the work of a rank"
_SKIPPED = 2  # steps after the call, in which loops log what they log every so many steps
_SHARE = 100  # one step in so many is sampled, as the clock of CPU time is no cheap one (0.2 to 1 us)


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
        self._events: list[tuple[int, Any]] = []  # at each boundary, with the column before it
        self._cuda: Any = None  # `torch.cuda` if it is in use
        self._is_whole = False  # so far; a profiler that records takes CPU time as well

    def is_on(self, clock: StepClock) -> bool:
        """Return whether it samples on this clock."""
        return self._clock is clock

    def sample(self, interval: int) -> None:
        """Sample some of the next ``interval`` steps; called at the end of a step."""
        self.stop()
        module = gpu.in_use()
        self._cuda = gpu.initialized("cuda") if module is not None else None
        self._events = []
        self._cpu_ns = [0] * len(self._columns) if module is None else []
        self._first = self._clock.step_num + min(_SKIPPED, interval - 1)
        self._end = self._first + (max(interval // _SHARE, 1) if module is None else 1)
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
                sampled["cpu"] = {
                    phase: ns / steps for phase, ns in zip(self._columns, self._cpu_ns, strict=True) if ns
                }
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
            elif self._cpu_ns:
                cpu_ns = thread_time_ns()
                if step >= self._first:
                    self._cpu_ns[column] += cpu_ns - self._before_ns
                self._before_ns = cpu_ns
            elif self._cuda is not None:
                self._record(column if step >= self._first else None)
        return self._usual()

    @guard.contained(FEATURE)
    def _record(self, column: int | None) -> None:
        """Record an event on the GPU; the time before the first sampled step has no column."""
        if gpu.current_stream_capturing():
            self._is_whole = False
            return
        event = self._cuda.Event(enable_timing=True)
        event.record()
        self._events = [*(self._events if column is not None else []), (column or 0, event)]

    def _gpu_times(self) -> dict[str, float]:
        times = dict.fromkeys(self._columns, 0.0)
        for (_, begin), (column, end) in zip(self._events, self._events[1:], strict=False):
            times[self._columns[column]] += begin.elapsed_time(end) * 1e6
        return {phase: ns for phase, ns in times.items() if ns}
