"""Rules on how well the GPUs are used: copies, streams, multiprocessors and variation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...findings import Evidence, Finding, Fix
from ...traces.intervals import merge_overlaps, overlap_ns, total_ns
from ...traces.synchronizations import direction
from ...traces.table import KERNEL, MEMCPY, MEMSET, Array, Table
from ...units import count, counted, duration
from ..groups import inside_rows, sum_by_group, unique_codes
from ..occupancy import blocks_per_sm
from ..rule import rule
from ..trace_facts import MissingEvidenceError, TraceFacts

_DEVICE_COPY = re.compile("DtoD|CopyDeviceToDevice")
_PAGEABLE = re.compile("Pageable")
_LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)
_TRANSPOSE = re.compile(r"batched_transpose|transpose_readWrite|convertTensor")  # inside a convolution
_FEW = 10  # kernels: too few to speak of a program


@rule("exposed-copies")
def exposed_copies(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """Copies between CPU and GPU run while nothing computes.

    Needs memcpys. The time to win is the time of these copies outside compute and communication, exactly. From
    pageable memory the driver copies through a buffer of its own, and the CPU waits.
    """
    facts.require_gpu()
    for way, text in (("H2D", "to the GPU"), ("D2H", "to the CPU")):
        codes = [code for code in np.unique(facts.gpu.name).tolist() if direction(facts.gpu.strings[code]) == way]
        rows = np.flatnonzero((facts.gpu.category == MEMCPY) & np.isin(facts.gpu.name, codes))
        if not len(rows):
            continue
        copies = facts.gpu.where(rows)
        times = merge_overlaps(copies.start_ns, copies.end_ns)
        exposed = total_ns(times) - overlap_ns(times, facts.activity.working)
        win = facts.per_step(exposed)
        if facts.share(win) < share:
            continue
        pageable = float(np.mean(copies.matching("name", _PAGEABLE)))
        alone = len(set(facts.kernels.stream.tolist()) | set(copies.stream.tolist())) == 1
        size = int(np.maximum(copies.bytes, 0).sum())
        title = f"Copies {text} take {duration(win)} per step during which nothing computes"
        title += ", from pageable memory" if pageable > 0.5 else ""
        title += "; all work is on one stream" if alone else ""
        yield facts.finding(
            title,
            win_ns=win,
            evidence=(
                Evidence("copies_per_step", len(rows) / facts.steps, "events", "Such copies per step."),
                Evidence(
                    "bytes_per_step", facts.per_step(size), "bytes", "Their bytes per step, as far as known."
                ),
                Evidence("pageable", pageable, "1", "Share of the copies from or to pageable memory."),
                Evidence(
                    "one_stream", "yes" if alone else "no", "", "Whether copies and kernels share the only stream:"
                ),
            ),
            fix=Fix(
                "Copy from pinned memory without blocking, on a stream of its own, one batch ahead.",
                "batch = batch.cuda()",
                "loader = DataLoader(..., pin_memory=True)\nbatch = batch.cuda(non_blocking=True)",
            )
            if way == "H2D"
            else Fix(
                "Keep results on the GPU, and copy them to pinned memory without blocking once they are needed.",
                "losses.append(loss.cpu())",
                "losses.append(loss.detach())  # torch.stack(losses).cpu() every 100 steps",
            ),
            at=facts.place_of(copies),
        )


@rule("device-copies")
def device_copies(facts: TraceFacts, *, per_step: int = 50, share: float = 0.001) -> Iterator[Finding]:
    """Many small copies within the GPU, as for the buckets and buffers of DistributedDataParallel.

    Needs memcpys and operators. They take little time on the GPU, but each costs the CPU an operator and a launch:
    the time to win is that of their operators on the CPU as far as the GPU idles for it, or their own time as far
    as nothing computes meanwhile. 50 copies per step is this library's choice.
    """
    facts.require_gpu()
    rows = np.flatnonzero((facts.gpu.category == MEMCPY) & facts.gpu.matching("name", _DEVICE_COPY))
    copies = facts.gpu.where(rows)
    if len(copies) < per_step * facts.steps:
        return
    operators = facts.trace.operators
    linked = np.unique(copies.operator[copies.operator >= 0])
    outer = np.unique(np.where(operators.parent[linked] >= 0, operators.parent[linked], linked))
    cpu_ns = int(operators.duration_ns[outer].sum()) if len(outer) < len(linked) else 0
    cpu_ns = max(cpu_ns, int(operators.duration_ns[linked].sum()))
    gpu_ns = int(copies.duration_ns.sum())
    win = max(facts.cpu_win(cpu_ns), facts.gpu_win(gpu_ns))
    if facts.share(win) < share:
        return
    inside = [operators.strings[code] for code in np.unique(operators.name[outer]).tolist()]
    names = inside + [facts.trace.strings[code] for code in np.unique(_regions(facts, copies)).tolist()]
    ddp = any("bucket" in name or "DistributedDataParallel" in name for name in names)
    of = " of DistributedDataParallel's buckets and buffers" if ddp else ""
    yield facts.finding(
        f"{count(len(copies) / facts.steps)} copies per step within the GPU{of}: little time there, "
        f"{duration(facts.per_step(cpu_ns))} on the CPU",
        win_ns=win,
        evidence=(
            Evidence("copies_per_step", len(copies) / facts.steps, "events", "Memcpys within a GPU per step."),
            Evidence("cpu_ns", facts.per_step(cpu_ns), "ns", "CPU time per step of the operators that copy."),
            Evidence("gpu_ns", facts.per_step(gpu_ns), "ns", "Their time on the GPU per step."),
        ),
        fix=Fix(
            "Let gradients be views of the buckets, and do not broadcast buffers if they need not agree.",
            "DistributedDataParallel(model)",
            "DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)",
        )
        if ddp
        else Fix(
            "Copy many tensors with one call, or write results in place.",
            "for target, source in pairs: target.copy_(source)",
            "torch._foreach_copy_(targets, sources)",
        ),
        coverage=len(copies.operator[copies.operator >= 0]) / len(copies),
        at=facts.place_of(copies),
    )


def _regions(facts: TraceFacts, work: Table) -> Array:
    names: Array = facts.trace.regions.name[work.region[work.region >= 0]]
    return names


@rule("bias-copies")
def bias_copies(facts: TraceFacts, *, share: float = 0.005) -> Iterator[Finding]:
    """Addmm copies the bias into its result before the matmul.

    Needs operators. It does so for biases that cuBLAS cannot add itself, such as matrices. The time to win is the
    time of these copies.
    """
    facts.require_gpu()
    rows = facts.rows(facts.trace.operators, "aten::addmm", "aten::baddbmm")
    work = facts.work_of(rows)
    copies = work.where((work.category == MEMCPY) & work.matching("name", _DEVICE_COPY))
    win = facts.gpu_win(int(copies.duration_ns.sum()))
    if len(copies) and facts.share(win) >= share:
        yield facts.finding(
            f"addmm copies its bias {count(len(copies) / facts.steps)} times per step before the matmul",
            win_ns=win,
            operator="aten::addmm",
            evidence=(
                Evidence("copies", len(copies) / facts.steps, "events", "Copies of a bias per step."),
                Evidence("gpu_ns", facts.per_step(int(copies.duration_ns.sum())), "ns", "Their time per step."),
            ),
            fix=Fix(
                "Give the bias as a vector, which the matmul adds itself.",
                "torch.addmm(bias_matrix, x, w)",
                "torch.nn.functional.linear(x, w.t(), bias_vector)",
            ),
            at=facts.place_of(copies),
        )


@rule("layout-conversions")
def layout_conversions(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """CuDNN or MIOpen converts between NCHW and NHWC around convolutions.

    Found by the names of kernels. Tensor Cores need NHWC: a model in ``channels_last`` has no conversions. The
    time to win is the time of the kernels that convert.
    """
    facts.require_gpu()
    convolutions = facts.rows_matching(facts.trace.operators, "[cC]onv")
    inside = np.append(inside_rows(convolutions, facts.trace.operators.parent), False)[facts.kernels.operator]
    converts = facts.kernels.matching("name", _LAYOUT)
    rows = facts.kernels.where(converts | (inside & facts.kernels.matching("name", _TRANSPOSE)))
    win = facts.gpu_win(int(rows.duration_ns.sum()))
    if len(rows) and facts.share(win) >= share:
        yield facts.finding(
            f"{count(len(rows) / facts.steps)} kernels per step only convert between NCHW and NHWC",
            win_ns=win,
            evidence=(
                Evidence("kernels", len(rows) / facts.steps, "events", "Such kernels per step."),
                Evidence("gpu_ns", facts.per_step(int(rows.duration_ns.sum())), "ns", "Their time per step."),
            ),
            fix=Fix(
                "Keep the model and its input in channels_last.",
                "model = model.cuda()",
                "model = model.cuda().to(memory_format=torch.channels_last)",
            ),
            at=facts.place_of(rows),
        )


@rule("memsets")
def memsets(facts: TraceFacts, *, per_step: int = 100, share: float = 0.005) -> Iterator[Finding]:
    """Many memsets, each with a launch of its own.

    Needs memsets. Libraries clear workspaces before split matmuls and reductions. The time to win is their time on
    the GPU, or the time of their launches as far as the GPU idles for it. The numbers are this library's choice.
    """
    facts.require_gpu()
    rows = facts.gpu.where(facts.gpu.category == MEMSET)
    if len(rows) < per_step * facts.steps:
        return
    launches = facts.trace.runtime.duration_ns[np.unique(rows.launch[rows.launch >= 0])]
    win = max(facts.gpu_win(int(rows.duration_ns.sum())), facts.cpu_win(int(launches.sum())))
    if facts.share(win) < share:
        return
    operators = facts.trace.operators
    by_operator, of = unique_codes(operators.name[rows.operator[rows.operator >= 0]])
    calls = sum_by_group(np.ones_like(of), of, len(by_operator))
    most = operators.strings[by_operator[np.argmax(calls)]] if len(by_operator) else ""
    yield facts.finding(
        f"{count(len(rows) / facts.steps)} memsets per step" + (f", most of {most}" if most else ""),
        win_ns=win,
        operator=most,
        evidence=(
            Evidence("memsets", len(rows) / facts.steps, "events", "Memsets per step."),
            Evidence("gpu_ns", facts.per_step(int(rows.duration_ns.sum())), "ns", "Their time per step."),
        ),
        fix=Fix(
            "Fewer and larger matmuls need fewer cleared workspaces; zero_grad() sets gradients to None "
            "instead of clearing them.",
            "optimizer.zero_grad(set_to_none=False)",
            "optimizer.zero_grad()",
        ),
        at=facts.place_of(rows),
    )


@rule("low-sm-efficiency")
def low_sm_efficiency(facts: TraceFacts, *, share: float = 0.05) -> Iterator[Finding]:
    """Kernels have fewer thread blocks than the GPU has multiprocessors.

    Needs grids of kernels and the GPU's number of multiprocessors. GPU utilization says whether any kernel runs;
    this says how many multiprocessors have work: the time to win is, for each kernel, its time times the share of
    multiprocessors without a block, as if its work could be spread evenly.
    """
    facts.require_gpu()
    kernels = facts.kernels
    blocks = blocks_per_sm(kernels, facts.trace.runtime, facts.trace.devices)
    known = blocks > 0
    if not known.any():
        raise MissingEvidenceError("the trace has no grids, or the multiprocessors of the GPU are unknown")
    communicates = facts.communication[facts.gpu.category == KERNEL]
    unused = np.where(known & ~communicates, np.maximum(1 - blocks, 0), 0) * kernels.duration_ns
    busy_ns = total_ns(facts.activity.kernels)
    together = (1 - (facts.metrics["sm_eff_kernel_time"] or 1)) * busy_ns  # other kernels may fill the rest
    win = facts.gpu_win(min(float(unused.sum()), together))
    if known.sum() < _FEW or facts.share(win) < share:
        return
    row = int(np.argmax(unused))
    names, of = np.unique(kernels.name, return_inverse=True)
    most = names[np.argmax(np.bincount(of, unused))]
    worst = np.flatnonzero(kernels.name == most)
    short = kernels.strings[kernels.short_name[worst[0]]]
    yield facts.finding(
        f"Kernels leave multiprocessors empty, most of all {short}: {blocks[row]:.2f} blocks per multiprocessor",
        win_ns=win,
        kernel=short,
        confidence="medium",
        evidence=(
            Evidence(
                "unused_ns",
                facts.per_step(float(unused.sum())),
                "ns",
                "Time of the kernels times the share of multiprocessors without a block, per step.",
            ),
            Evidence(
                "sm_efficiency",
                facts.metrics["sm_eff_kernel_time"],
                "1",
                facts.metrics.about("sm_eff_kernel_time").definition,
            ),
        ),
        fix=Fix("Give each kernel more work: a larger batch, or small tensors joined into one."),
        coverage=facts.metrics.about("sm_eff_span").coverage,
        at=facts.place_of(kernels.where(worst)),
    )


@rule("low-occupancy")
def low_occupancy(facts: TraceFacts, *, percent: float = 20, share: float = 0.1) -> Iterator[Finding]:
    """Kernels that fill the multiprocessors run few threads on each.

    Needs the profiler's estimate of achieved occupancy. SM efficiency says whether a multiprocessor has a block;
    occupancy says how many of its threads are in use, to hide the latency of memory. Kernels for matmuls,
    convolutions and attention reach the peak with few threads, and are left out. How much more threads would help
    is unknown: there is no time to win.
    """
    facts.require_gpu()
    kernels = facts.kernels
    has = ~np.isnan(kernels.occupancy_percent)
    if not has.any():
        raise MissingEvidenceError("the trace has no estimated occupancy")
    family = np.array([word in ("gemm", "convolution", "attention", "collective") for word in kernels.strings])
    low = has & ~family[kernels.family] & (kernels.occupancy_percent < percent) & ~(kernels.blocks_per_sm < 1)
    ns = int(kernels.duration_ns[low].sum())
    if facts.share(facts.per_step(ns)) < share:
        return
    longest = kernels.where(low)
    short = longest.strings[longest.short_name[np.argmax(longest.duration_ns)]]
    yield facts.finding(
        f"Kernels that take {duration(facts.per_step(ns))} per step use less than {percent:g} % of the threads",
        win_ns=None,
        severity="low",
        confidence="low",
        kernel=short,
        evidence=(
            Evidence("gpu_ns", facts.per_step(ns), "ns", "Time of these kernels per step."),
            Evidence(
                "occupancy", facts.metrics["occ_weighted"], "%", facts.metrics.about("occ_weighted").definition
            ),
        ),
        fix=Fix("torch.compile fuses such kernels; of your own, use fewer registers and less shared memory."),
        coverage=facts.metrics.about("occ_weighted").coverage,
        at=facts.place_of(longest),
    )


@rule("varying-kernels")
def varying_kernels(facts: TraceFacts, *, ratio: float = 1.2, share: float = 0.02) -> Iterator[Finding]:
    """The same kernels take longer in some steps than in others.

    Needs three steps with the same kernels, each as often. All kernels slower in one step is a lower clock: the
    GPU is hot, or its power is limited. Kernels that communicate wait for others, and are left out. The time to
    win is the time above each kernel's median over the steps.
    """
    facts.require_gpu()
    gpu = facts.gpu
    if len(facts.trace.steps) < 3:
        raise MissingEvidenceError("fewer than three steps are recorded")
    rows = np.flatnonzero((gpu.category == KERNEL) & ~facts.communication & (gpu.step >= 0))
    names, of = np.unique(gpu.name[rows], return_inverse=True)
    steps = len(facts.trace.steps)
    calls = np.bincount(of * steps + gpu.step[rows], minlength=len(names) * steps).reshape(-1, steps)
    ns = sum_by_group(gpu.duration_ns[rows], of * steps + gpu.step[rows], len(names) * steps).reshape(-1, steps)
    same = (calls == calls[:, :1]).all(axis=1) & (calls[:, 0] > 0)
    if not same.any():
        raise MissingEvidenceError("the steps do not run the same kernels")
    usual = np.median(ns[same], axis=1)
    above = np.maximum(ns[same] - usual[:, None], 0)
    worst = above.sum(axis=0)
    step = int(np.argmax(worst))
    slower = float(ns[same][:, step].sum() / max(usual.sum(), 1))
    win = facts.gpu_win(float(above.sum()))
    if slower < ratio or facts.share(win) < share:
        return
    kernel = names[same][np.argmax(above.sum(axis=1))]
    short = gpu.strings[gpu.short_name[rows[np.argmax(gpu.name[rows] == kernel)]]]
    number = int(facts.trace.steps.number[step])
    yield facts.finding(
        f"The same kernels take {slower:.2f} times as long in step {number} as in the median step",
        win_ns=win,
        kernel=short,
        step=number,
        confidence="medium",
        evidence=(
            Evidence("above_ns", facts.per_step(float(above.sum())), "ns", "Time above the medians, per step."),
            Evidence("ratio", slower, "1", "Time of the kernels in this step / sum of their medians."),
            Evidence("kernels", int(same.sum()), "events", "Kernels that every step calls equally often."),
        ),
        fix=Fix("Watch clocks and temperature with nvidia-smi dmon or amd-smi, and lock the clocks to compare."),
        coverage=float(gpu.duration_ns[rows[same[of]]].sum() / max(gpu.duration_ns[rows].sum(), 1)),
    )


@rule("single-stream")
def single_stream(facts: TraceFacts, *, share: float = 0.02) -> Iterator[Finding]:
    """Communication and compute share the only stream, so that they cannot overlap.

    Needs collectives. The time to win is the communication, up to the compute that it could overlap with.
    """
    facts.require_gpu()
    if not facts.communication.any():
        raise MissingEvidenceError("nothing communicates")
    kernels = facts.kernels
    streams = set(zip(kernels.device.tolist(), kernels.stream.tolist(), strict=True))
    if len(streams) > len(set(kernels.device.tolist())):
        return
    communication_ns = total_ns(facts.activity.communication)
    win = facts.gpu_win(min(communication_ns, total_ns(facts.activity.compute)))
    if facts.share(win) >= share:
        yield facts.finding(
            f"Communication of {duration(facts.per_step(communication_ns))} per step is on the stream of compute",
            win_ns=win,
            confidence="medium",
            evidence=(
                Evidence("communication_ns", facts.per_step(communication_ns), "ns", "Communication per step."),
                Evidence("streams", len(streams), "events", "Streams with kernels."),
            ),
            fix=Fix(
                "Start collectives asynchronously, and wait for them where the result is needed.",
                "dist.all_reduce(grad)",
                "work = dist.all_reduce(grad, async_op=True)\n...\nwork.wait()",
            ),
        )


@rule("dominant-kernel")
def dominant_kernel(facts: TraceFacts, *, share: float = 0.5) -> Iterator[Finding]:
    """One kernel takes over half of the kernels' time.

    The place to start: other kernels matter less than this one. nsys-ai calls a hot spot what takes 60 %. How much
    faster it could be is for other rules to say.
    """
    facts.require_gpu()
    kernels = facts.kernels
    if len(np.unique(kernels.name)) < 2:
        raise MissingEvidenceError("the trace has a single kernel")
    names, of = np.unique(kernels.name, return_inverse=True)
    sums = sum_by_group(kernels.duration_ns, of, len(names))
    most = int(np.argmax(sums))
    part = sums[most] / max(kernels.duration_ns.sum(), 1)
    rows = np.flatnonzero(of == most)
    if part < share or facts.communication[facts.gpu.category == KERNEL][rows].all():
        return
    short = kernels.strings[kernels.short_name[rows[0]]]
    yield facts.finding(
        f"One kernel takes {100 * part:.0f} % of the kernels' time: {short}, {counted(len(rows), 'call')}",
        win_ns=None,
        severity="low",
        kernel=short,
        evidence=(
            Evidence("share", float(part), "1", "Time of the kernel / time of all kernels."),
            Evidence("gpu_ns", facts.per_step(int(sums[most])), "ns", "Its time per step."),
        ),
        at=facts.place_of(kernels.where(rows)),
    )
