"""How long steps took on the CPU and on the GPU, which of the two bounds the loop, and how far the CPU ran ahead.

A loop without synchronizations only launches work: the end of a step on the CPU says nothing of when its work is
done. So GPU work belongs to the step that launched it, whenever it ran, and the loop is as fast as the ends of the
work of successive steps follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Literal, NamedTuple

from ..units import counted

_LITTLE = 0.1  # the share of a step up to which a wait does not bound the loop, and work may be of unknown origin


class StepLength(NamedTuple):
    """One step on the CPU, and the GPU work that it launched; None where it launched none that the trace has.

    Attributes:
        cpu_ns: From its start to its end on the CPU.
        gpu_first_ns: When the first of its work started.
        gpu_last_ns: When the last of its work ended.
        gpu_ns: From the one to the other.
        gpu_period_ns: From the last end of the work of the steps before it to that of its own; 0 where theirs ends
            later. None for the first of successive steps.
        run_ahead_ns: From its end on the CPU to the last end of its work: how far the CPU is ahead. Negative where
            the GPU was done first.
        launch_delay_ns: From the begin of the call that launched the first of its work to the start of that.
        gpu_busy_ns: How long the GPU worked in ``gpu_ns``, at whatever; of several that the step uses, the mean.
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
    """Sums over successive steps: on the GPU, from the last end of the first one's work to that of the last one's.

    On the CPU they are from the end of the first to that of the last, which a CPU that runs ahead reaches first.

    Attributes:
        steps: How many steps that is: all but the first.
        gpu_ns: How long it is: their periods on the GPU, added up.
        cpu_ns: How long the same steps took on the CPU.
        gpu_waits_ns: The part of ``gpu_ns`` at which the GPU had nothing to do, and what it did next was launched
            after it had run out of work.
        cpu_waits_ns: The part of ``cpu_ns`` at which a thread of the loop waited for the GPU in a call within a
            step, and the GPU worked: in synchronizations, copies, and launches that found its queue full.
        busy_ns: The part of ``gpu_ns`` at which the GPU worked.
        known_ns: The part at which it did what the steps launched.
        synchronized_steps: The steps between the first and the last wait at the same place of a step that left
            the GPU without work.
        synchronized_ns: The wall time from the one to the other.
        missing: Calls that launched work which the trace lacks, in steps that cannot be told without it.
        queue_waits_ns: The part of ``cpu_waits_ns`` in launches.
        exposed_comm_ns: The part of ``gpu_ns`` at which the GPU communicated and did not compute; of several that
            a process uses, the mean.
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
        """Return the sums over both."""
        return LoopTotals(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StepLengths:
    """The lengths of steps, and what they say of the loop.

    Attributes:
        steps: Each step, in the order of the trace.
        pace: The sums that the rest follows from.
    """

    steps: tuple[StepLength, ...]
    totals: LoopTotals = LoopTotals()

    @property
    def bound(self) -> Literal["gpu", "cpu", "both"] | None:
        """What bounds the loop; None where that is not known, see `unknown`.

        "gpu" if the GPU waits for launches at most 10 % of the time. Else "both" if the CPU waits for the GPU more
        than 10 % of the time: a loop that synchronizes, or fills the GPU's queue in a part of each step, so that
        they take turns. Else "cpu".
        """
        if self.unknown:
            return None
        if self.totals.gpu_waits_ns <= _LITTLE * self.totals.gpu_ns:
            return "gpu"
        return "both" if self.totals.cpu_waits_ns > _LITTLE * self.totals.cpu_ns else "cpu"

    @property
    def synchronizes(self) -> bool:
        """Whether the CPU waits for the GPU more than 10 % of its time in other calls than launches."""
        return self.totals.cpu_waits_ns - self.totals.queue_waits_ns > _LITTLE * self.totals.cpu_ns

    @property
    def unknown(self) -> str:
        """Why it is not known what bounds the loop; empty where it is."""
        totals = self.totals
        if totals.missing:
            return f"the trace lacks the GPU work of {counted(totals.missing, 'launch', 'launches')}"
        if all(step.gpu_ns is None for step in self.steps):
            return "the trace has no GPU work that the steps launched"
        if not totals.gpu_ns:
            return "two successive steps with GPU work are needed"
        if totals.busy_ns - totals.known_ns > _LITTLE * totals.busy_ns:
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
        """What `step_ns` is by.

        Synchronizations, where they span as many steps as there are GPU periods; the CPU, where that bounds the
        loop; else the GPU.
        """
        if self.totals.synchronized_steps and self.totals.synchronized_steps >= self.totals.steps:
            return "synchronizations"
        if not self.totals.gpu_ns:
            return None
        return "cpu" if self.bound == "cpu" else "gpu"

    @property
    def step_ns(self) -> float | None:
        """How long a step of the loop takes, the wait for its work included."""
        if self.clock == "synchronizations":
            return self.synchronized_step_ns
        return self.cpu_step_ns if self.clock == "cpu" else self.gpu_step_ns

    @property
    def run_ahead_ns(self) -> tuple[float, int] | None:
        """How far the CPU is ahead at the end of a step: the median, and the most."""
        known = [step.run_ahead_ns for step in self.steps if step.run_ahead_ns is not None]
        return (median(known), max(known)) if known else None

    @property
    def runs_ahead(self) -> bool:
        """Whether the GPU bounds the loop and the CPU does not wait for it at the end of each step."""
        ahead, step_ns = self.run_ahead_ns, self.gpu_step_ns
        return self.bound == "gpu" and bool(ahead and step_ns and ahead[1] > _LITTLE * step_ns)


def merge_step_lengths(windows: Iterable[tuple[StepLengths | None, Sequence[int]]]) -> StepLengths | None:
    """Return the lengths of the steps of several windows; None if those of none are known.

    Args:
        windows: Of each the lengths, and the durations on the CPU for a window without.
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
