"""The metrics of a trace, exact to the nanosecond, each with its definition, window and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from ...read.measures.step_lengths import StepLengths, step_lengths
from ...read.tables.steps import span
from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import Trace
from ...read.tables.work_classes import Collectives, communication_mask
from . import idle, launches, steps, utilization
from .collectives import collective_table, group_sizes
from .counters import Counters
from .matmul_table import matmul_table, on_matrix_units
from .tables import GroupedEvents, kernel_table, module_table, operator_table, region_table
from .utilization import ratio

Window = Literal["gpu", "steps", "lengths", "loop", "launches", "trace", "loop_cpu"]
Basis = Literal[
    "all", "launch", "operator", "region", "module", "step", "loop", "blocks", "occupancy", "threads", "counters",
    "power",
]  # fmt: skip

WINDOWS: dict[Window, str] = {
    "gpu": "first start to last end of GPU work",
    "steps": "first start to last end of the steps, on the CPU",
    "lengths": "first start of the steps on the CPU to the last end of the steps and of the work that they "
    "launched",
    "loop": "last end of the GPU work of the first step to the last end of the GPU work of the last",
    "launches": "first launch to last end of GPU work",
    "trace": "the whole recording",
    "loop_cpu": "first start to last end of the steps on the CPU; without steps, the whole recording",
}


class Definition(NamedTuple):
    """The definition of a metric.

    Attributes:
        text: the definition, in a sentence.
        unit: "ns", "1" (a ratio), "%", "events", "calls", "gaps" or "table".
        window: the time that it covers.
        basis: what must be known of the GPU work; `About.coverage` is the share of which it is known.
    """

    text: str
    unit: str
    window: Window = "gpu"
    basis: Basis = "all"


_D = Definition

DEFINITIONS: dict[str, Definition] = {
    "gpu_events": _D("Kernels, memcpys and memsets.", "events"),
    "kernels": _D("Kernels.", "events"),
    "memcpys": _D("Memcpys.", "events"),
    "memsets": _D("Memsets.", "events"),
    "span_ns": _D("From the first start to the last end of GPU work, on any device.", "ns"),
    "busy_ns": _D("Time during which any stream of any device works.", "ns"),
    "idle_ns": _D("span_ns - busy_ns.", "ns"),
    "compute_ns": _D("Time during which a memset or a kernel that does not communicate runs.", "ns"),
    "kernel_compute_ns": _D("Time during which a kernel that does not communicate runs.", "ns"),
    "comm_ns": _D("Time during which a kernel that communicates runs.", "ns"),
    "memcpy_ns": _D("Time during which a memcpy runs.", "ns"),
    "memset_ns": _D("Time during which a memset runs.", "ns"),
    "exposed_comm_ns": _D("The part of comm_ns outside compute_ns.", "ns"),
    "exposed_memcpy_ns": _D("The part of memcpy_ns outside compute_ns and comm_ns.", "ns"),
    "overlap_comm_compute_ns": _D("The part of comm_ns inside kernel_compute_ns.", "ns"),
    "kernel_sum_ns": _D("Sum of the durations of kernels.", "ns"),
    "kernel_util_span": _D("Time during which a kernel runs / span_ns.", "1"),
    "busy_pct": _D("busy_ns / span_ns.", "%"),
    "idle_pct": _D("100 - busy_pct.", "%"),
    "per_gpu": _D(
        "For each GPU, by `device` (-1: unknown): the number of kernels, memcpys and memsets, the sum of their "
        "durations (`work_ns`), and how it spent span_ns, which all GPUs share: compute + exposed communication + "
        "exposed memcpy + idle. All other metrics cover all GPUs: times during which any works, or their sums.",
        "table",
    ),
    "sm_eff_span": _D(
        "Integral of min(1, blocks per multiprocessor of all running kernels) / span_ns; mean over devices.",
        "1",
        basis="blocks",
    ),
    "sm_eff_kernel_time": _D(
        "The same integral / time during which kernels with known blocks run.", "1", basis="blocks"
    ),
    "occ_weighted": _D("Estimated achieved occupancy of kernels, weighted by duration.", "%", basis="occupancy"),
    "occ_weighted_nonzero": _D("occ_weighted over the kernels with more than 0 %.", "%", basis="occupancy"),
    "occ_zero_kernels": _D("Kernels with an estimated achieved occupancy of 0 %.", "events", basis="occupancy"),
    "occ_limit_weighted": _D(
        "Occupancy if all blocks fit: min(1, blocks per multiprocessor * threads per block / threads that a "
        "multiprocessor holds), weighted by duration.",
        "%",
        basis="threads",
    ),
    "tensor_core_ns": _D("Sum of the durations of kernels whose names show that they run on matrix units.", "ns"),
    "tensor_core_share": _D("tensor_core_ns / kernel_sum_ns.", "1"),
    "idle_streams_ns": _D(
        "Gaps between successive work on each stream, by cause, with the number of events `n`: host_wait if the "
        "work was launched after the work before it ended, else kernel_wait below 30 us, else other; overlaps "
        "count as negative.",
        "ns",
        basis="launch",
    ),
    "gaps_device_ns": _D(
        "Gaps during which no GPU works, by the cause of the delay of the next work: host_wait if it was launched "
        "during the gap, else launch_latency below 30 us, else other; unknown without a launch.",
        "ns",
        basis="launch",
    ),
    "gaps_device_n": _D("The number of those gaps.", "gaps", basis="launch"),
    "max_gap_ns": _D("The longest of those gaps.", "ns"),
    "n_gaps": _D("The number of gaps; work of zero duration splits a gap.", "gaps"),
    "launch_to_start_ns": _D(
        "From the start of the launching call to the start of the kernel: median, 95th percentile (by rank), and "
        "the numbers of kernels with and without a launch.",
        "ns",
        basis="launch",
    ),
    "launch_calls_ns": _D(
        "Durations of the calls that launched work: number, sum, median and longest.", "ns", "launches", "launch"
    ),
    "queue_length": _D(
        "Work launched and not yet finished: the maximum, and the mean from the first launch to the last end.",
        "events",
        "launches",
        "launch",
    ),
    "cpu_ns": _D(
        "From the start of the first step to the end of the last; without steps, the whole recording.",
        "ns",
        "loop_cpu",
    ),
    "cpu_input_ns": _D("Time of cpu_ns during which the loop waits for its next batch.", "ns", "loop_cpu"),
    "cpu_comm_ns": _D(
        "Time outside cpu_input_ns during which the loop runs or waits for a collective.", "ns", "loop_cpu"
    ),
    "cpu_operators_ns": _D("Other time during which the thread of the loop runs an operator.", "ns", "loop_cpu"),
    "cpu_other_ns": _D(
        "cpu_ns - cpu_input_ns - cpu_comm_ns - cpu_operators_ns: Python, and libraries without operators.",
        "ns",
        "loop_cpu",
    ),
    "sync_calls": _D("Calls of runtime functions named ...Synchronize.", "calls", "trace"),
    "sync_union_ns": _D("Time during which any thread is in such a call.", "ns", "trace"),
    "dtod": _D(
        "Memcpys within a device: their number `n`, the sums `ns` of durations and `bytes` as far as known.", "ns"
    ),
    "kernels_lt_10us": _D("Kernels shorter than 10 us.", "events"),
    "steps": _D(
        "Steps marked on the CPU: the shortest, the median and the longest, the time from the first start to the "
        "last end, and the share of it during which a kernel runs (GPU utilization).",
        "ns",
        "steps",
    ),
    "per_step": _D(
        "For each step, what the GPUs did between the step's start and end on the CPU, whichever step launched "
        "it: compute + exposed communication + exposed memcpy + idle = duration. A CPU that runs ahead ends its "
        "steps before the GPU does: see step_lengths for the work that a step launched.",
        "table",
        "steps",
    ),
    "step_lengths": _D(
        "For each step, its length on the CPU (`cpu_ns`) and the times of the GPU work that it launched, whenever "
        "that ran: `gpu_ns` from the first start to the last end; `gpu_period_ns` from the last end of the work "
        "of the steps before it to the last end of its own work; `run_ahead_ns` from its end on the CPU to the "
        "last end of its work; `launch_delay_ns` from the launching call to the start of its first work; "
        "`gpu_busy_ns`, the part of `gpu_ns` during which the GPU works, as the mean over the GPUs that the step "
        "uses.",
        "table",
        "lengths",
        "step",
    ),
    "loop": _D(
        'What bounds the loop: "gpu" if the GPU waits for launches (it idles, and its next work was launched '
        'after it had run out) at most 10 % of the window; else "both" if the CPU waits for the GPU more than '
        '10 % of the same steps on the CPU; else "cpu"; null if that is unknown, and `unknown` says why. '
        "`exposed_comm_share` and `gpu_waits_share` are shares of the window; `cpu_waits_share` is a share of the "
        "time from the end of the first step on the CPU to the end of the last, and `queue_waits_share` its part "
        "in launches that waited for room in the queue of the GPU. `gpu_step_ns` is the window / `steps`; "
        "`cpu_step_ns` is the mean time between the ends of the same steps on the CPU; `synchronized_step_ns` is "
        "the mean wall time between synchronizations at one place of the step that left the GPU without work; "
        "`step_ns` is the one that `clock` names.",
        "ns",
        "loop",
        "loop",
    ),
    "kernel_table": _D(
        "Kernels by name, each with a family and a short name that no other kernel of the trace has; `share` is "
        "the share of kernel_sum_ns.",
        "table",
    ),
    "operator_table": _D(
        "Operators by name: calls, CPU time without children, GPU work without and with children, and the time "
        "during which any of the latter runs.",
        "table",
        "trace",
        "operator",
    ),
    "region_table": _D(
        "Named regions: calls, CPU time, and for the GPU work launched inside the sum of its durations, the time "
        "during which any of it runs, and the sum over calls of the time from first start to last end.",
        "table",
        "trace",
        "region",
    ),
    "module_table": _D("Modules, with the columns of region_table.", "table", "trace", "module"),
    "collective_table": _D(
        "Kernels that communicate, by collective, group and type: `exposed_ns` adds up the time of each kernel "
        "during which nothing computes; `bytes` is the size of the larger of input and output; `bus_bytes_per_s` "
        "is `bytes_per_s` times the factor of nccl-tests for n ranks (all-reduce: 2 (n - 1) / n).",
        "table",
    ),
    "matmul_table": _D(
        "Matmuls by shapes: `flops` = 2*m*n*k*batch and `bytes` (each input and the result once) of one call; "
        "`flops_per_s` over the GPU time of the calls that have any.",
        "table",
        "trace",
        "operator",
    ),
    "counter_table": _D(
        "Counters that the profiler sampled, by name and `device` (-1: unknown), with their `unit` as far as "
        "the file says it: the number of `samples`, the median time between two (`period_ns`), and the mean, the "
        "least and the greatest sample. Of more than 200 counters, those with the most samples.",
        "table",
        "trace",
    ),
    "counted_families": _D(
        "Families of kernels by `device`, as sampled counters show them: `sm_active` is the mean share of the "
        "multiprocessors with work, `dram_share` and `dram_bytes_per_s` the traffic of the memory; if only one of "
        "these two was sampled, the other follows from the data sheet of the GPU. A sample counts if kernels of "
        "the family run for 95 % of its time, and other work for 5 % at most. `sm_active_ns` and `dram_ns` are "
        "the time of the family in such samples, of `kernel_ns`: with less than three, or than a tenth, the value "
        "is null, as where kernels are shorter than the period of the samples.",
        "table",
        "gpu",
        "counters",
    ),
    "energy": _D(
        "The sum over the GPUs of the mean of the sampled power (`watts`), which the driver may have averaged "
        "over a second; and, if it is known for 90 % of the window, its product with the length of the window in "
        "seconds (`joules`), that / the number of steps (`joules_per_step`), and that / the samples of a step "
        "(`joules_per_sample`), where `instrument.every` was told them when the trace was recorded.",
        "J",
        "loop_cpu",
        "power",
    ),
}


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
        raise TypeError(
            f'"trace" must be one Trace, such as read_trace(path) or read_traces(folder)[0]: {trace!r:.200}'
        )
    return metrics_of(trace, collectives, step_lengths(trace, collectives))


def metrics_of(trace: Trace, collectives: Collectives, lengths: StepLengths | None) -> Metrics:
    """Return the metrics of a trace whose step lengths are already known."""
    gpu, runtime = trace.gpu, trace.runtime
    communicate = communication_mask(gpu, collectives)
    work = GroupedEvents(gpu.start_ns, gpu.end_ns)
    done, (start, end) = utilization.activity(gpu, communicate), span(gpu)
    launched, order = idle.launched_at(gpu, runtime), np.lexsort((gpu.event, gpu.start_ns))
    blocks = utilization.blocks_per_sm(gpu, runtime, trace.devices)
    limits = utilization.of_device(gpu, {device.id: device.threads_per_sm for device in trace.devices})
    kernel_ns = gpu.duration_ns[gpu.category == KERNEL].sum()
    matrix_ns = int(gpu.duration_ns[on_matrix_units(gpu)].sum())
    loop = steps.window(trace.steps) or _whole(trace)
    counters = Counters(trace)
    energy, power = counters.energy(loop, len(trace.steps))
    numbers = {
        **utilization.counts(gpu),
        **utilization.split(done, end - start),
        "per_gpu": utilization.per_gpu(gpu, communicate, end - start),
        **utilization.sm_efficiency(gpu, blocks, end - start),
        **utilization.occupancy(gpu, blocks, limits),
        "tensor_core_ns": matrix_ns,
        "tensor_core_share": ratio(matrix_ns, kernel_ns),
        "idle_streams_ns": idle.idle_streams(gpu, launched, order),
        **idle.gaps(gpu, launched, order),
        "launch_to_start_ns": launches.delays(gpu, runtime),
        "launch_calls_ns": launches.calls(gpu, runtime),
        **steps.cpu_numbers(trace, loop),
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
        "counter_table": counters.table(),
        "counted_families": counters.families,
        "energy": energy,
    }
    windows, coverage = _windows(trace, launched, lengths), _coverage(trace, blocks, limits, lengths)
    coverage |= {"counters": counters.known(), "power": power}
    return Metrics(numbers, windows, coverage)


def _windows(
    trace: Trace, launched_ns: Array, lengths: StepLengths | None
) -> dict[Window, tuple[int, int] | None]:
    gpu = span(trace.gpu) if trace.gpu else None
    launches_ns = launched_ns[trace.gpu.launch >= 0]
    on_cpu, ends = steps.window(trace.steps), steps.gpu_ends(lengths)
    return {
        "gpu": gpu,
        "steps": on_cpu,
        "lengths": on_cpu and (on_cpu[0], max([on_cpu[1], *ends])),
        "loop": (ends[0], max(ends)) if lengths and lengths.totals.gpu_ns else None,
        "launches": (int(launches_ns.min()), gpu[1]) if gpu and len(launches_ns) else None,
        "trace": _whole(trace),
        "loop_cpu": on_cpu or _whole(trace),
    }


def _whole(trace: Trace) -> tuple[int, int] | None:
    """Return the first start and the last end of all events; None without events."""
    tables = [table for table in vars(trace).values() if isinstance(table, Table) and table]
    return span(*tables) if tables else None


def _coverage(
    trace: Trace, blocks: Array, limits: Array, lengths: StepLengths | None
) -> dict[Basis, float | None]:
    gpu = trace.gpu
    kernels = gpu.category == KERNEL
    sized = ~np.isnan(blocks)

    def of(has: Array, among: Array) -> float | None:
        return ratio(int(gpu.duration_ns[has & among].sum()), int(gpu.duration_ns[among].sum()))

    every = np.ones(len(gpu), bool)
    links: tuple[Basis, ...] = ("launch", "operator", "region", "module", "step")
    return {
        "all": of(every, every),
        **{link: of(gpu[link] >= 0, every) for link in links},
        "loop": ratio(lengths.totals.known_ns, lengths.totals.busy_ns) if lengths else None,
        "blocks": of(sized, kernels),
        "occupancy": of(~np.isnan(gpu.occupancy_percent), kernels),
        "threads": of(sized & (gpu.block_threads > 0) & (limits > 0), kernels),
    }
