"""The metrics of a trace, exact to the nanosecond, each with its definition, window and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..traces.communication import Collectives, communication_mask
from ..traces.step_lengths import StepLengths
from ..traces.step_work import step_lengths
from ..traces.table import KERNEL, Array, Table
from ..traces.trace import Trace
from . import cpu_step, idle, launches, steps
from .activity import activity, counts, per_gpu, ratio, span, split
from .collectives import collective_table, group_sizes
from .definitions import DEFINITIONS, WINDOWS, Basis, Window
from .groups import GroupedEvents
from .matmul import matmul_table
from .occupancy import blocks_per_sm, occupancy, of_device, sm_efficiency
from .tables import kernel_table, module_table, operator_table, region_table
from .tensor_cores import on_matrix_units


@dataclass(frozen=True)
class About:
    """The meaning of a metric.

    Attributes:
        definition: how the metric is computed, in a sentence.
        unit: the unit of the metric, or of the numbers inside; "1" is a ratio, "table" a list of rows.
        window: the time that the metric covers, in words.
        window_ns: the start and end of that time in ns; None if the trace has no such time.
        coverage: the share of GPU time, from 0 to 1, for which the trace has what the metric needs; None without
            GPU work.
    """

    definition: str
    unit: str
    window: str
    window_ns: tuple[int, int] | None
    coverage: float | None


_SHOWN = 3  # names of metrics in a repr


class Metrics(dict[str, Any]):
    """The metrics of a trace by name, ready for JSON.

    Names end in their unit: ``_ns`` are integer nanoseconds, ``_pct`` percent. Values are integers, floats, lists
    and dicts; None stands for a value that cannot be computed, such as a ratio to a time of 0. `about` gives the
    definition, unit, window and coverage of each metric.
    """

    def __init__(
        self,
        numbers: Mapping[str, Any],
        windows: Mapping[Window, tuple[int, int] | None],
        coverage: Mapping[Basis, float | None],
    ) -> None:
        super().__init__(numbers)
        self._windows = windows
        self._coverage = coverage

    def __repr__(self) -> str:
        return f"<{len(self)} metrics: {', '.join(islice(self, _SHOWN))}, ...>"

    def about(self, key: str) -> About:
        """Return the definition, unit, window and coverage of a metric.

        Args:
            key: the name of the metric.

        Raises:
            KeyError: no metric has this name.
        """
        text, unit, window, basis = DEFINITIONS[key]
        return About(text, unit, WINDOWS[window], self._windows[window], self._coverage[basis])


def metrics(trace: Trace, collectives: Collectives = "auto") -> Metrics:
    """Return all metrics of a trace; `Metrics.about` says what each means.

    ``compute_ns + exposed_comm_ns + exposed_memcpy_ns + idle_ns`` always equals ``span_ns``.

    Args:
        trace: the trace of one process.
        collectives: which kernels communicate: a regular expression that is searched in their names, ignoring
            case; or "auto", for the kernels of `communication.FAMILIES` and those that the trace marks as
            collectives.

    Raises:
        TypeError: ``trace`` is not one trace.
        ValueError: ``collectives`` is not a regular expression.
    """
    if not isinstance(trace, Trace):
        raise TypeError(f'"trace" must be one Trace, such as traces[0] of a TraceSet: {trace!r:.200}')
    return metrics_of(trace, collectives, step_lengths(trace, collectives))


def metrics_of(trace: Trace, collectives: Collectives, lengths: StepLengths | None) -> Metrics:
    """Return the metrics of a trace whose step lengths are already known."""
    gpu, runtime = trace.gpu, trace.runtime
    communicate = communication_mask(gpu, collectives)
    work = GroupedEvents(gpu.start_ns, gpu.end_ns)
    done, (start, end) = activity(gpu, communicate), span(gpu)
    launched, order = idle.launched_at(gpu, runtime), idle.in_order(gpu)
    blocks = blocks_per_sm(gpu, runtime, trace.devices)
    limits = of_device(gpu, {device.id: device.threads_per_sm for device in trace.devices})
    kernel_ns = gpu.duration_ns[gpu.category == KERNEL].sum()
    matrix_ns = int(gpu.duration_ns[on_matrix_units(gpu)].sum())
    loop = steps.window(trace.steps) or _whole(trace)
    numbers = {
        **counts(gpu),
        **split(done, end - start),
        "per_gpu": per_gpu(gpu, communicate, end - start),
        **sm_efficiency(gpu, blocks, end - start),
        **occupancy(gpu, blocks, limits),
        "tensor_core_ns": matrix_ns,
        "tensor_core_share": ratio(matrix_ns, kernel_ns),
        "idle_streams_ns": idle.idle_streams(gpu, launched, order),
        **idle.gaps(gpu, launched, order),
        "launch_to_start_ns": launches.delays(gpu, runtime),
        "launch_calls_ns": launches.calls(gpu, runtime),
        **cpu_step.numbers(trace, loop),
        "queue_length": launches.queue(gpu, launched),
        **launches.syncs(runtime),
        "steps": steps.summary(trace.steps, done),
        "per_step": steps.each(trace.steps, done),
        "step_lengths": steps.lengths_of(trace.steps, lengths),
        "loop": steps.loop(lengths),
        "kernel_table": kernel_table(gpu),
        "operator_table": operator_table(trace.operators, gpu, work),
        "region_table": region_table(trace.regions, gpu, work),
        "module_table": module_table(trace.frames, gpu, work),
        "collective_table": collective_table(gpu, communicate, done.compute, group_sizes(trace)),
        "matmul_table": matmul_table(trace.operators, gpu, work),
    }
    windows, coverage = _windows(trace, launched, lengths), _coverage(trace, blocks, limits, lengths)
    return Metrics(numbers, windows, coverage)


def _windows(
    trace: Trace, launched_ns: Array, lengths: StepLengths | None
) -> dict[Window, tuple[int, int] | None]:
    gpu = span(trace.gpu) if trace.gpu else None
    known = launched_ns[trace.gpu.launch >= 0]
    return {
        "gpu": gpu,
        "steps": steps.window(trace.steps),
        "lengths": steps.lengths_window(trace.steps, lengths),
        "loop": steps.pace_window(lengths),
        "launches": (int(known.min()), gpu[1]) if gpu and len(known) else None,
        "trace": _whole(trace),
        "loop_cpu": steps.window(trace.steps) or _whole(trace),
    }


def _whole(trace: Trace) -> tuple[int, int] | None:
    """Return the first start and the last end of all events; None without events."""
    tables = [table for table in vars(trace).values() if isinstance(table, Table) and table]
    if not tables:
        return None
    return min(int(table.start_ns[0]) for table in tables), max(int(table.end_ns.max()) for table in tables)


def _coverage(
    trace: Trace, blocks: Array, limits: Array, lengths: StepLengths | None
) -> dict[Basis, float | None]:
    gpu = trace.gpu
    kernels = gpu.category == KERNEL
    sized = ~np.isnan(blocks)

    def of(known: Array, among: Array) -> float | None:
        return ratio(int(gpu.duration_ns[known & among].sum()), int(gpu.duration_ns[among].sum()))

    every = np.ones(len(gpu), bool)
    return {
        "all": of(every, every),
        "launch": of(gpu.launch >= 0, every),
        "operator": of(gpu.operator >= 0, every),
        "region": of(gpu.region >= 0, every),
        "module": of(gpu.module >= 0, every),
        "step": of(gpu.step >= 0, every),
        "loop": ratio(lengths.totals.known_ns, lengths.totals.busy_ns) if lengths else None,
        "blocks": of(sized, kernels),
        "occupancy": of(~np.isnan(gpu.occupancy_percent), kernels),
        "threads": of(sized & (gpu.block_threads > 0) & (limits > 0), kernels),
    }
