"""Rules on communication within one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import count, duration
from ...read.tables.intervals import covered_ns, total_ns
from ..metrics.collectives import BYTES
from .idle import percent_of_step
from .rule import rule
from .trace_facts import TraceFacts, Win, require

_GRADIENTS = re.compile("all_?reduce|reduce_?scatter|all_?gather", re.IGNORECASE)
_SMALL_BYTES = 1 << 20


def _exposed_ns(facts: TraceFacts) -> int:
    return total_ns(facts.activity.working) - total_ns(facts.activity.compute)


@rule("exposed-communication", gpu=True, share=0.05, of="communication")
def exposed_communication(facts: TraceFacts) -> Iterator[Finding]:
    """The GPU communicates while nothing computes.

    Needs kernels that communicate. The time to win is exactly that time. Part of it may be spent waiting for a
    late rank, which only the traces of several ranks show. Confidence is medium if the CPU is too slow to make use
    of the time. The threshold of 5 % is that of TraceLens.
    """
    require(facts.communication.any(), "nothing communicates")
    exposed_ns = _exposed_ns(facts)
    win = facts.win_by("--overlap communication", facts.per_step(exposed_ns))
    gpu = facts.gpu
    rows = np.flatnonzero(facts.communication)
    alone = gpu.duration_ns[rows] - covered_ns(facts.activity.compute, gpu.start_ns[rows], gpu.end_ns[rows])
    longest = rows[np.argmax(alone)]
    total = total_ns(facts.activity.communication)
    yield facts.finding(
        f"{duration(win)} of communication {facts.each_step} do not overlap with compute, "
        f"{percent_of_step(facts, win)}",
        Evidence("exposed_comm_ns", win, "ns", "Time per step of communication outside compute."),
        facts.step_time("comm_ns", total, "Time of communication per step."),
        Evidence("overlapped", 1 - exposed_ns / max(total, 1), "1", "Share of it that overlaps with compute."),
        *_bandwidth(facts),
        win_ns=win,
        confidence="high" if facts.gpu_limited_ns >= exposed_ns else "medium",
        kernel=gpu.strings[gpu.short_name[longest]],
        fix=_fix(facts, longest),
        at=facts.place_of(gpu.where(rows[np.argsort(-alone)[:1]])),
    )


def _bandwidth(facts: TraceFacts) -> Iterator[Evidence]:
    """Yield the bandwidth of the collective that takes the most time, if its size is known."""
    for row in facts.metrics["collective_table"][:1]:
        rate, about = row["bus_bytes_per_s"], "Bus bandwidth, as nccl-tests defines it,"
        if rate is None:
            rate, about = row["bytes_per_s"], "Bytes per second"
        if rate is not None:
            yield Evidence("bandwidth", rate, "bytes/s", f"{about} of the longest collective, {row['name']:.60}.")


def _fix(facts: TraceFacts, row: int) -> Fix:
    """Return the fix for a kernel: gradients overlap with the backward pass, others with other work."""
    gpu, regions = facts.gpu, facts.trace.regions
    names = [gpu.strings[gpu.short_name[row]], gpu.strings[gpu.collective[row]]]
    if gpu.region[row] >= 0:
        names.append(regions.strings[regions.name[gpu.region[row]]])
    if any(map(_GRADIENTS.search, names)):
        return Fix(
            "Start collectives earlier, in smaller buckets that overlap with the backward pass.",
            "DDP(model, bucket_cap_mb=400)",
            "DDP(model, bucket_cap_mb=25, gradient_as_bucket_view=True)",
        )
    return Fix(
        "Start the collective asynchronously, and do independent work before waiting for its result.",
        "dist.all_to_all_single(received, sent)",
        "work = dist.all_to_all_single(received, sent, async_op=True)\n...\nwork.wait()",
    )


@rule("small-collectives", gpu=True, share=0.01, of="communication")
def small_collectives(facts: TraceFacts, *, per_step: int = 10) -> Iterator[Finding]:
    """Many small collectives take time for their latency, not for their bytes.

    Needs collectives with their sizes. NCCL reaches its bandwidth from a few MB on; below 1 MB, latency
    dominates. The time to win is the exposed time of collectives below 1 MB.
    """
    require(facts.communication.any(), "nothing communicates")
    gpu = facts.gpu
    elements = np.maximum(gpu.elements_in, gpu.elements_out)
    require((elements[facts.communication] >= 0).any(), "the collectives have no sizes")
    sizes = np.array([BYTES.get(word.lower(), 4) for word in gpu.strings], np.int64)[gpu.dtype]
    rows = np.flatnonzero(facts.communication & (elements >= 0) & (elements * sizes < _SMALL_BYTES))
    if facts.calls(len(rows)) < per_step:
        return
    alone = gpu.duration_ns[rows] - covered_ns(facts.activity.compute, gpu.start_ns[rows], gpu.end_ns[rows])
    win = Win(facts.per_step(min(float(alone.sum()), _exposed_ns(facts))), lambda: facts.saving(rows))
    yield facts.finding(
        f"{count(facts.calls(len(rows)))} collectives of less than 1 MB {facts.each_gpu_step}",
        facts.gpu_count("collectives", len(rows), "Collectives below 1 MB per step."),
        Evidence("exposed_ns", win, "ns", "Their time per step outside compute."),
        win_ns=win,
        confidence="medium",
        fix=Fix(
            "Concatenate tensors, and reduce them in one call.",
            "for grad in grads: dist.all_reduce(grad)",
            "flat = torch.cat([g.view(-1) for g in grads]); dist.all_reduce(flat)",
        ),
        at=facts.place_of(gpu.where(rows)),
    )
