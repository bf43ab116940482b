"""Rules on memcpys, memsets and kernels that only convert layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import count, duration
from ...read.measures.launches import GRAPH_LAUNCH
from ...read.measures.synchronizations import direction
from ...read.tables.intervals import overlap_ns, total_ns
from ...read.tables.nest import inside_rows
from ...read.tables.table import MEMCPY, MEMSET, Array, Table
from ..metrics.tables import sum_by_group, unique_codes
from ..replay.graph import Graph
from ..replay.replay import Change
from ..replay.requests import copies_ahead, without_copies
from .rule import rule
from .trace_facts import TraceFacts, Win, both

_DEVICE_COPY = re.compile("DtoD|CopyDeviceToDevice")
_PAGEABLE = re.compile("Pageable")
_LAYOUT = re.compile(r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw", re.IGNORECASE)
_TRANSPOSE = re.compile(r"batched_transpose|transpose_readWrite|convertTensor")  # inside a convolution


@rule("exposed-copies", gpu=True, share=0.01, of="copies")
def exposed_copies(facts: TraceFacts) -> Iterator[Finding]:
    """Copies between CPU and GPU run while nothing computes.

    Needs memcpys. The time to win is exactly the time of these copies outside compute and communication. From
    pageable memory, the driver copies through a buffer of its own, and the CPU waits. On a stream with kernels, a
    copy delays them; on a stream of its own it can run ahead, unless the copies take longer than the kernels.
    A replay hides copies to the GPU that can run ahead behind other work, and removes the others.
    """
    for way, text, host in (("H2D", "to the GPU", "from"), ("D2H", "to the CPU", "to")):
        codes = [code for code in np.unique(facts.gpu.name).tolist() if direction(facts.gpu.strings[code]) == way]
        rows = np.flatnonzero((facts.gpu.category == MEMCPY) & np.isin(facts.gpu.name, codes))
        if not len(rows):
            continue
        copies = facts.gpu.where(rows)
        times = facts.times_of(rows)
        exposed = total_ns(times) - overlap_ns(times, facts.activity.working)
        pageable = float(np.mean(copies.matching("name", _PAGEABLE)))
        alone = len(set(facts.gpu.stream[facts.kernel_rows].tolist()) | set(copies.stream.tolist())) == 1
        shared = _on_streams_of_kernels(facts, copies)
        hideable = total_ns(times) < total_ns(facts.activity.working)
        fix, change = _faster_copies(way, pageable > 0.5, shared > 0.5, hideable)
        win = Win(facts.per_step(exposed), partial(_changed, facts, rows, change))
        size = int(np.maximum(copies.bytes, 0).sum())
        title = f"Copies {text} take {duration(win)} {facts.each_step} during which nothing computes"
        title += f", {host} pageable memory" if pageable > 0.5 else ""
        title += "; all work is on one stream" if alone else ""
        yield facts.finding(
            title,
            facts.gpu_count("copies_per_step", len(rows), "Copies per step."),
            facts.gpu_count("bytes_per_step", size, "Bytes per step, as far as known.", "bytes"),
            Evidence("pageable", pageable, "1", "Share of the copies from or to pageable memory."),
            Evidence("on_streams_of_kernels", shared, "1", "Share of the copies on streams with kernels."),
            win_ns=win,
            fix=fix,
            at=facts.place_of(copies),
        )


def _changed(facts: TraceFacts, rows: Array, change: Callable[[Graph, Array], Change]) -> Change:
    """Return a change of the memcpys in these rows of `TraceFacts.gpu`."""
    mask = np.zeros(len(facts.trace.gpu), bool)
    mask[facts.gpu_rows[rows]] = True
    return change(facts.replayer.graph, mask)


def _on_streams_of_kernels(facts: TraceFacts, copies: Table) -> float:
    """Return the share of the copies that are on a stream with kernels."""
    streams = [each.device.astype(np.int64) << 32 | each.stream & 0xFFFF_FFFF for each in (facts.kernels, copies)]
    return float(np.mean(np.isin(streams[1], streams[0])))


_AHEAD = (
    "with torch.cuda.stream(copying): following = following.cuda(non_blocking=True)\n"
    "torch.cuda.current_stream().wait_stream(copying)  # before the next step"
)


def _faster_copies(
    way: str, pageable: bool, shared: bool, hideable: bool
) -> tuple[Fix, Callable[[Graph, Array], Change]]:
    """Return what to do about copies, and what that is in a replay.

    That is to copy ahead of use, with pinned memory and a stream of its own, else to copy less.

    Args:
        way: "H2D" or "D2H".
        pageable: whether most are from or to pageable memory.
        shared: whether most are on streams that run kernels.
        hideable: whether they take less time than the kernels, so that overlap could hide them.
    """
    if pageable and way == "H2D":
        return Fix(
            "Copy from pinned memory without blocking, on a separate stream, ahead of use: the next batch during "
            "the current step.",
            "batch = batch.cuda()",
            f"loader = DataLoader(..., pin_memory=True)\n{_AHEAD}",
        ), copies_ahead
    if pageable:
        return Fix(
            "Keep results on the GPU, and copy them without blocking, to pinned memory, when they are needed.",
            "losses.append(loss.cpu())",
            "losses.append(loss.detach())  # torch.stack(losses).cpu() every 100 steps",
        ), without_copies
    if not hideable:
        return Fix(
            "The copies take longer than all kernels, so overlap cannot hide them: keep data that is copied "
            "repeatedly on the GPU, or copy fewer bytes (a smaller type, no offloading)."
        ), without_copies
    if shared:
        return Fix(
            "Copy on a separate stream, ahead of use: the next batch during the current step.",
            "batch = batch.cuda(non_blocking=True)",
            _AHEAD,
        ), copies_ahead
    return Fix(
        "The copies already use pinned memory and a separate stream: start them earlier, or copy fewer bytes.",
    ), without_copies


@rule("device-copies", gpu=True, share=0.001, of="copies")
def device_copies(facts: TraceFacts, *, per_step: int = 50) -> Iterator[Finding]:
    """Many small copies within the GPU, as for the buckets and buffers of DistributedDataParallel.

    Needs memcpys and operators. The copies take little time on the GPU, but each costs the CPU an operator and a
    launch. The time to win is the CPU time of these operators, at most the time that the GPU idles for later
    launches, and the time of the copies during which nothing computes. 50 copies per step is the library's choice.
    """
    rows = np.flatnonzero(_within_device(facts))
    copies = facts.gpu.where(rows)
    if facts.calls(len(copies)) < per_step:
        return
    operators = facts.trace.operators
    linked = np.unique(copies.operator[copies.operator >= 0])
    outer = np.unique(np.where(operators.parent[linked] >= 0, operators.parent[linked], linked))
    copying, cpu_ns = facts.of_one_process(operators.where(outer if len(outer) < len(linked) else linked))
    gpu_ns, gpu_win = int(copies.duration_ns.sum()), facts.gpu_win(rows)
    win = both(facts.cpu_win(copying), gpu_win)
    inside = [operators.strings[code] for code in np.unique(operators.name[outer]).tolist()]
    around = np.unique(facts.trace.regions.name[copies.region[copies.region >= 0]])
    names = inside + [facts.trace.strings[code] for code in around.tolist()]
    ddp = any("bucket" in name or "DistributedDataParallel" in name for name in names)
    of = " for DistributedDataParallel's buckets and buffers" if ddp else ""
    yield facts.finding(
        f"{count(facts.calls(len(copies)))} copies {facts.each_gpu_step} within the GPU{of}: "
        f"{duration(facts.per_gpu(gpu_ns))} on the GPU, {duration(facts.per_step(cpu_ns))} on the CPU",
        facts.gpu_count("copies_per_step", len(copies), "Memcpys within a GPU per step."),
        facts.cpu_time("cpu_ns", cpu_ns, "CPU time per step of the operators that copy."),
        facts.gpu_time("gpu_ns", gpu_ns, "Their time on the GPU per step."),
        Evidence("gpu_win_ns", gpu_win, "ns", "Part of their GPU time that can be won."),
        win_ns=win,
        fix=Fix(
            "Make gradients views of the buckets, and do not broadcast buffers that may differ between ranks.",
            "DDP(model)",
            "DDP(model, gradient_as_bucket_view=True, broadcast_buffers=False)",
        )
        if ddp
        else Fix(
            "Copy many tensors with one call, or write results directly to their destination.",
            "for target, source in pairs: target.copy_(source)",
            "torch._foreach_copy_(targets, sources)",
        ),
        coverage=len(copies.operator[copies.operator >= 0]) / max(len(copies), 1),
        at=facts.place_of(copies),
    )


def _within_device(facts: TraceFacts) -> Array:
    """Return a mask of the rows of `TraceFacts.gpu` that are memcpys within a GPU."""
    mask: Array = (facts.gpu.category == MEMCPY) & facts.gpu.matching("name", _DEVICE_COPY)
    return mask


@rule("bias-copies", gpu=True, share=0.005, of="copies")
def bias_copies(facts: TraceFacts) -> Iterator[Finding]:
    """Addmm copies the bias into its result before the matmul.

    Needs operators. ``addmm`` copies biases that cuBLAS cannot add itself, such as matrices. The time to win is
    the time of these copies.
    """
    rows = facts.rows(facts.trace.operators, "aten::addmm", "aten::baddbmm")
    work = facts.work_of(rows)
    rows = work[_within_device(facts)[work]]
    copies = facts.gpu.where(rows)
    win = facts.gpu_win(rows)
    if len(copies):
        yield facts.finding(
            f"addmm copies its bias {count(facts.calls(len(copies)))} times {facts.each_gpu_step} before the "
            "matmul",
            facts.gpu_count("copies", len(copies), "Copies of a bias per step."),
            facts.gpu_time("gpu_ns", int(copies.duration_ns.sum()), "GPU time of these copies per step."),
            win_ns=win,
            operator="aten::addmm",
            fix=Fix(
                "Pass the bias as a vector, which the matmul adds itself.",
                "torch.addmm(bias_matrix, x, w)",
                "torch.nn.functional.linear(x, w.t(), bias_vector)",
            ),
            at=facts.place_of(copies),
        )


@rule("layout-conversions", gpu=True, share=0.01, of="compute")
def layout_conversions(facts: TraceFacts) -> Iterator[Finding]:
    """Kernels convert between NCHW and NHWC around convolutions of cuDNN or MIOpen.

    Found by the names of kernels. Tensor Cores need NHWC: a model in ``channels_last`` has no conversions. The
    time to win is the time of the kernels that convert.
    """
    convolutions = facts.rows_matching(facts.trace.operators, "[cC]onv")
    inside = np.append(inside_rows(convolutions, facts.trace.operators.parent), False)[facts.kernels.operator]
    converts = facts.kernels.matching("name", _LAYOUT)
    rows = facts.kernel_rows[converts | (inside & facts.kernels.matching("name", _TRANSPOSE))]
    gpu_ns = int(facts.gpu.duration_ns[rows].sum())
    win = facts.gpu_win(rows)
    if len(rows):
        yield facts.finding(
            f"{count(facts.calls(len(rows)))} kernels {facts.each_gpu_step} only convert between NCHW and NHWC",
            facts.gpu_count("kernels", len(rows), "Kernels that convert per step."),
            facts.gpu_time("gpu_ns", gpu_ns, "Their time per step."),
            win_ns=win,
            fix=Fix(
                "Keep the model and its input in channels_last.",
                "model = model.cuda()",
                "model = model.cuda().to(memory_format=torch.channels_last)",
            ),
            at=facts.place_of(facts.gpu.where(rows)),
        )


@rule("memsets", gpu=True, share=0.005, of="compute")
def memsets(facts: TraceFacts, *, per_step: int = 100) -> Iterator[Finding]:
    """Many memsets, each with a launch of its own.

    Needs memsets. Libraries clear workspaces before split matmuls and reductions. The time to win is the time of
    the memsets on the GPU, and the CPU time of their launches, at most the time that the GPU idles for later ones.
    Launches of CUDA graphs do not count, because they launch other work as well. The thresholds are this library's
    choice.
    """
    memset = facts.gpu.category == MEMSET
    rows = facts.gpu.where(memset)
    if facts.calls(len(rows)) < per_step:
        return
    launches = facts.trace.runtime.where(np.unique(rows.launch[rows.launch >= 0]))
    alone, cpu_ns = facts.of_one_process(launches.where(~launches.matching("name", GRAPH_LAUNCH)))
    win = both(facts.gpu_win(memset), facts.cpu_win(alone))
    operators = facts.trace.operators
    by_operator, of = unique_codes(operators.name[rows.operator[rows.operator >= 0]])
    calls = sum_by_group(np.ones_like(of), of, len(by_operator))
    most = operators.strings[by_operator[np.argmax(calls)]] if len(by_operator) else ""
    yield facts.finding(
        f"{count(facts.calls(len(rows)))} memsets {facts.each_gpu_step}" + (f", most of {most}" if most else ""),
        facts.gpu_count("memsets", len(rows), "Memsets per step."),
        facts.gpu_time("gpu_ns", int(rows.duration_ns.sum()), "GPU time of the memsets per step."),
        facts.cpu_time("launch_ns", cpu_ns, "CPU time of their launches per step."),
        win_ns=win,
        operator=most,
        fix=Fix(
            "Run fewer and larger matmuls, which clear fewer workspaces; let zero_grad() set gradients to None "
            "instead of clearing them.",
            "optimizer.zero_grad(set_to_none=False)",
            "optimizer.zero_grad()",
        ),
        at=facts.place_of(rows),
    )
