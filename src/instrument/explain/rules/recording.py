"""Rules on the recording itself: longer steps, and lost events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import counted
from ...read.kineto.salvage import OTHER_TYPES
from ...read.measures.launches import copy_calls, launches_of
from ...read.tables.notes import kept_steps
from ...read.tables.trace import ReadLosses
from ..metrics.launches import LostWork
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, require

_LISTED = 10  # ranks

_SHORTER = "Record a shorter time: a profiler drops records when its buffers are full."
_RECORDS_LOST = {"kineto": "Record only one window per process: later windows lose kernels at their head."}
_NOTHING_RECORDED = {
    "cu": "CUPTI recorded nothing. It may serve one profiler alone: stop Nsight Systems, Nsight Compute, DCGM "
    "or a second torch profiler. In a container, it needs the permission to profile (--cap-add=SYS_ADMIN, or "
    "NVreg_RestrictProfilingToAdminUsers=0); under WSL, a driver that supports it. instrument doctor tries it.",
    "hip": "ROCm's tracer recorded nothing: stop other profilers, such as rocprofv3, and check that this torch "
    "is built for the installed version of ROCm. instrument doctor tries it.",
    "ur": "Intel's tracer recorded nothing: stop other profilers, and check that this torch is built with PTI and "
    "for the installed version of Level Zero.",
}


@rule("stretched-window")
def stretched_window(facts: TraceFacts, *, ratio: float = 1.3) -> Iterator[Finding]:
    """The steps in the window take longer than those around it: the profiler costs time on the CPU.

    Needs the manifest of the run, with steps timed outside the window, and more than these and the recorded steps
    vary. nsys-ai calls 5 % overhead notable and 15 % contaminated. From 1.3 on, each finding on CPU time carries a
    note that it is inflated.
    """
    stretch = facts.stretch
    if stretch is None:
        raise MissingEvidenceError("the time of steps outside the window is not known")
    if stretch.ratio < ratio or not stretch.is_certain:
        return
    yield facts.finding(
        f"Recording makes a step {stretch:.2f} times as long: times on the CPU are inflated",
        Evidence("stretch", stretch.ratio, "1", "Median step in the window / median step outside."),
        Evidence("stretch_low", stretch.low, "1", "Lower bound of the ratio, given how much the steps vary."),
        Evidence("stretch_high", stretch.high, "1", "Upper bound of the ratio."),
        Evidence("usual_ns", facts.usual_step_ns, "ns", "Median step outside the window."),
        severity="low",
        fix=Fix(
            "Record less: without stacks, shapes and memory events, or with "
            f"{facts.to_record(detail='regions')}; or with Nsight Systems, which costs less."
        ),
    )


@rule("selected-steps")
def selected_steps(facts: TraceFacts) -> Iterator[Finding]:
    """The file holds only some of the recorded steps, which `instrument slim --steps` chose.

    All numbers are those of these steps: what happens once, such as a slow first step, may be missing.
    """
    steps = kept_steps(facts.trace.metadata)
    if steps is None:
        return
    kept, of = steps
    yield facts.finding(
        f"The file holds {kept:,} of {counted(of, 'recorded step')}: all numbers are those of these steps",
        Evidence("kept", kept, "events", "Steps in the file."),
        Evidence("recorded", of, "events", "Steps of the file that it was made from."),
        severity="low",
    )


@rule("damaged-trace")
def damaged_trace(facts: TraceFacts) -> Iterator[Finding]:
    """Parts of the file, or of those of other ranks, could not be read.

    All numbers come from the part that could be read. The most frequent reason is a job that died before the
    profiler finished the file. What a file that is cut off would have held is not known and not counted.
    """
    lost = facts.trace.lost
    if lost.reasons.keys() - {OTHER_TYPES}:
        yield _damage(facts, f"The file is damaged: {'; '.join(lost.reasons)}", [lost])
    others = _damaged_others(facts)
    if len(others) == 1:
        (rank, part), *_ = others.items()
        yield _damage(facts, f"The file of rank {rank} is damaged: {'; '.join(part.reasons)}", [part], rank=rank)
    elif others:
        which = "; ".join(f"rank {rank}, {', '.join(part.reasons)}" for rank, part in [*others.items()][:_LISTED])
        more = f"; and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        title = f"The files of {len(others)} other ranks are damaged: {which}{more}"
        yield _damage(facts, title, [*others.values()], rank=min(others))


def _damaged_others(facts: TraceFacts) -> dict[int, ReadLosses]:
    """Return what could not be read of the files of other ranks than that of the facts."""
    if facts.job is None:
        return {}
    ranks = facts.job.ranks
    return {rank: lost for rank, lost in facts.job.damaged.items() if ranks[rank].path != facts.trace.path}


def _damage(facts: TraceFacts, title: str, lost: Sequence[ReadLosses], **where: Any) -> Finding:
    events, size, repaired = (
        sum(getattr(each, name) for each in lost) for name in ("events", "bytes", "repaired")
    )
    return facts.finding(
        title,
        Evidence("lost", events, "events", "Events that are known to be lost."),
        Evidence("bytes", size, "bytes", "Bytes in the file that could not be read, without what a cut removed."),
        Evidence("repaired", repaired, "events", "Events that were read after a repair."),
        severity="medium" if events or size else "low",
        fix=Fix("Record again, and let the profiler finish before the process exits."),
        **where,
    )


@rule("no-gpu-work")
def no_gpu_work(facts: TraceFacts) -> Iterator[Finding]:
    """Work was launched, and the trace has no GPU work at all.

    Needs calls of the runtime. The profiler records launches on the CPU itself; what the GPU does is recorded by
    the vendor's library, which another profiler, a missing permission or the driver can prevent.
    """
    trace = facts.trace
    if trace.gpu:
        return
    launches, copies = launches_of(trace), copy_calls(trace)
    calls = len(launches.rows) + len(copies)
    require(calls, "the trace has no launches")
    names = trace.runtime.where(np.concatenate((launches.rows, copies))).text("name")
    vendor = next((kind for kind in _NOTHING_RECORDED if any(name.startswith(kind) for name in names)), "cu")
    yield facts.finding(
        f"The trace has {counted(calls, 'call')} that launched work, and no GPU work",
        Evidence("launches", len(launches.rows), "events", "Launches of kernels and graphs."),
        Evidence("copies", len(copies), "events", "Calls that copy or set memory."),
        severity="high",
        fix=Fix(_NOTHING_RECORDED[vendor]),
    )


@rule("lost-graph-kernels")
def lost_graph_kernels(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """Launches of CUDA graphs have no kernels in the trace.

    Needs calls of the runtime. With some drivers CUPTI records the kernels of a graph only if the profiler was
    initialized before the graph was captured; GPU times are too low without them.
    """
    require(facts.trace.gpu, "the trace has no GPU work")
    launches, missing = facts.lost.graphs, facts.lost.missing_graphs
    require(launches, "the trace has no launches of CUDA graphs")
    if missing < share * launches:
        return
    yield facts.finding(
        f"{counted(missing, 'graph launch', 'graph launches')} of {launches:,} have no kernels in the trace",
        Evidence("missing", missing, "events", "Launches of CUDA graphs without GPU work."),
        Evidence("launches", launches, "events", "Launches of CUDA graphs in the window."),
        severity="medium",
        fix=Fix(
            "Initialize torch's profiler before the graph is captured.",
            "graph = torch.cuda.CUDAGraph()",
            "torch.profiler._utils._init_for_cuda_graphs()\ngraph = torch.cuda.CUDAGraph()",
        ),
    )


@rule("lost-kernels")
def lost_kernels(facts: TraceFacts, *, share: float = 0.01) -> Iterator[Finding]:
    """Launches have no kernel in the trace, or kernels have impossible times.

    Needs calls of the runtime. CUPTI drops records at the head of a window (pytorch#192021) and when its buffers
    run out. Launches after the launch of the last recorded kernel do not count: their kernels ran after the
    recording. Impossible are kernels that begin before their launch, that are at time 0, or that have no duration,
    if most have none. If a tenth of the launches is affected, graphs included, the verdict and all rules on times
    of the GPU abstain.
    """
    require(facts.trace.gpu, "the trace has no GPU work")
    lost = facts.lost
    launches, missing = lost.launches, lost.missing
    require(launches + lost.graphs, "the trace has no launches")
    wrong = _impossible(lost)
    if not (lost.at_zero or max(missing, lost.misplaced) >= max(share * (launches + lost.graphs), 1)):
        return
    if missing:
        wrong.insert(0, f"{counted(missing, 'launch', 'launches')} of {launches:,} have no kernel in the trace")
    yield facts.finding(
        ", and ".join(wrong) + (": GPU times are too low" if missing else ": some GPU times are wrong"),
        Evidence("missing", missing, "events", "Launches without a kernel."),
        Evidence("launches", launches, "events", "Launches in the window."),
        Evidence("early", lost.early, "events", "Kernels that begin before their launch."),
        Evidence("zero", lost.at_zero, "events", "GPU events at time 0."),
        Evidence("no_duration", lost.without_duration, "events", "Kernels without a duration, if most are."),
        severity="medium" if lost.too_much else "low",
        fix=Fix(_RECORDS_LOST.get(facts.trace.format, _SHORTER)),
    )


def _impossible(lost: LostWork) -> list[str]:
    """Return how many kernels have impossible times, in words."""
    one, at_zero = lost.early == 1, "is" if lost.at_zero == 1 else "are"
    texts = {
        f"begin{'s' * one} before {'its launch' if one else 'their launch'}": lost.early,
        f"{at_zero} at time 0": lost.at_zero,
        "have no duration": lost.without_duration,
    }
    return [f"{counted(number, 'kernel')} {text}" for text, number in texts.items() if number]
