"""Rules on the CPU: launches, regions that start slowly, and the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import count, counted, duration
from ...read.measures.launches import GRAPH_LAUNCH
from ...read.tables.intervals import merge_overlaps
from ...read.tables.table import Array
from ..metrics.idle import INPUT
from ..metrics.tables import sum_by_group
from ..replay.requests import is_fused, launched_inside, optimizer_ranges
from .idle import idle_of, percent_of_step
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, both, require

QUERIES = re.compile("Occupancy|Func(?:Get|Set)Attribute|GetDeviceProperties|DeviceGetAttribute")
"""Calls of the runtime that ask for occupancy, or for attributes of kernels and devices."""


@rule("launch-overhead", on_cpu=True, gpu=True, share=0.05, of="overhead")
def launch_overhead(facts: TraceFacts, *, short_us: float = 10) -> Iterator[Finding]:
    """The GPU idles because the CPU does not launch its work fast enough.

    Needs GPU work with known launches. The time to win is the idle time in gaps that began before the next work
    was launched, unless another cause is known (see ``idle_by_cause``). A gap of over 1 ms is too long for the
    cost of a launch: if such gaps make up half of the time, the finding reports that the CPU does something else.
    nsys-ai takes kernels shorter than 10 us as a sign; the threshold, 5 % of the step, is half of xprof's for all
    idle time.
    """
    win = facts.win_by("--launch 0.1x", facts.per_step(facts.idle.total("launch_overhead")))
    if not win or not facts.kernels:
        return
    long = facts.idle.long_gaps("launch_overhead")
    if long is not None:
        yield _busy_elsewhere(facts, win, long)
        return
    kernels = facts.kernels.duration_ns
    short = float(np.mean(kernels < 1000 * short_us))
    per_step = facts.calls(len(kernels))
    graphs = int(facts.trace.runtime.matching("name", GRAPH_LAUNCH).sum())
    yield facts.finding(
        f"The GPU idles {percent_of_step(facts, win)} because the CPU launches work too slowly: "
        f"{counted(per_step, 'kernel')} {facts.each_gpu_step}, {100 * short:.0f} % shorter than {short_us:g} us",
        idle_of(facts, "launch_overhead"),
        facts.gpu_count("kernels_per_step", len(kernels), "Kernels per step."),
        Evidence("median_kernel_ns", float(np.median(kernels)), "ns", "Median duration of a kernel."),
        Evidence("short_kernels", short, "1", f"Share of the kernels shorter than {short_us:g} us."),
        Evidence("graph_launches", graphs, "events", "Launches of CUDA graphs in the trace."),
        win_ns=win,
        fix=Fix(
            "Fuse kernels with torch.compile, launch them as a CUDA graph (reduce-overhead does both), or give "
            "each kernel more work with a larger batch.",
            "model = MyModel().cuda()",
            'model = torch.compile(MyModel().cuda(), mode="reduce-overhead")',
        ),
        coverage=facts.metrics.about("gaps_device_ns").coverage,
    )


def _busy_elsewhere(facts: TraceFacts, win: int, long: Array) -> Finding:
    """Return the finding if most of the idle time is in few long gaps, the rows ``long`` of the gaps."""
    late = facts.idle.by_cause["launch_overhead"]
    gap = int(np.argmax(late))
    after = np.flatnonzero(facts.gpu.start_ns >= facts.idle.end_ns[gap])[:1]
    return facts.finding(
        f"The GPU idles {percent_of_step(facts, win)}, most of it in {counted(len(long), 'gap')} of over 1 ms "
        "in which the CPU launches nothing",
        idle_of(facts, "launch_overhead"),
        Evidence("long_gaps", len(long), "events", "Gaps of over 1 ms in the window."),
        Evidence("longest_ns", int(late[gap]), "ns", "The longest of these gaps."),
        win_ns=int(win),
        confidence="medium",
        fix=Fix(
            "Find out what the CPU does before the launch that ends the longest gap, such as loading data, "
            "logging, or saving a checkpoint. Record with stacks, or name regions, to see the place here."
        ),
        coverage=facts.metrics.about("gaps_device_ns").coverage,
        at=facts.place_of(facts.gpu.where(after)),
    )


@rule("cold-first-step", on_cpu=True)
def cold_first_step(facts: TraceFacts, *, ratio: float = 1.5) -> Iterator[Finding]:
    """The first recorded step is much longer than the others.

    Needs three steps. Typical causes are workspaces, cuBLAS heuristics, modules that are loaded at their first
    use, and an empty allocator. The cost occurs once: leave the step out of averages. torch recommends warm-up
    steps in its schedule for the same reason; the ratio 1.5 is this library's choice.
    """
    lengths = facts.trace.steps.duration_ns
    require(len(lengths) >= 3, "fewer than three steps are recorded")
    usual = float(np.median(lengths[1:]))
    if not usual or lengths[0] < ratio * usual:
        return
    yield facts.finding(
        f"The first recorded step takes {lengths[0] / usual:.1f} times as long as the others: "
        "leave it out of averages",
        Evidence("first_ns", int(lengths[0]), "ns", "Duration of the first step on the CPU."),
        Evidence("usual_ns", usual, "ns", "Median duration of the other steps on the CPU."),
        severity="low",
        fix=facts.after_warm_up("Record later steps, after a warm-up."),
        step=int(facts.trace.steps.number[0]),
    )


@rule("slow-region-start", on_cpu=True, of="overhead")
def slow_region_start(facts: TraceFacts, *, share: float = 0.03) -> Iterator[Finding]:
    """Time passes in Python between the start of a region and its first operator.

    Needs regions and operators. Regions that wait for a batch do not count. The time to win is at most the time
    that the GPU idles for later launches. The threshold of 3 % is this library's choice.
    """
    regions, operators = facts.trace.regions, facts.trace.operators
    if not regions or not operators:
        raise MissingEvidenceError(facts.lacks_operators or "the trace has no regions")
    facts.require_gpu()
    rows = np.flatnonzero(~regions.matching("name", INPUT) & (regions.thread == facts.main_thread))
    rows = rows[(regions.start_ns[rows] >= facts.recorded[0]) & (regions.end_ns[rows] <= facts.recorded[1])]
    tables = (operators, regions, facts.trace.runtime)
    events = np.sort(np.concatenate([table.start_ns[table.thread == facts.main_thread] for table in tables]))
    following = np.searchsorted(events, regions.start_ns[rows], "right")
    rows, following = rows[following < len(events)], following[following < len(events)]
    dead = np.minimum(events[following], regions.end_ns[rows]) - regions.start_ns[rows]
    names, of = np.unique(regions.name[rows], return_inverse=True)
    process, starts = int(facts.process_of[facts.main_thread]), regions.start_ns[rows]
    sums = sum_by_group(dead, of, len(names)).tolist()
    for place, (name, ns) in enumerate(zip(names.tolist(), sums, strict=True)):
        if facts.share(facts.per_step(ns)) < share:
            continue
        own = of == place
        times = merge_overlaps(starts[own], starts[own] + dead[own])
        win = facts.per_step(facts.cpu_bound_ns(process, times))
        if facts.share(win) < share:
            continue
        text = regions.strings[name]
        yield facts.finding(
            f"{duration(facts.per_step(ns))} {facts.each_step} pass between the start of {text} "
            "and its first operator",
            facts.step_time(
                "dead_ns", ns, "Time per step from the start of the region to the next event on its thread."
            ),
            win_ns=win,
            fix=Fix("Look at the Python code at the start of the region; record with stacks to see the lines."),
            region=(text,),
            confidence="medium",
        )


@rule("occupancy-queries", on_cpu=True, gpu=True, share=0.01, of="overhead")
def occupancy_queries(facts: TraceFacts) -> Iterator[Finding]:
    """Launches query occupancy, or attributes of kernels and devices, each time.

    Needs calls of the CUDA or HIP runtime. Libraries make such calls before kernels with a computed grid or much
    shared memory; the calls can cost as much CPU time as the launch itself. The time to win is the time of these
    calls, at most the time that the GPU idles for later launches.
    """
    runtime = facts.trace.runtime
    queries, ns = facts.of_one_process(runtime.where(runtime.matching("name", QUERIES)))
    win = facts.cpu_win(queries)
    calls = len(queries) / facts.steps
    yield facts.finding(
        f"{count(calls)} calls {facts.each_step} query attributes of kernels and devices, and take "
        f"{duration(facts.per_step(ns))}",
        Evidence("calls_per_step", calls, "events", "Queries per step." + facts.whose),
        facts.cpu_time("calls_ns", ns, "CPU time of the queries per step."),
        win_ns=win,
        fix=Fix("Launch the work as a CUDA graph, which does not repeat these calls."),
    )


@rule("for-loop-optimizer", on_cpu=True, gpu=True, share=0.01, of="overhead")
def for_loop_optimizer(facts: TraceFacts, *, kernels: int = 100) -> Iterator[Finding]:
    """The optimizer launches several kernels for each parameter.

    Needs the range that torch records around an optimizer's step. Foreach and fused implementations update many
    parameters with one kernel. The time to win is the optimizer's time on the CPU, at most the time that the GPU
    idles for later launches, and the time of its kernels.
    """
    found = optimizer_ranges(facts.trace)
    if found is None:
        raise MissingEvidenceError("the trace has no range of an optimizer")
    table, link, rows = found
    rows_of_work = np.flatnonzero(launched_inside(table, rows, facts.gpu[link]))
    work = facts.gpu.where(rows_of_work)
    fused = is_fused(work)
    alone = work.where(~fused)
    rows_alone = rows_of_work[~fused]
    per_step = facts.calls(len(alone))
    if per_step < kernels or fused.sum() > len(alone):
        return
    ranges, cpu_ns = facts.of_one_process(table.where(rows))
    most = both(facts.cpu_win(ranges), facts.gpu_win(rows_alone))
    win = facts.win_by("--fuse optimizer", most, most.hidden_ns)
    yield facts.finding(
        f"The optimizer launches {count(per_step)} kernels {facts.each_gpu_step}, most for one parameter each",
        facts.gpu_count("kernels_per_step", len(alone), "GPU work of the optimizer per step."),
        facts.cpu_time("cpu_ns", cpu_ns, "Time of the optimizer on the CPU per step."),
        facts.gpu_time("gpu_ns", int(work.duration_ns.sum()), "Time of the optimizer on the GPU per step."),
        win_ns=win,
        fix=Fix(
            "Use the fused implementation of the optimizer or, if there is none, foreach=True.",
            "torch.optim.AdamW(model.parameters(), foreach=False)",
            "torch.optim.AdamW(model.parameters(), fused=True)",
        ),
        at=facts.place_of(alone),
    )
