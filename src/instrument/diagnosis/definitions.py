"""What each number means: the table beside the code that computes them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Window = Literal["gpu", "steps", "lengths", "loop", "launches", "trace"]
Basis = Literal["all", "launch", "operator", "region", "module", "step", "loop", "blocks", "occupancy", "threads"]

WINDOWS: dict[Window, str] = {
    "gpu": "first start to last end of GPU work",
    "steps": "first start to last end of the steps, on the CPU",
    "lengths": "first start of the steps on the CPU to the last end of them and of the work that they launched",
    "loop": "last end of the GPU work of the first step to that of the last",
    "launches": "first launch to last end of GPU work",
    "trace": "all that was recorded",
}


class Definition(NamedTuple):
    """How a number is made.

    Attributes:
        text: the definition, in a sentence.
        unit: "ns", "1" (a ratio), "%", "events", "calls", "gaps" or "table".
        window: when what it counts happened.
        basis: what it needs to know of GPU work; `About.coverage` tells of how much it does.
    """

    text: str
    unit: str
    window: Window = "gpu"
    basis: Basis = "all"


_D = Definition

DEFINITIONS: dict[str, Definition] = {
    "gpu_events": _D("Kernels, copies and fills.", "events"),
    "kernels": _D("Kernels.", "events"),
    "memcpys": _D("Copies.", "events"),
    "memsets": _D("Fills.", "events"),
    "span_ns": _D("From the first start to the last end of GPU work, on any device.", "ns"),
    "busy_ns": _D("Time at which any stream of any device works.", "ns"),
    "idle_ns": _D("span_ns - busy_ns.", "ns"),
    "compute_ns": _D("Time at which a fill runs, or a kernel that does not communicate.", "ns"),
    "kernel_compute_ns": _D("Time at which a kernel runs that does not communicate.", "ns"),
    "comm_ns": _D("Time at which a kernel runs that communicates.", "ns"),
    "memcpy_ns": _D("Time at which a copy runs.", "ns"),
    "memset_ns": _D("Time at which a fill runs.", "ns"),
    "exposed_comm_ns": _D("The part of comm_ns outside compute_ns.", "ns"),
    "exposed_memcpy_ns": _D("The part of memcpy_ns outside compute_ns and comm_ns.", "ns"),
    "overlap_comm_compute_ns": _D("The part of comm_ns inside kernel_compute_ns.", "ns"),
    "kernel_sum_ns": _D("Durations of kernels, added up.", "ns"),
    "kernel_util_span": _D("Time at which a kernel runs / span_ns.", "1"),
    "busy_pct": _D("busy_ns / span_ns.", "%"),
    "idle_pct": _D("100 - busy_pct.", "%"),
    "per_gpu": _D(
        "For each GPU, by `device` (-1: unknown): pieces of work, their durations added up (`work_ns`), and of "
        "span_ns, which all have in common, compute + exposed communication + exposed memcpy + idle. Other "
        "numbers are of all GPUs: times at which any works, and sums over all.",
        "table",
    ),
    "sm_eff_span": _D(
        "Integral of min(1, blocks for each multiprocessor of all kernels that run) / span_ns; mean over devices.",
        "1",
        basis="blocks",
    ),
    "sm_eff_kernel_time": _D(
        "The same integral / time at which kernels run whose blocks are known.", "1", basis="blocks"
    ),
    "occ_weighted": _D("Estimated achieved occupancy of kernels, weighted by duration.", "%", basis="occupancy"),
    "occ_weighted_nonzero": _D("The same of the kernels that have more than 0 %.", "%", basis="occupancy"),
    "occ_zero_kernels": _D("Kernels with an estimated achieved occupancy of 0 %.", "events", basis="occupancy"),
    "occ_limit_weighted": _D(
        "Occupancy if all blocks fit: min(1, blocks for each multiprocessor * threads a block / threads a "
        "multiprocessor holds), weighted by duration.",
        "%",
        basis="threads",
    ),
    "tensor_core_ns": _D("Durations of kernels whose names tell matrix units, added up.", "ns"),
    "tensor_core_share": _D("tensor_core_ns / kernel_sum_ns.", "1"),
    "idle_streams_ns": _D(
        "Gaps between pieces of work of a stream, by cause, with `n` pieces: host_wait if launched after the "
        "one before ended, else kernel_wait below 30 us, else other; overlaps count negative.",
        "ns",
        basis="launch",
    ),
    "gaps_device_ns": _D(
        "Gaps at which nothing works, by what the work after them waited for: host_wait if launched in the gap, "
        "else launch_latency below 30 us, else other; unknown without launch.",
        "ns",
        basis="launch",
    ),
    "gaps_device_n": _D("The number of those gaps.", "gaps", basis="launch"),
    "max_gap_ns": _D("The longest of those gaps.", "ns"),
    "n_gaps": _D("How many gaps there are; work without duration divides one.", "gaps"),
    "launch_to_start_ns": _D(
        "From the begin of the launching call to the start of the kernel: median, 95th percentile (by rank), "
        "and kernels with and without launch.",
        "ns",
        basis="launch",
    ),
    "launch_calls_ns": _D(
        "Durations of the calls that launched work: how many, sum, median and longest.", "ns", "launches", "launch"
    ),
    "queue_length": _D(
        "Work launched and not yet finished: the most, and the mean from the first launch to the last end.",
        "events",
        "launches",
        "launch",
    ),
    "sync_calls": _D("Calls of runtime functions named ...Synchronize.", "calls", "trace"),
    "sync_union_ns": _D("Time at which any thread is in one of them.", "ns", "trace"),
    "dtod": _D("Copies within a device: `n`, `ns` added up, `bytes` as far as known.", "ns"),
    "kernels_lt_10us": _D("Kernels shorter than 10 us.", "events"),
    "steps": _D(
        "Steps marked on the CPU, the shortest, the median and the longest, the time from the first start to the "
        "last end, and the share of it at which a kernel runs (GPU utilisation).",
        "ns",
        "steps",
    ),
    "per_step": _D(
        "For each step, what any GPU did between the step's start and its end on the CPU, whoever launched it: "
        "compute + exposed communication + exposed memcpy + idle = duration. A CPU that runs ahead ends its steps "
        "before the GPU does: see step_lengths for the work that a step launched.",
        "table",
        "steps",
    ),
    "step_lengths": _D(
        "For each step, its length on the CPU (`cpu_ns`) and of the GPU work that it launched, whenever that ran: "
        "`gpu_ns` from the first start to the last end; `gpu_period_ns` from the last end of the work of the "
        "steps before it to that of its own; `run_ahead_ns` from its end on the CPU to the last end of its work; "
        "`launch_delay_ns` from the launching call to the start of its first work; `gpu_busy_ns` of `gpu_ns` at "
        "which the GPU works, in the mean over those that the step uses.",
        "table",
        "lengths",
        "step",
    ),
    "loop": _D(
        'What bounds the loop: "gpu" if the GPU waits for launches (it idles, and its next work was launched '
        'after it had run out) at most 10 % of the window; else "both" if the CPU waits for the GPU more than '
        '10 % of the same steps on the CPU; else "cpu"; null if that is unknown, see `unknown`. '
        "`exposed_comm_share` and `gpu_waits_share` are of the window; `cpu_waits_share` is of the time from the "
        "end of the first step on the CPU to that of the last, and `queue_waits_share` the part of it in launches "
        "that waited for room in the queue of the GPU. `gpu_step_ns` is the "
        "window / `steps`, `cpu_step_ns` that between the ends of the same steps on the CPU, "
        "`synchronized_step_ns` the wall time between waits at one place of the step that left the GPU without "
        "work, and `step_ns` the one of them that `clock` names.",
        "ns",
        "loop",
        "loop",
    ),
    "kernel_table": _D("Kernels by name; `share` is of kernel_sum_ns.", "table"),
    "operator_table": _D(
        "Operators by name: calls, CPU time less children, GPU work of its own, with that of children, and the "
        "time at which any of that runs.",
        "table",
        "trace",
        "operator",
    ),
    "region_table": _D(
        "Named regions: calls, CPU time, and of the GPU work launched inside its durations added up, the time at "
        "which any of it runs, and first start to last end, call by call, added up.",
        "table",
        "trace",
        "region",
    ),
    "module_table": _D("Modules, as regions.", "table", "trace", "module"),
    "collective_table": _D(
        "Kernels that communicate by collective, group and type: `exposed_ns` is of each kernel while nothing "
        "computes, added up; `bytes` of the larger of input and output.",
        "table",
    ),
    "matmul_table": _D(
        "Products of matrices by shapes: `flops` = 2*m*n*k*batch and `bytes` (inputs and result once) of a call, "
        "`flops_per_s` by the GPU time under those calls that have any.",
        "table",
        "trace",
        "operator",
    ),
}
