"""The steps of a trace, and when each starts and ends, whatever times its events have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...read.tables.lanes import group_rows
from ...read.tables.steps import launched_before, main_thread, process_of_threads, span
from ...read.tables.table import Array, Table, table
from ...read.tables.trace import Trace


@dataclass(frozen=True)
class LoopSteps:
    """The steps of a trace and the GPU work that belongs to them.

    Attributes:
        table: the steps; without any, the whole trace counts as one.
        of_work: for each row of `Trace.gpu`, the step that launched it, or -1.
        before: whether it was launched before the recording.
        of_process: the rows of the steps of each process, in order.
    """

    table: Table
    of_work: Array
    before: Array
    of_process: list[Array]

    def bounds(self, start_ns: Array, end_ns: Array, work_end_ns: Array) -> tuple[Array, Array]:
        """Return when each step starts and ends in ns; a step starts when the one before it in its process ends.

        A step ends, on the CPU and on the GPU, with all its work and that of the steps before it. Steps of
        different processes are independent. The first step starts when the GPU has done the work that was launched
        before the recording, if that is later.

        Args:
            start_ns: the start of each step on the CPU.
            end_ns: the end of each step on the CPU.
            work_end_ns: the end of each row of `Trace.gpu`.
        """
        ends = end_ns.copy()
        rows = np.flatnonzero(self.of_work >= 0)
        np.maximum.at(ends, self.of_work[rows], work_end_ns[rows])
        for steps in self.of_process:
            ends[steps] = np.maximum.accumulate(ends[steps])
        earlier = work_end_ns[self.before].max(initial=start_ns.min())
        starts: Array = np.where(earlier < ends, np.maximum(start_ns, earlier), start_ns)
        for steps in self.of_process:
            starts[steps[1:]] = ends[steps[:-1]]
        return starts, ends

    def recorded_bounds(self, trace: Trace) -> tuple[Array, Array]:
        """Return when each step started and ended in the recording of these steps."""
        return self.bounds(self.table.start_ns, self.table.end_ns, trace.gpu.end_ns)

    def on_cpu(self, start_ns: Array, end_ns: Array) -> Array:
        """Return the time on the CPU from the end of the step before, or the start of the first step, in ns."""
        lengths: Array = end_ns - start_ns
        for steps in self.of_process:
            lengths[steps[1:]] = np.diff(end_ns[steps])
        return lengths


def loop_steps(trace: Trace) -> LoopSteps:
    """Return the steps of a trace with a `loop_thread`."""
    steps, before = trace.steps or _whole_trace(trace), launched_before(trace)
    return LoopSteps(
        steps,
        trace.gpu.step if trace.steps else np.where(before, -1, 0),
        before,
        [rows for _, rows in group_rows(process_of_threads(trace)[steps.thread])],
    )


def loop_thread(trace: Trace) -> int:
    """Return the main thread or, if nothing is recorded on it, the thread with the most events; -1 without any."""
    threads = np.concatenate([each.thread for each in _on_cpu(trace)])
    main, known = main_thread(trace), threads[threads >= 0]
    return main if (known == main).any() or not len(known) else int(np.argmax(np.bincount(known)))


def _on_cpu(trace: Trace) -> tuple[Table, ...]:
    return trace.operators, trace.regions, trace.runtime


def _whole_trace(trace: Trace) -> Table:
    """Return one step from the first to the last event of the loop's thread."""
    thread = loop_thread(trace)
    first, last = span(*(each.where(each.thread == thread) for each in _on_cpu(trace)))
    columns = {"start_ns": first, "duration_ns": last - first, "thread": thread}
    return table("steps", {name: np.array([value]) for name, value in columns.items()}, trace.strings)
