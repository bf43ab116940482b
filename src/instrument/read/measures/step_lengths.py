"""The lengths of steps on the CPU and on the GPU, what bounds the loop, and how far the CPU ran ahead.

A loop without synchronizations only launches work: the end of a step on the CPU does not show when its work is
done. Therefore GPU work belongs to the step that launched it, whenever it ran, and the time of a step on the GPU
is the time between the ends of the work of successive steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Literal, NamedTuple

from ...base.units import counted

# Of a step: shorter waits do not bound the loop, and a smaller share of work may have an unknown origin
_NEGLIGIBLE_SHARE = 0.1


class StepLength(NamedTuple):
    """One step on the CPU and the GPU work that it launched; times are None if the trace has no such work.

    Attributes:
        cpu_ns: The time from its start to its end on the CPU.
        gpu_first_ns: The start of its first work.
        gpu_last_ns: The end of its last work.
        gpu_ns: The time between these two.
        gpu_period_ns: The time from the last end of the work of the steps before it to the last end of its own
            work; 0 if their work ends later. None for the first of successive steps.
        run_ahead_ns: The time from its end on the CPU to the last end of its work, which is how far the CPU is
            ahead; negative if the GPU was done first.
        launch_delay_ns: The time from the start of the call that launched its first work to the start of that
            work.
        gpu_busy_ns: How long the GPU was busy during ``gpu_ns``, also with other work; the mean over the GPUs that
            the step uses.
    """

    cpu_ns: int
    gpu_first_ns: int | None = None
    gpu_last_ns: int | None = None
    gpu_ns: int | None = None
    gpu_period_ns: int | None = None
    run_ahead_ns: int | None = None
    launch_delay_ns: int | None = None
    gpu_busy_ns: int | None = None


@dataclass(frozen=True)
class LoopTotals:
    """Totals over successive steps.

    On the GPU they cover the time from the last end of the work of the first step to the last end of the work of
    the last step; on the CPU, the time from the end of the first step to the end of the last.

    Attributes:
        steps: The number of steps: all except the first.
        gpu_ns: The sum of their periods on the GPU.
        cpu_ns: The time of the same steps on the CPU.
        gpu_waits_ns: The part of ``gpu_ns`` during which the GPU had no work, and its next work was launched after
            it had run out.
        cpu_waits_ns: The part of ``cpu_ns`` during which a thread of the loop waited for a busy GPU in a call
            within a step: in synchronizations, memcpys, and launches that found the queue full.
        busy_ns: The part of ``gpu_ns`` during which the GPU was busy.
        known_ns: The part during which it ran work that the steps launched.
        synchronized_steps: The steps between the first and the last synchronization at one place of the step that
            left the GPU without work.
        synchronized_ns: The wall time between these two synchronizations.
        missing: The calls that launched work that the trace lacks, in steps whose length is unknown without it.
        queue_waits_ns: The part of ``cpu_waits_ns`` in launches.
        exposed_comm_ns: The part of ``gpu_ns`` during which the GPU communicated and did not compute; the mean
            over the GPUs that a process uses.
    """

    steps: int = 0
    gpu_ns: int = 0
    cpu_ns: int = 0
    gpu_waits_ns: int = 0
    cpu_waits_ns: int = 0
    busy_ns: int = 0
    known_ns: int = 0
    synchronized_steps: int = 0
    synchronized_ns: int = 0
    missing: int = 0
    queue_waits_ns: int = 0
    exposed_comm_ns: int = 0

    def __add__(self, other: LoopTotals) -> LoopTotals:
        """Return the sums of both."""
        return LoopTotals(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepLengths:
    """The lengths of steps, and what bounds their loop.

    Attributes:
        steps: The steps, in the order of the trace.
        totals: The totals from which the properties follow.
    """

    steps: tuple[StepLength, ...]
    totals: LoopTotals = LoopTotals()

    @property
    def bound(self) -> Literal["gpu", "cpu", "both"] | None:
        """What bounds the loop; None if that is not known, and `unknown` says why.

        "gpu" if the GPU waits for launches at most 10 % of the time. Otherwise "both" if the CPU waits for the GPU
        more than 10 % of the time: they take turns in a loop that synchronizes, or fills the GPU's queue in a part
        of each step. Otherwise "cpu".
        """
        if self.unknown:
            return None
        if self.totals.gpu_waits_ns <= _NEGLIGIBLE_SHARE * self.totals.gpu_ns:
            return "gpu"
        return "both" if self.totals.cpu_waits_ns > _NEGLIGIBLE_SHARE * self.totals.cpu_ns else "cpu"

    @property
    def synchronizes(self) -> bool:
        """Whether the CPU waits for the GPU more than 10 % of its time in calls other than launches."""
        return self.totals.cpu_waits_ns - self.totals.queue_waits_ns > _NEGLIGIBLE_SHARE * self.totals.cpu_ns

    @property
    def unknown(self) -> str:
        """Why it is not known what bounds the loop; empty if it is known."""
        totals = self.totals
        if totals.missing:
            return f"the trace lacks the GPU work of {counted(totals.missing, 'launch', 'launches')}"
        if all(step.gpu_ns is None for step in self.steps):
            return "the trace has no GPU work that the steps launched"
        if not totals.gpu_ns:
            return "two successive steps with GPU work are needed"
        if totals.busy_ns - totals.known_ns > _NEGLIGIBLE_SHARE * totals.busy_ns:
            return f"the steps launched only {100 * totals.known_ns / totals.busy_ns:.0f} % of what the GPU did"
        return ""

    @property
    def gpu_step_ns(self) -> float | None:
        """The mean period of a step on the GPU."""
        return self.totals.gpu_ns / self.totals.steps if self.totals.gpu_ns else None

    @property
    def cpu_step_ns(self) -> float | None:
        """The mean period of the same steps on the CPU."""
        return self.totals.cpu_ns / self.totals.steps if self.totals.gpu_ns else None

    @property
    def synchronized_step_ns(self) -> float | None:
        """The mean wall time of a step between synchronizations."""
        totals = self.totals
        return totals.synchronized_ns / totals.synchronized_steps if totals.synchronized_steps else None

    @property
    def clock(self) -> Literal["synchronizations", "cpu", "gpu"] | None:
        """The clock of `step_ns`.

        Synchronizations, if they span as many steps as there are GPU periods; the CPU, if it bounds the loop;
        otherwise the GPU.
        """
        if self.totals.synchronized_steps and self.totals.synchronized_steps >= self.totals.steps:
            return "synchronizations"
        if not self.totals.gpu_ns:
            return None
        return "cpu" if self.bound == "cpu" else "gpu"

    @property
    def step_ns(self) -> float | None:
        """How long a step of the loop takes, including the wait for its work."""
        if self.clock == "synchronizations":
            return self.synchronized_step_ns
        return self.cpu_step_ns if self.clock == "cpu" else self.gpu_step_ns

    @property
    def run_ahead_ns(self) -> tuple[float, int] | None:
        """How far the CPU is ahead at the end of a step: the median and the maximum."""
        known = [step.run_ahead_ns for step in self.steps if step.run_ahead_ns is not None]
        return (median(known), max(known)) if known else None

    @property
    def runs_ahead(self) -> bool:
        """Whether the GPU bounds the loop and the CPU does not wait for it at the end of each step."""
        ahead, step_ns = self.run_ahead_ns, self.gpu_step_ns
        return self.bound == "gpu" and bool(ahead and step_ns and ahead[1] > _NEGLIGIBLE_SHARE * step_ns)


def merge_step_lengths(windows: Iterable[tuple[StepLengths | None, Sequence[int]]]) -> StepLengths | None:
    """Return the lengths of the steps of several windows; None if no window has lengths.

    Args:
        windows: The lengths of each window, and the durations of its steps on the CPU, for windows without
            lengths.
    """
    known = [(lengths, times) for lengths, times in windows]
    if all(lengths is None for lengths, _ in known):
        return None
    steps: list[StepLength] = []
    totals = LoopTotals()
    for lengths, times in known:
        steps += lengths.steps if lengths else map(StepLength, times)
        totals += lengths.totals if lengths else LoopTotals()
    return StepLengths(tuple(steps), totals)
