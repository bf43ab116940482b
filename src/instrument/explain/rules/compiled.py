"""Rules on torch.compile: graph breaks, recompilations and overhead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

import numpy as np

from ...base.findings import Evidence, Finding, Fix
from ...base.units import count, counted, duration
from ...read.profilers.compile_log import Compilation, CompileLog
from ...read.tables.intervals import merge_overlaps
from ...read.tables.nest import inside_rows
from ...read.tables.table import Table
from ..metrics.idle import named_ranges
from .rule import rule
from .trace_facts import MissingEvidenceError, TraceFacts, require

REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
"""The ranges that torch records around compiled code: its number and its version."""
LOOK_UP = re.compile("^TorchDynamo Cache Lookup")
"""The ranges that torch records around the look-up of compiled code."""


def _ranges(facts: TraceFacts, pattern: re.Pattern[str]) -> Table:
    """Return the ranges of compiled code whose names match; abstain if there are none."""
    ranges = named_ranges(facts.trace, pattern)
    require(ranges, "nothing ran that torch.compile compiled")
    return ranges[0]


@rule("graph-breaks", on_cpu=True)
def graph_breaks(facts: TraceFacts) -> Iterator[Finding]:
    """Graph breaks: Python runs between the compiled pieces of one function.

    Needs the ranges that torch records around compiled code. If torch cannot compile a line, it compiles the
    code before the line, runs the line in Python, and then calls the compiled code after it: the range of the
    later piece is inside the range of the first. Functions that are called one after the other do not count as
    breaks. The gain from a whole graph is unknown.
    """
    calls = facts.trace.operators if facts.trace.operators.matching("name", REGION).any() else facts.trace.regions
    rows = np.flatnonzero(calls.matching("name", REGION))
    require(len(rows), "nothing ran that torch.compile compiled")
    within = inside_rows(rows, calls.parent)
    rests = rows[(calls.parent[rows] >= 0) & within[calls.parent[rows]]]
    if not len(rests):
        return
    per_step = len(rests) / facts.steps
    names = list(dict.fromkeys(calls.where(rests).text("name")))
    yield facts.finding(
        f"Graphs of torch.compile break {count(per_step)} times {facts.each_step}",
        Evidence("breaks_per_step", per_step, "events", "Compiled pieces called inside another, per step."),
        Evidence("pieces", ", ".join(names[:5]), "", "Compiled pieces that follow a break."),
        severity="medium" if per_step > 8 else "low",
        fix=Fix(
            "Let torch report the lines that break the graph, and rewrite them.",
            "model = torch.compile(model)",
            "model = torch.compile(model, fullgraph=True)  # or TORCH_LOGS=graph_breaks python train.py",
        ),
        at=(int(calls.thread[rests[0]]), int(calls.start_ns[rests[0]])),
    )


@rule("recompilations", on_cpu=True)
def recompilations(facts: TraceFacts) -> Iterator[Finding]:
    """The same code was compiled in several versions.

    Needs the log of torch.compile, which says why, or the ranges that torch records around compiled code, where
    the second number in their names counts the versions. Each version costs a compilation once, and adds guards
    that each call checks.
    """
    again = [each for each in facts.compile_log.compilations if each.reason] if facts.compile_log else []
    if again:
        yield from _recompiled(facts, again)
        return
    calls = _ranges(facts, REGION)
    versions: Counter[str] = Counter()
    for name in set(calls.text("name")):
        if match := REGION.match(name):
            versions[match[1]] = max(versions[match[1]], int(match[2]))
    frame, most = max(versions.items(), key=lambda item: item[1])
    if not most:
        return
    yield facts.finding(
        f"Frame {frame} was recompiled {counted(most, 'time')}",
        Evidence("recompilations", sum(versions.values()), "events", "Versions beyond the first."),
        severity="medium" if most > 2 else "low",
        fix=Fix(
            "Let torch report what changed, and mark the dimension as dynamic.",
            "model = torch.compile(model)",
            "torch._dynamo.mark_dynamic(batch, 1)  # TORCH_LOGS=recompiles says which dimension",
        ),
    )


def _recompiled(facts: TraceFacts, again: list[Compilation]) -> Iterator[Finding]:
    """Yield a finding for each function that the log says was compiled again."""
    for site in dict.fromkeys(each.site for each in again):
        own = [each for each in again if each.site == site]
        took_ns = sum(each.total_ns for each in own)
        yield facts.finding(
            f"{site.function} was recompiled {counted(len(own), 'time')}, "
            f"in {duration(took_ns)}: {own[-1].reason}",
            Evidence("recompilations", len(own), "events", "Compilations after the first."),
            Evidence("compile_ns", took_ns, "ns", "Time that they took in the whole run."),
            Evidence("reason", own[-1].reason, "", "Reason for the last recompilation."),
            severity="medium" if len(own) > 2 else "low",
            site=site,
            fix=Fix(
                "Mark the dimensions that change as dynamic, or keep them fixed.",
                "step = torch.compile(step)",
                "torch._dynamo.mark_dynamic(batch, 0)  # or torch.compile(step, dynamic=True)",
            ),
        )


@rule("compile-time", on_cpu=True)
def compile_time(facts: TraceFacts, *, seconds: float = 60) -> Iterator[Finding]:
    """torch.compile took much time in the whole run.

    Needs the log of torch.compile. Caches on disk and regional compilation (one layer of many) shorten it. The
    time is spent once per run, so a step wins nothing. A minute is this library's choice.
    """
    log = _log(facts)
    total_ns = sum(each.total_ns for each in log.compilations)
    if total_ns < seconds * 1e9:
        return
    most = max(log.compilations, key=lambda each: each.total_ns)
    inductor_ns = [each.inductor_ns for each in log.compilations if each.inductor_ns is not None]
    yield facts.finding(
        f"torch.compile took {duration(total_ns)} in the run, most of it for {most.site.function}",
        Evidence("compile_ns", total_ns, "ns", "Time of all compilations."),
        Evidence("inductor_ns", sum(inductor_ns) if inductor_ns else None, "ns", "Part of it in Inductor."),
        Evidence("compilations", len(log.compilations), "events", "Compilations."),
        severity="low",
        site=most.site,
        fix=Fix(
            "Compile one layer that repeats instead of the whole model, and keep the cache between runs.",
            "model = torch.compile(model)",
            "for layer in model.layers: layer.compile()  # TORCHINDUCTOR_FX_GRAPH_CACHE=1 keeps the results",
        ),
    )


@rule("generated-kernels", gpu=True)
def generated_kernels(facts: TraceFacts, *, share: float = 0.05) -> Iterator[Finding]:
    """A kernel that Inductor generated takes a large part of the step; the log names the lines it comes from.

    Needs the log of torch.compile. The finding says where to start; how much can be won is unknown.
    """
    log, kernels = _log(facts), facts.kernels
    for code in np.unique(kernels.name).tolist():
        kernel = log.kernels.get(kernels.strings[code])
        rows = kernels.where(kernels.name == code)
        ns = facts.per_gpu(int(rows.duration_ns.sum()))
        if kernel is None or facts.share(ns) < share:
            continue
        lines = ", ".join(f"{PurePath(site.file).name}:{site.line}" for site in kernel.sites)
        yield facts.finding(
            f"{kernel.name} takes {duration(ns)} {facts.each_step}" + (f": it computes {lines}" if lines else ""),
            Evidence("gpu_ns", ns, "ns", "Its time per step."),
            Evidence("operators", ", ".join(kernel.operators) or None, "", "Operators that it computes."),
            Evidence("lines", lines or None, "", "Lines of the program that the operators come from."),
            severity="low",
            kernel=kernel.name,
            site=kernel.sites[0] if kernel.sites else None,
            at=facts.place_of(rows),
        )


def _log(facts: TraceFacts) -> CompileLog:
    if facts.compile_log is None:
        raise MissingEvidenceError("there is no log of torch.compile: record with TORCH_TRACE=FOLDER")
    return facts.compile_log


@rule("cache-lookups", on_cpu=True, gpu=True, share=0.01, of="overhead")
def cache_lookups(facts: TraceFacts) -> Iterator[Finding]:
    """Each call of compiled code checks its guards, which takes a noticeable part of the step.

    Needs the ranges that torch records around the look-up. The time to win is that time, at most the time that the
    GPU idles for later launches.
    """
    look_ups, ns = facts.of_one_process(_ranges(facts, LOOK_UP))
    calls, win = len(look_ups) / facts.steps, facts.cpu_win(look_ups)
    yield facts.finding(
        f"{count(calls)} look-ups of compiled code {facts.each_step} take {duration(facts.per_step(ns))}",
        Evidence("calls_per_step", calls, "events", "Look-ups per step." + facts.whose),
        win_ns=win,
        fix=Fix(
            "Compile one large function instead of many small ones, and skip guards that cannot fail.",
            "for layer in layers: layer.forward = torch.compile(layer.forward)",
            "model = torch.compile(model)",
        ),
    )


@rule("compiled-overhead", on_cpu=True, gpu=True, share=0.02, of="overhead")
def compiled_overhead(facts: TraceFacts, *, ratio: float = 3) -> Iterator[Finding]:
    """Compiled code keeps the CPU busy much longer than the GPU.

    Needs the ranges that torch records around compiled code. On tiny work the wrapper of a compiled function costs
    more than eager operators. The time to win is the CPU time above the GPU time, at most the time that the GPU
    idles for later launches.
    """
    calls, cpu_ns = facts.of_one_process(_ranges(facts, REGION))
    starts, ends = merge_overlaps(calls.start_ns, calls.end_ns)
    launched, runtime = facts.gpu.launch >= 0, facts.trace.runtime
    calling = facts.gpu.launch[launched]
    of = np.searchsorted(starts, runtime.start_ns[calling], "right") - 1
    inside = (of >= 0) & (runtime.start_ns[calling] < ends[of])
    inside &= np.isin(facts.process_of[runtime.thread[calling]], facts.process_of[calls.thread])
    gpu_ns = int(facts.gpu.duration_ns[launched][inside].sum())
    win = int(facts.cpu_win(calls, but_ns=gpu_ns))  # no replay can show calls that take part of their time
    if cpu_ns < ratio * gpu_ns:
        return
    yield facts.finding(
        f"Compiled code takes {duration(facts.per_step(cpu_ns))} {facts.each_step} on the CPU for "
        f"{duration(facts.per_gpu(gpu_ns))} on the GPU",
        facts.cpu_time("cpu_ns", cpu_ns, "CPU time in compiled code per step."),
        facts.gpu_time("gpu_ns", gpu_ns, "GPU time that it launched per step."),
        win_ns=win,
        fix=Fix(
            "Replay the compiled code with CUDA graphs.",
            "model = torch.compile(model)",
            'model = torch.compile(model, mode="reduce-overhead")',
        ),
        at=(int(calls.thread[0]), int(calls.start_ns[0])),
    )
