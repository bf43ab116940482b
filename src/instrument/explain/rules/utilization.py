"""Rules on how well kernels use the GPU: multiprocessors, threads, streams, and variation between steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted, duration
from ...read.tables.intervals import total_ns
from ...read.tables.table import KERNEL, Array
from ..metrics.tables import one_of, sum_by_group
from ..metrics.utilization import activity, blocks_per_sm
from .rule import rule
from .trace_facts import TraceFacts, require

_FEW = 10  # kernels: too few to speak of a program


@rule("low-utilization", gpu=True)
def low_utilization(facts: TraceFacts, *, idle: float = 0.1) -> Iterator[Finding]:
    """No GPU works for a large part of the step.

    Needs GPU work. Utilization, which nvidia-smi shows, says whether any kernel runs, not how much of the GPU it
    uses: see `low-sm-efficiency` and `low-occupancy`. The findings on the causes give the time to win. xprof
    calls 10 % idle time moderate.
    """
    part = 1 - facts.busy_ns / max(facts.window_ns, 1)
    if part < idle:
        return
    causes = facts.idle.totals()
    parts = [f"{cause.replace('_', ' ')} {duration(facts.per_step(ns))}" for cause, ns in causes.items()]
    yield facts.finding(
        f"The GPU is busy {100 * (1 - part):.0f} % of the time",
        facts.step_time("idle_ns", facts.window_ns - facts.busy_ns, "Idle time per step."),
        Evidence("causes", ", ".join(parts), "", "Idle time per step by cause."),
        severity="low",
    )


@rule("low-sm-efficiency", gpu=True, share=0.05, of="compute")
def low_sm_efficiency(facts: TraceFacts) -> Iterator[Finding]:
    """Kernels leave multiprocessors without a thread block.

    Needs grids of kernels and the GPU's number of multiprocessors, or samples of SM activity while a family of
    kernels runs alone, which count instead for this family. GPU utilization says whether any kernel runs; SM
    efficiency says how many multiprocessors have work. The time to win is the time of each kernel times the share
    of multiprocessors without a block, as if its work could be spread evenly.
    """
    kernels = facts.kernels
    blocks = blocks_per_sm(kernels, facts.trace.runtime, facts.trace.devices)
    sized, active = blocks > 0, _sampled_activity(facts)
    sampled = active >= 0
    require((sized | sampled).any(), "the trace has no grids, or the multiprocessors of the GPU are unknown")
    communicates = facts.communication[facts.gpu.category == KERNEL]
    full = np.where(sampled, active, np.where(sized, blocks, 1))
    empty = np.where(communicates, 0, np.maximum(1 - full, 0))
    unused = empty * kernels.duration_ns
    busy_ns = total_ns(facts.activity.kernels)
    efficiency = facts.metrics["sm_eff_kernel_time"]
    if sampled.any():
        efficiency = 1 - float(unused.sum()) / max(int(kernels.duration_ns.sum()), 1)
    together = (1 - (efficiency or 1)) * busy_ns  # other kernels may fill the rest
    win = facts.gpu_win(facts.kernel_rows, empty).at_most(facts.per_step(together))
    if (sized | sampled).sum() < _FEW:
        return
    names, of = np.unique(kernels.name, return_inverse=True)
    most = names[np.argmax(np.bincount(of, unused))]
    worst = np.flatnonzero(kernels.name == most)
    row = worst[np.argmax(unused[worst])]
    short = kernels.strings[kernels.short_name[worst[0]]]
    how = f"{blocks[row]:.2f} blocks per multiprocessor"
    if sampled[row]:
        how = f"{100 * active[row]:.0f} % have work, as sampled for kernels of its family"
    yield facts.finding(
        f"Kernels leave multiprocessors empty, most of all {short}: {how}",
        facts.gpu_time(
            "unused_ns",
            float(unused.sum()),
            "Time per step of the kernels, times the share of multiprocessors without a block.",
        ),
        Evidence(
            "sm_efficiency", efficiency, "1", "Mean share of the multiprocessors with a block while kernels run."
        ),
        win_ns=win,
        kernel=short,
        confidence="medium",
        fix=Fix("Give each kernel more work, with a larger batch or by concatenating small tensors."),
        coverage=float(kernels.duration_ns[sized | sampled].sum() / max(kernels.duration_ns.sum(), 1)),
        at=facts.place_of(kernels.where(worst)),
    )


def _sampled_activity(facts: TraceFacts) -> Array:
    """Return for each kernel the sampled share of multiprocessors with work; -1 where its family has none."""
    active = np.full(len(facts.kernel_rows), -1.0)
    for row in facts.counters.families:
        if row["sm_active"] is not None:
            of_gpu = np.isin(facts.kernel_rows, facts.gpus[row["device"]])
            active[of_gpu & one_of(facts.kernels, "family", (row["family"],))] = row["sm_active"]
    return active


@rule("low-occupancy", gpu=True)
def low_occupancy(facts: TraceFacts, *, percent: float = 20, share: float = 0.1) -> Iterator[Finding]:
    """Kernels that fill the multiprocessors run few threads on each.

    Needs the profiler's estimate of achieved occupancy. SM efficiency says whether a multiprocessor has a block;
    occupancy says how many of its threads are in use, to hide the latency of memory. Kernels for matmuls,
    convolutions and attention reach the peak with few threads, and do not count. The gain from more threads is
    unknown.
    """
    kernels = facts.kernels
    has = ~np.isnan(kernels.occupancy_percent)
    require(has.any(), "the trace has no estimated occupancy")
    by_design = one_of(kernels, "family", ("gemm", "convolution", "attention", "collective"))
    low = has & ~by_design & (kernels.occupancy_percent < percent) & ~(kernels.blocks_per_sm < 1)
    ns = int(kernels.duration_ns[low].sum())
    if facts.share(facts.per_gpu(ns)) < share:
        return
    longest = kernels.where(low)
    short = longest.strings[longest.short_name[np.argmax(longest.duration_ns)]]
    yield facts.finding(
        f"Kernels that take {duration(facts.per_gpu(ns))} {facts.each_gpu_step} use less than {percent:g} % "
        "of the threads",
        facts.gpu_time("gpu_ns", ns, "Time of these kernels per step."),
        Evidence("occupancy", facts.metrics["occ_weighted"], "%", facts.metrics.about("occ_weighted").definition),
        severity="low",
        confidence="low",
        kernel=short,
        fix=Fix("Fuse such kernels with torch.compile; in your own, use fewer registers and less shared memory."),
        coverage=facts.metrics.about("occ_weighted").coverage,
        at=facts.place_of(longest),
    )


@rule("varying-kernels", gpu=True, share=0.02, of="compute")
def varying_kernels(facts: TraceFacts, *, ratio: float = 1.2) -> Iterator[Finding]:
    """The same kernels take longer in some steps than in others.

    Needs three steps with the same kernels, each as often. If all kernels are slower in one step, the clock was
    lower: the GPU is hot, or its power is limited. Kernels that communicate wait for other ranks, and do not
    count. The time to win is the time above each kernel's median over the steps.
    """
    gpu = facts.gpu
    require(len(facts.trace.steps) >= 3, "fewer than three steps are recorded")
    rows = np.flatnonzero((gpu.category == KERNEL) & ~facts.communication & (gpu.step >= 0))
    names, of = np.unique(gpu.name[rows], return_inverse=True)
    steps = len(facts.trace.steps)
    calls = np.bincount(of * steps + gpu.step[rows], minlength=len(names) * steps).reshape(-1, steps)
    ns = sum_by_group(gpu.duration_ns[rows], of * steps + gpu.step[rows], len(names) * steps).reshape(-1, steps)
    same = (calls == calls[:, :1]).all(axis=1) & (calls[:, 0] > 0)
    require(same.any(), "the steps do not run the same kernels")
    usual = np.median(ns[same], axis=1)
    above = np.maximum(ns[same] - usual[:, None], 0)
    worst = above.sum(axis=0)
    step = int(np.argmax(worst))
    slower = float(ns[same][:, step].sum() / max(usual.sum(), 1))
    slow = np.zeros(len(names))
    slow[same] = above.sum(axis=1) / np.maximum(ns[same].sum(axis=1), 1)
    win = facts.gpu_win(rows, slow[of])
    if slower < ratio:
        return
    kernel = names[same][np.argmax(above.sum(axis=1))]
    short = gpu.strings[gpu.short_name[rows[np.argmax(gpu.name[rows] == kernel)]]]
    number = int(facts.trace.steps.number[step])
    yield facts.finding(
        f"The same kernels take {slower:.2f} times as long in step {number} as in the median step",
        facts.gpu_time("above_ns", float(above.sum()), "Time per step above the medians."),
        Evidence("ratio", slower, "1", "Time of the kernels in this step / sum of their medians."),
        Evidence("kernels", int(same.sum()), "events", "Kernels that every step calls equally often."),
        win_ns=win,
        kernel=short,
        step=number,
        confidence="medium",
        fix=Fix("Watch clocks and temperature with nvidia-smi dmon or amd-smi; lock the clocks to compare runs."),
        coverage=float(gpu.duration_ns[rows[same[of]]].sum() / max(gpu.duration_ns[rows].sum(), 1)),
    )


@rule("single-stream", gpu=True, share=0.02, of="communication")
def single_stream(facts: TraceFacts) -> Iterator[Finding]:
    """Communication and compute share the only stream of a GPU, so that they cannot overlap.

    Needs collectives. The time to win is the time of communication, at most that of the compute that could
    overlap with it; of several GPUs, the one that wins most counts.
    """
    require(facts.communication.any(), "nothing communicates")
    gpu, win, communication_ns, on = facts.gpu, 0, 0, -1
    for number, own in facts.gpus.items():
        on_one = gpu.where(own)
        done = activity(on_one, facts.communication[own])
        if len(np.unique(on_one.stream[on_one.category == KERNEL])) == 1:
            most = facts.per_step(min(total_ns(done.communication), total_ns(done.compute), facts.gpu_limited_ns))
            if most > win:
                win, communication_ns, on = most, facts.per_step(total_ns(done.communication)), number
    if win:
        where = f" of GPU {on}" if len(facts.gpus) > 1 else ""
        yield facts.finding(
            f"Communication of {duration(communication_ns)} {facts.each_step} runs on the stream of compute"
            f"{where}",
            Evidence("communication_ns", communication_ns, "ns", f"Communication{where} per step."),
            win_ns=win,
            confidence="medium",
            fix=Fix(
                "Start collectives asynchronously, and wait for them where the result is needed.",
                "dist.all_reduce(grad)",
                "work = dist.all_reduce(grad, async_op=True)\n...\nwork.wait()",
            ),
        )


@rule("dominant-kernel", gpu=True)
def dominant_kernel(facts: TraceFacts, *, share: float = 0.5) -> Iterator[Finding]:
    """One kernel takes more than half of the kernels' time.

    The finding says where to start: the other kernels together matter less. nsys-ai calls a kernel with 60 % a hot
    spot. Other rules estimate how much faster the kernel could be.
    """
    kernels = facts.kernels
    require(len(np.unique(kernels.name)) >= 2, "the trace has a single kernel")
    names, of = np.unique(kernels.name, return_inverse=True)
    sums = sum_by_group(kernels.duration_ns, of, len(names))
    most = int(np.argmax(sums))
    part = sums[most] / max(kernels.duration_ns.sum(), 1)
    rows = np.flatnonzero(of == most)
    if part <= share or facts.communication[facts.gpu.category == KERNEL][rows].all():
        return
    short = kernels.strings[kernels.short_name[rows[0]]]
    yield facts.finding(
        f"One kernel takes {100 * part:.0f} % of the kernels' time: {short}, "
        f"{counted(facts.calls(len(rows)), 'call')} {facts.each_gpu_step}",
        Evidence("share", float(part), "1", "Time of the kernel / time of all kernels."),
        facts.gpu_time("gpu_ns", int(sums[most]), "Time of the kernel per step."),
        severity="low",
        kernel=short,
        at=facts.place_of(kernels.where(rows)),
    )
