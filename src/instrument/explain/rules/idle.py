"""Rules on an idle GPU: input, synchronizations, the driver, the compiler, and unexplained idle time."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ...base.findings import Evidence, Finding, Fix, SyncFinding
from ...base.units import count, counted, duration
from ...read.measures.synchronizations import COPY, EXPLICIT, FREE
from ...read.tables.intervals import clip, covered_ns, total_ns
from ...read.tables.table import Table
from ..metrics import idle
from ..replay.replay import Change, without_events
from ..replay.requests import contexts_of_waits
from .recurring import without_worker_starts
from .rule import rule
from .trace_facts import TraceFacts, Win, require

_WORKERS = 8  # processes of a DataLoader that are suggested at the most
_FEW_CORES = 2  # fewer than a loop and several workers can use


def idle_of(facts: TraceFacts, cause: str) -> Evidence:
    """Return the idle time with this cause as evidence."""
    about = f"Idle time of the GPU per step while {idle.CAUSES[cause]}."
    return facts.step_time(f"{cause}_ns", facts.idle.total(cause), about)


def percent_of_step(facts: TraceFacts, ns: float) -> str:
    """Return a time per step as a share of the step, in words."""
    return f"{100 * facts.share(ns):.0f} % of the {'step' if facts.trace.steps else 'window'}"


@rule("input-wait", on_cpu=True, share=0.05, of="input")
def input_wait(facts: TraceFacts) -> Iterator[Finding]:
    """The loop waits for its next batch.

    Needs the ranges that torch records around a DataLoader, or regions of Lightning or this library. First batches
    that come late because workers start do not count: see restarted-workers. The time to win is the time during
    which the loop waits and the GPU idles; if times of the GPU are not known, the time of the ranges on the thread
    of the loop. Of a DataLoader without workers, what the suggested ones leave is taken off: they load no batch in
    less than its time divided by their number, nor the cores all work in less than its time divided by theirs. The
    default threshold, 5 % of the step, is that of torch_tb_profiler.
    """
    require(idle.input_ranges(facts.trace), "the trace has no ranges of a DataLoader")
    tables, starts = without_worker_starts(facts)
    if not tables:
        return
    waited = facts.per_step(total_ns(clip(idle.times_of(tables), *facts.recorded)))
    has_gpu_times = not facts.unknown_gpu
    longest = tables[0]
    row = int(np.argmax(longest.duration_ns))
    loads = idle.loading_by(facts.trace)
    single, workers = loads is idle.SINGLE, loads is idle.MULTIPLE
    part = _part_to_win(facts, waited) if single else 1.0
    all_ns = waited
    if has_gpu_times:
        started_ns = covered_ns(idle.times_of(starts), facts.idle.start_ns, facts.idle.end_ns).sum()
        all_ns = facts.per_step(max(facts.idle.total("input") - int(started_ns), 0))
    if single or not starts:
        more = f"--workers {_workers(facts, waited)}" if single else "--workers 2x"
        words = more if single or (workers and not _lacks_cores(facts)) else "--without dataloader"
        win = facts.win_by(words, round(all_ns * part))
    else:
        win = Win(all_ns, lambda: without_events(*tables))
    why = "The DataLoader has no worker processes" * single + "The workers do not keep up" * workers
    share_of_step = "the GPU idles " * has_gpu_times + percent_of_step(facts, win)
    yield facts.finding(
        f"The loop waits {duration(waited)} {facts.each_step} for the next batch: {share_of_step}",
        Evidence("waited_ns", waited, "ns", "Time per step that the loop spends in the DataLoader."),
        *([idle_of(facts, "input")] if has_gpu_times else []),
        win_ns=win,
        fix=_more_workers(facts, why, waited, single),
        at=(int(longest.thread[row]), int(longest.start_ns[row])),
    )


def _lacks_cores(facts: TraceFacts) -> bool:
    """Return whether the machine has no core for another worker."""
    cores = idle.cores_of(facts.trace)
    return cores is not None and cores <= _FEW_CORES


def _workers(facts: TraceFacts, waited: int) -> int:
    """Return how many workers to suggest: the loop needs a core of its own, unless it waits most of the time."""
    cores = idle.cores_of(facts.trace)
    own = 2 * waited < facts.step_ns
    return _WORKERS if cores is None else max(min(_WORKERS, cores - own), 1)


def _part_to_win(facts: TraceFacts, waited: int) -> float:
    """Return the part of its waiting that the loop saves with workers, where it loaded by itself."""
    rest = facts.step_ns - waited
    least = max(waited / _workers(facts, waited), facts.step_ns / (idle.cores_of(facts.trace) or np.inf))
    return 1 - max(least - rest, 0) / waited if waited else 0.0


def _more_workers(facts: TraceFacts, why: str, waited: int, single: bool) -> Fix:
    """Return the fix of a loop that waits for batches, as far as the CPU cores of the machine allow it."""
    cores = idle.cores_of(facts.trace)
    text = f"{why}: load" if why else "Load"
    if cores is not None and _lacks_cores(facts) and not single:
        cheaper = f"{why}: make a batch" if why else "Make a batch"
        return Fix(
            f"{cheaper} cheaper, such as by preparing the data once and storing the result: the "
            f"{counted(cores, 'CPU core')} of the machine that recorded the trace leave no room for more worker "
            "processes."
        )
    workers = _workers(facts, waited)
    options = [f"num_workers={workers}", "pin_memory=True" * bool(facts.trace.gpu), "persistent_workers=True"]
    because = (
        ""
        if cores is None
        else f", of which the {counted(cores, 'CPU core')} of the machine that recorded the trace allow {workers}"
    )
    return Fix(
        f"{text} batches ahead of the loop, in {'more ' * (not single)}worker processes{because}.",
        "DataLoader(dataset, ...)",
        f"DataLoader(dataset, ..., {', '.join(filter(None, options))})",
    )


@rule("long-synchronization", on_cpu=True, gpu=True, share=0.01, of="synchronization")
def long_synchronization(facts: TraceFacts) -> Iterator[Finding]:
    """A line makes the CPU wait for the GPU, and the GPU then idles until the CPU has launched more work.

    Needs calls of the CUDA or HIP runtime. The profiler's own synchronizations are left out. The time to win is
    the idle time after the synchronization, at most the time that the CPU was blocked: for that long, the CPU
    could have run ahead. Idle time with a more specific cause, such as a DataLoader, does not count.
    """
    require(facts.trace.runtime or facts.trace.syncs, "the trace has no calls of the runtime")
    budget = facts.per_step(facts.idle.total("synchronization"))
    for sync in facts.syncs.syncs:
        win_ns = min(sync.win_ns or 0, budget)
        win = (
            facts.win_by(f"--without {shlex.quote(f'sync:{sync.site}')}", win_ns)
            if sync.site
            else Win(win_ns, partial(_asynchronous, facts, sync))
        )
        budget -= win
        yield facts.finding(
            f"{sync.op} makes the CPU wait for the GPU, which then idles {duration(win)} {facts.each_step}",
            *(_per_step(facts, each) for each in sync.evidence),
            win_ns=win,
            fix=sync.fix,
            coverage=sync.coverage,
            region=sync.region,
            site=sync.site or sync.via,
            operator=sync.op,
        )


def _per_step(facts: TraceFacts, total: Evidence) -> Evidence:
    """Return a total of all steps as a number per step."""
    if not isinstance(total.value, (int, float)):
        return total
    value = total.value / facts.steps
    about = f"{total.definition.rstrip('.')}, per step."
    return total._replace(value=round(value) if total.unit == "ns" else value, definition=about)


_OUTSIDE = {EXPLICIT: "synchronize", COPY: "copy_", FREE: "free"}  # names of what is in no operator, as in `audit`


def _asynchronous(facts: TraceFacts, sync: SyncFinding) -> Change:
    """Return the change in which the synchronizations of an operation without a line no longer wait."""
    graph, same = facts.replayer.graph, (None, sync.via, sync.op)
    contexts = contexts_of_waits(graph)
    ops = [each.op or _OUTSIDE.get(wait.kind) for wait, each in zip(graph.waits, contexts, strict=True)]
    rows = [row for row, each in enumerate(contexts) if (each.site, each.via, ops[row]) == same]
    return Change(asynchronous=frozenset(rows))


@rule("garbage-collection", on_cpu=True, gpu=True, share=0.01, of="overhead")
def garbage_collection(facts: TraceFacts) -> Iterator[Finding]:
    """Python's garbage collector stops the loop while the GPU idles.

    Needs the pauses that torch records with ``record_python_gc_info``, or regions named ``gc.collect``.
    """
    pauses = idle.named_ranges(facts.trace, idle.COLLECTION)
    require(pauses, "the trace has no pauses of the garbage collector")
    yield from _of_cause(
        facts,
        "garbage_collection",
        pauses,
        "Python's garbage collector stops the loop",
        Fix(
            "Freeze long-lived objects, and collect garbage between steps, at times of your choice.",
            "for batch in loader: ...",
            "gc.freeze(); gc.disable()\nfor batch in loader: ...  # gc.collect(1) every 1,000 steps",
        ),
    )


@rule("driver-allocation", on_cpu=True, gpu=True, share=0.01, of="overhead")
def driver_allocation(facts: TraceFacts) -> Iterator[Finding]:
    """The driver allocates or frees memory in the loop, which also synchronizes.

    Needs calls of the CUDA or HIP runtime. A loop with fixed shapes allocates in its first steps only;
    frees in later steps come from an allocator that is short of memory and retries, or from ``empty_cache()``.
    """
    runtime = facts.trace.runtime
    calls = facts.within(runtime.where(runtime.matching("name", idle.ALLOCATION)))
    frees = len(facts.rows_matching(calls, "Free|Unmap|Release"))
    yield from _of_cause(
        facts,
        "allocation",
        [calls],
        f"The driver allocates or frees memory {counted(len(calls), 'time')} in the window",
        Fix(
            "Let the caching allocator keep its memory: remove torch.cuda.empty_cache() from the loop, keep "
            "shapes fixed, and reduce fragmentation with expandable segments.",
            "torch.cuda.empty_cache()",
            '# PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"',
        ),
        Evidence("calls", len(calls), "events", "Calls that allocate or free memory, in the window."),
        Evidence("frees", frees, "events", "Calls that free memory, in the window."),
    )


@rule("module-loading", on_cpu=True, gpu=True, share=0.01, of="overhead")
def module_loading(facts: TraceFacts) -> Iterator[Finding]:
    """The driver loads the code of kernels in the recorded window.

    Needs calls of the driver. CUDA loads a kernel at its first launch (lazy loading): a warm-up with all shapes
    moves the loading out of the window.
    """
    loading = facts.within(facts.trace.runtime.where(facts.trace.runtime.matching("name", idle.LOADING)))
    yield from _of_cause(
        facts,
        "module_loading",
        [loading],
        f"The driver loads the code of kernels in {counted(len(loading), 'call')}",
        Fix("Record after a warm-up. In production, CUDA_MODULE_LOADING=EAGER loads everything at the start."),
        Evidence("calls", len(loading), "events", "Calls that load code."),
    )


@rule("initialization", on_cpu=True, gpu=True, share=0.01, of="overhead")
def initialization(facts: TraceFacts) -> Iterator[Finding]:
    """The driver starts, or first loads code, in the recorded window.

    Needs calls of the CUDA or HIP runtime. In a loop, no call takes 100 ms while the GPU idles, except calls that
    copy, synchronize or pin memory; at the start of a program, the first launch and the first ``cudaFree`` take
    seconds. The cost occurs once.
    """
    slow = facts.within(idle.slow_calls(facts.trace))
    idle_ns = covered_ns((facts.idle.start_ns, facts.idle.end_ns), slow.start_ns, slow.end_ns)
    by_name: Counter[str] = Counter()
    for name, ns in zip(slow.text("name"), idle_ns.tolist(), strict=True):
        by_name[name] += ns
    for name, ns in by_name.most_common(1):
        yield from _of_cause(
            facts,
            "initialization",
            [slow],
            f"The driver starts while the trace is recorded ({name} takes {duration(ns)})",
            facts.after_warm_up("Record after a warm-up."),
            Evidence("calls", len(slow), "events", "Calls of the driver in the window that take over 100 ms."),
            Evidence("longest", _listed(by_name), "", "Idle time of the GPU during these calls, by name."),
        )


def _listed(times: Counter[str]) -> str:
    """Return the four longest times in words."""
    return ", ".join(f"{name} {duration(ns)}" for name, ns in times.most_common(4))


@rule("launch-latency", gpu=True, share=0.05, of="latency")
def launch_latency(facts: TraceFacts) -> Iterator[Finding]:
    """The GPU pauses between kernels that were launched in time.

    Needs GPU work with known launches. Gaps shorter than 30 us count, which is HTA's limit for a delay by the
    kernel itself: a GPU takes one or two us from the end of a kernel to the start of the next. Fewer and longer
    kernels have fewer gaps, and the gaps in a CUDA graph are shorter. The threshold is half of xprof's for all
    idle time.
    """
    by_gap = facts.idle.by_cause["launch_latency"]
    win, gaps = facts.per_step(facts.idle.total("launch_latency")), int(np.count_nonzero(by_gap))
    if not gaps:
        return
    yield facts.finding(
        f"The GPU pauses {count(gaps / facts.steps)} times {facts.each_step} between kernels "
        f"that were launched in time, {percent_of_step(facts, win)}",
        idle_of(facts, "launch_latency"),
        Evidence("gaps", gaps / facts.steps, "events", "Gaps of less than 30 us per step."),
        Evidence("median_gap_ns", float(np.median(by_gap[by_gap > 0])), "ns", "Median length of a gap."),
        win_ns=win,
        confidence="medium",
        fix=Fix(
            "Run fewer and longer kernels: fuse them with torch.compile, or enlarge the batch. CUDA graphs "
            "shorten the gaps (reduce-overhead uses them).",
            "model = MyModel().cuda()",
            'model = torch.compile(MyModel().cuda(), mode="reduce-overhead")',
        ),
        coverage=facts.metrics.about("gaps_device_ns").coverage,
    )


@rule("compilation", on_cpu=True, gpu=True, share=0.01, of="overhead")
def compilation(facts: TraceFacts) -> Iterator[Finding]:
    """torch.compile compiles in the recorded window.

    Needs the phases that torch records while it compiles.
    """
    ranges, phases = idle.named_ranges(facts.trace, idle.COMPILATION), Counter[str]()
    for events in map(facts.within, ranges):
        for name, took_ns in zip(events.text("name"), events.duration_ns.tolist(), strict=True):
            phases[name.removesuffix(" (dynamo_timed)")] += took_ns
    yield from _of_cause(
        facts,
        "compilation",
        ranges,
        "torch.compile compiles while the GPU idles",
        Fix(
            "Record after the warm-up. If torch.compile compiles in every step, shapes or code change: mark the "
            "dimensions that change as dynamic.",
            "step = torch.compile(step)",
            "step = torch.compile(step, dynamic=True)",
        ),
        Evidence("phases", _listed(phases), "", "The longest phases, which may contain one another."),
    )


def _of_cause(
    facts: TraceFacts, cause: str, without: Sequence[Table], title: str, fix: Fix, *evidence: Evidence
) -> Iterator[Finding]:
    """Yield the finding of one cause of idle time, if it occurs; a replay leaves out the events ``without``."""
    win = Win(facts.per_step(facts.idle.total(cause)), lambda: without_events(*without))
    if win:
        yield facts.finding(
            f"{title}: the GPU idles {percent_of_step(facts, win)}",
            idle_of(facts, cause),
            *evidence,
            win_ns=win,
            fix=fix,
        )


@rule("unexplained-idle", on_cpu=True, gpu=True, share=0.05, of="latency")
def unexplained_idle(facts: TraceFacts) -> Iterator[Finding]:
    """The GPU idles although its next work was launched in time, or the launch is not in the trace.

    Possible reasons are streams that wait for each other, the driver, and another process on the GPU.
    The threshold is half of xprof's for all idle time.
    """
    win = facts.per_step(facts.idle.total("other") + facts.idle.total("unknown"))
    gaps = facts.idle.end_ns - facts.idle.start_ns
    yield facts.finding(
        f"The GPU idles {percent_of_step(facts, win)} for a reason that the trace does not show",
        idle_of(facts, "other"),
        idle_of(facts, "unknown"),
        Evidence("longest_gap_ns", int(gaps.max(initial=0)), "ns", "The longest gap of any cause."),
        win_ns=win,
        confidence="low",
        fix=Fix(
            "Look at the longest gaps in Perfetto: do streams wait for events, or do other processes use the GPU?"
        ),
        coverage=facts.metrics.about("gaps_device_ns").coverage,
    )
