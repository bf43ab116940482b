"""`Replayer`: replays a trace, unchanged and with changes, and says how exact that is."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...read.tables.table import Array
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, communication_mask
from .critical_path import CriticalPath, critical_path
from .graph import Graph, build_graph
from .loop_steps import loop_thread
from .replay import Change, Replay, replay, replay_changed, step_lengths, steps_on_cpu, weights

_MAX_ERROR = 0.05  # of a step, in the replay of the unchanged trace
_MAX_UNKNOWN = 0.1  # of the GPU work, without a known launch


def mean_ns(values: Array) -> int:
    """Return the mean of times in ns, rounded: what a loop takes, divided by its steps."""
    return round(float(np.mean(values)))


def lower_median(values: Array) -> int:
    """Return the median of integers; of an even number, the lower of the middle two."""
    return int(np.sort(values)[(len(values) - 1) // 2])


class Replayer:
    """Replays one trace; the graph is built once.

    Args:
        trace: the trace.
        collectives: which kernels communicate, as in `instrument.metrics`.
    """

    def __init__(self, trace: Trace, collectives: Collectives = "auto") -> None:
        self.trace, self.collectives = trace, collectives

    @property
    def has_cpu(self) -> bool:
        """Whether the trace has events on a thread; without them, there is no graph."""
        return bool(self.trace.steps) or loop_thread(self.trace) >= 0

    @cached_property
    def graph(self) -> Graph:
        """The graph of the trace."""
        return build_graph(self.trace)

    @cached_property
    def communication(self) -> Array:
        """A mask of the GPU work that communicates."""
        return communication_mask(self.trace.gpu, self.collectives)

    @cached_property
    def unchanged(self) -> Replay:
        """The replay without a change."""
        return replay(self.graph, self.graph.edges, weights(self.graph))

    @cached_property
    def recorded_ns(self) -> Array:
        """The recorded lengths of the steps in ns; see `LoopSteps.bounds`."""
        starts, ends = self.graph.loop.recorded_bounds(self.trace)
        lengths: Array = ends - starts
        return lengths

    @cached_property
    def errors(self) -> Array:
        """For each step, |replayed - recorded| / recorded, without a change."""
        replayed = step_lengths(self.graph, self.unchanged.times_ns)
        errors: Array = np.abs(replayed - self.recorded_ns) / np.maximum(self.recorded_ns, 1)
        return errors

    @cached_property
    def abstained(self) -> str | None:
        """Why nothing is predicted; None if something can be."""
        if not self.has_cpu:
            return "the trace has no events on the CPU"
        if self.graph.incomplete:
            return self.graph.incomplete
        unknown, work = int(self.graph.order.unknown.sum()), len(self.trace.gpu)
        if unknown > _MAX_UNKNOWN * work:
            return f"the launches of {unknown:,} of {work:,} kernels, memcpys and memsets are not in the trace"
        before_ns = int(self.trace.gpu.duration_ns[self.graph.order.before].sum())
        if not self.trace.steps and before_ns > _MAX_UNKNOWN * int(self.trace.gpu.duration_ns.sum()):
            return "much of the GPU work was launched before the recording, and the trace has no steps"
        error = float(np.median(self.errors))
        if error > _MAX_ERROR:
            return f"the replay without a change is {100 * error:.1f} % off, more than {100 * _MAX_ERROR:.0f} %"
        return None

    @cached_property
    def recorded_path(self) -> CriticalPath:
        """The critical path without a change."""
        return critical_path(self.graph, self.unchanged, self.communication)

    def step_ns(self, change: Change) -> int:
        """Return the length of a step with a change in ns: the mean of the steps.

        Each step is as long as recorded, plus the difference between its replays with and without the change. In
        the long run, steps take no less than on the CPU, even if the GPU lags behind at first; and no longer than
        recorded, if nothing becomes slower.
        """
        before, after = self.unchanged.times_ns, replay_changed(self.graph, change).times_ns
        longer = step_lengths(self.graph, after) - step_lengths(self.graph, before)
        predicted = mean_ns(np.maximum(self.recorded_ns + longer, 0))
        if not change.slows:
            recorded = mean_ns(self.recorded_ns)
            predicted = min(max(predicted, mean_ns(steps_on_cpu(self.graph, after))), recorded)
        return predicted

    def critical_path(self, change: Change) -> CriticalPath:
        """Return the critical path with a change."""
        if not change:
            return self.recorded_path
        return critical_path(self.graph, replay_changed(self.graph, change), self.communication)
