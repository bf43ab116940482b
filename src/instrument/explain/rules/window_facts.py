"""`WindowFacts`: what a trace says of its window, each fact computed once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...read.measures.step_lengths import StepLengths, step_lengths
from ...read.measures.synchronizations import Synchronization
from ...read.measures.timing import Stretch, Timing
from ...read.memory.snapshot import MemorySnapshot
from ...read.profilers.compile_log import CompileLog
from ...read.tables.intervals import Intervals, clip, merge_overlaps, overlap_ns, total_ns
from ...read.tables.lanes import group_rows
from ...read.tables.steps import launched_before, main_thread, steps_of_process
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, communication_mask, gpu_numbers
from ..metrics.idle import IdleCauses, idle_causes
from ..metrics.job import Job
from ..metrics.launches import LostWork, lost_work
from ..metrics.memory_use import MemoryUse, memory_use
from ..metrics.metrics import Metrics, metrics_of
from ..metrics.peaks import Peak
from ..metrics.roofline import Roofline, roofline
from ..metrics.utilization import Activity, activity
from ..waits.audit import audit
from ..waits.report import SyncReport

_OVERLAP = 1.1  # times as long as the time that the steps cover
_BUSY = 0.9  # share of the step from which the GPU sets its length
_CPU = 0  # torch's number of this type of device


class WindowFacts:
    """What a trace says of its window: the steps and the work that they launched.

    Args:
        trace: as the attribute, and so are ``collectives``, ``timing``, ``job``, ``compile_log`` and ``snapshot``.
        lengths: the lengths of the steps; "measure" if they were not measured before.

    Attributes:
        trace: the trace, whose tables cannot be written: one rule must not change what another one reads.
        collectives: which kernels communicate.
        timing: the timing of the run from the manifest; None if there is none.
        job: the ranks of the job; None if only this trace is known.
        compile_log: the log of torch.compile; None if there is none.
        snapshot: the memory snapshot of the process; None if there is none.
    """

    def __init__(
        self,
        trace: Trace,
        collectives: Collectives = "auto",
        timing: Timing | None = None,
        job: Job | None = None,
        compile_log: CompileLog | None = None,
        snapshot: MemorySnapshot | None = None,
        lengths: StepLengths | Literal["measure"] | None = "measure",
    ) -> None:
        self.trace, self.collectives, self.timing, self.job = trace.read_only(), collectives, timing, job
        self.compile_log, self.snapshot = compile_log, snapshot
        self._lengths = lengths

    @cached_property
    def lengths(self) -> StepLengths | None:
        """The lengths of the steps; None without steps or without GPU work."""
        known = self._lengths
        return step_lengths(self.trace, self.collectives) if known == "measure" else known

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the trace."""
        return metrics_of(self.trace, self.collectives, self.lengths)

    @cached_property
    def _steps_of_process(self) -> Array:
        """The starts and ends of the steps of the process that recorded most; repeated steps count once."""
        return steps_of_process(self.trace)

    @property
    def steps(self) -> int:
        """The number of recorded steps; 1 without steps, as the whole window then counts as one."""
        return max(len(self._steps_of_process), 1)

    @property
    def steps_overlap(self) -> bool:
        """Whether more than a tenth of the time of the steps is that of several."""
        starts, ends = self._steps_of_process.T
        once = total_ns(merge_overlaps(starts, ends))
        return bool((ends - starts).sum() > _OVERLAP * once)

    @cached_property
    def recorded(self) -> tuple[int, int]:
        """The time in ns from the first step's start to the end of the last step's work; else that of GPU work."""
        for name in ("step_lengths", "span_ns"):
            if (bounds := self.metrics.about(name).window_ns) is not None:
                return bounds
        return self.metrics.about("sync_calls").window_ns or (0, 0)

    @cached_property
    def earlier(self) -> Array:
        """A mask of the rows of `Trace.gpu` launched before the recording; none in a trace without steps."""
        if not self.trace.steps:
            return np.zeros(len(self.trace.gpu), bool)
        return launched_before(self.trace)

    @cached_property
    def window(self) -> tuple[int, int]:
        """The time that counts, in ns: `recorded`, from the end of the work launched before the recording on.

        A GPU that lags behind the CPU does the work of earlier steps first, and ends that of the last step later
        than the CPU: from the end of the former to the end of the latter, the work of each step runs once.
        """
        first, last = self.recorded
        done = int(self.trace.gpu.end_ns[self.earlier].max(initial=first))
        return (done if first < done < last else first), last

    @property
    def window_ns(self) -> int:
        """The length of the window."""
        return self.window[1] - self.window[0]

    @property
    def step_ns(self) -> float:
        """The mean time of a step: the window divided by the number of steps."""
        return self.window_ns / self.steps

    @property
    def usual_step_ns(self) -> float | None:
        """The median time of the steps around the window, from the manifest; None if it is not known."""
        around = self.timing.around if self.timing else None
        return around[1] if around else None

    @cached_property
    def stretch(self) -> Stretch | None:
        """How many times as long a step takes in the window as outside; None if that is not known."""
        return Stretch.of(self.trace.steps.duration_ns.tolist(), self.timing, self.lengths)

    @cached_property
    def gpu(self) -> Table:
        """The GPU work of the window, without that launched before the recording."""
        return self.trace.gpu.where(self.gpu_rows).read_only()

    @cached_property
    def gpu_rows(self) -> Array:
        """The rows of `Trace.gpu` that `gpu` holds."""
        starts = self.trace.gpu.start_ns
        return np.flatnonzero((starts >= self.recorded[0]) & (starts < self.recorded[1]) & ~self.earlier)

    @cached_property
    def gpus(self) -> dict[int, Array]:
        """The rows of `gpu` on each GPU."""
        return dict(group_rows(gpu_numbers(self.gpu)))

    @cached_property
    def kernel_rows(self) -> Array:
        """The rows of `gpu` that are kernels."""
        return np.flatnonzero(self.gpu.category == KERNEL)

    @cached_property
    def kernels(self) -> Table:
        """The kernels of the window: `kernel_rows` of `gpu`."""
        return self.gpu.where(self.kernel_rows).read_only()

    @cached_property
    def communication(self) -> Array:
        """A mask of the rows of `gpu` that communicate."""
        return communication_mask(self.gpu, self.collectives)

    @cached_property
    def activity(self) -> Activity:
        """When the GPUs were busy with each kind of work in the window."""
        done = activity(self.gpu, self.communication)
        return Activity(*(clip(times, *self.window) for times in done))

    @cached_property
    def busy_ns(self) -> int:
        """The time of the window during which any GPU works."""
        return total_ns(self.activity.busy)

    @cached_property
    def _audit(self) -> tuple[SyncReport, list[Synchronization]]:
        return audit(self.trace)

    @property
    def syncs(self) -> SyncReport:
        """The synchronizations of the program by line."""
        return self._audit[0]

    @property
    def waits(self) -> list[Synchronization]:
        """The synchronizations of the program, one by one, without those of the profiler."""
        return self._audit[1]

    @cached_property
    def idle(self) -> IdleCauses:
        """The idle time of the GPUs in the window by cause; none if times of the GPU are not known."""
        window = (self.window[0], self.window[0]) if self.unknown_gpu else self.window
        return idle_causes(self.trace, self.activity.busy, window, self.waits)

    @property
    def peak(self) -> Peak | None:
        """What the GPU can do; None if it is not known."""
        return self.roofline.peak

    @cached_property
    def roofline(self) -> Roofline:
        """The operators with their FLOPs, bytes and shares of the peak, for the work in the window."""
        return roofline(replace(self.trace, gpu=self.gpu))

    @cached_property
    def memory_events(self) -> Table:
        """The allocations and frees on GPUs."""
        return self.trace.memory.where(self.trace.memory.device_type != _CPU)

    @cached_property
    def memory_use(self) -> MemoryUse | None:
        """What the memory of the GPU is used for; None if that is not recorded."""
        return memory_use(self.trace, self.memory_events)

    @cached_property
    def blocked(self) -> Intervals:
        """When the CPU was blocked by synchronizations."""
        times = np.array([(wait.start_ns, wait.start_ns + wait.blocked_ns) for wait in self.waits], np.int64)
        return merge_overlaps(*times.reshape(-1, 2).T)

    @cached_property
    def gpu_limited_ns(self) -> int:
        """The part of the window whose length depends on the GPU.

        That is the whole window if the GPU works 90 % of it, else the time during which the CPU waited for it.
        """
        if self.busy_ns >= _BUSY * self.window_ns:
            return self.window_ns
        waited = overlap_ns(self.activity.busy, self.blocked)
        steps = self.trace.steps  # the GPU may work on after the last one has ended on the CPU
        tail = max(self.window[1] - int(steps.end_ns.max()), 0) if steps else 0
        queue_ns = self.lengths.totals.queue_waits_ns if self.lengths else 0
        return min(waited + tail + queue_ns, self.window_ns)

    @cached_property
    def lost(self) -> LostWork:
        """The launches whose work is not in the trace, or has impossible times."""
        return lost_work(self.trace, self.recorded[0])

    @property
    def unknown_gpu(self) -> str:
        """Why times of the GPU are not known; empty if they are."""
        if not self.trace.gpu:
            return "the trace has no GPU work"
        if self.trace.steps and not self.trace.steps.duration_ns.any():
            return "the recorded steps have no duration"
        return self.lost.too_much or ("" if self.gpu else "the recorded steps have no GPU work")

    def within(self, events: Table) -> Table:
        """Return the events that overlap with the recorded time."""
        first, last = self.recorded
        return events.where((events.end_ns > first) & (events.start_ns < last))

    def per_step(self, ns: float) -> int:
        """Return a time in the window as time per step."""
        return round(ns / self.steps)

    @property
    def each_step(self) -> str:
        """What times per step are said to be in titles, as a trace without steps has none."""
        return "per step" if self.trace.steps else "in the window"

    def share(self, win_ns: float) -> float:
        """Return a time per step as a share of the step."""
        return win_ns / self.step_ns if self.step_ns else 0.0

    @property
    def main_thread(self) -> int:
        """The number of the thread of the program's loop."""
        return main_thread(self.trace)
