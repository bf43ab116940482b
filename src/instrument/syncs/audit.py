"""Finds in a recorded trace, of any profiler, where the CPU waited for the GPU."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from ..findings import Finding
from ..traces.read import read_trace
from ..traces.trace import Trace
from ..traces.waits import COPY, EXPLICIT, FREE, Wait, direction, find
from .comments import allowed_at
from .events import SyncEvent
from .operations import direction_of, name_in_trace
from .recorder import Recorder
from .report import SyncReport
from .trace_context import CallContext, TraceContext


def audit_syncs(trace: Trace | str | os.PathLike[str], *, live: SyncReport | None = None) -> SyncReport:
    """Return every wait of the CPU for the GPU that a trace of torch.profiler, Nsight Systems or rocprof holds.

    All that one operator waited is one wait, under the name of the outermost one: `blocked_ns` is the time in
    the calls that waited, `idle_ns` how long they left the GPU without work. The synchronizations with which
    torch.profiler itself begins and ends a recording are left out.

    Args:
        trace: what `instrument.read_trace` returned, or the path of a file that it reads.
        live: what live detection found in the same run; the coverage then says how much of the trace it does not
            explain, and `unexplained` lists it.

    Raises:
        TypeError: ``trace`` is something else, or several traces.
        TraceError, OSError: the file cannot be read.
    """
    recorded = read_trace(trace) if isinstance(trace, (str, os.PathLike)) else trace
    if not isinstance(recorded, Trace):
        raise TypeError(f'"trace" must be one trace, or the path of its file: {trace!r:.200}')
    waits = find(recorded)
    thread = np.array([wait.thread for wait in waits], np.int64)
    program = TraceContext(recorded, thread, np.array([wait.start_ns for wait in waits], np.int64))
    around = [program.around(row) for row in range(len(waits))]
    own = _of_profiler(recorded, waits, around)
    # A function is less than a line: what it copies in either direction, or waits in which region, stays apart.
    recorders: dict[object, Recorder] = defaultdict(Recorder)
    unattributed = 0
    for rows in _together(waits, around, program, own):
        event = _event(recorded, program, [waits[row] for row in rows], around[rows[0]])
        somewhere = event.site is not None or event.via is not None
        recorders[event.direction, () if somewhere else event.region].add(event)
        unattributed += around[rows[0]].op is None and not somewhere and not event.region
    findings = [found for recorder in recorders.values() for found in recorder.findings]
    dropped = sum(recorder.dropped for recorder in recorders.values())
    unavailable_reason = (
        "" if len(recorded.runtime) or len(recorded.syncs) else "the trace has no calls of CUDA or HIP"
    )
    report = SyncReport(
        "trace",
        findings,
        steps=len(recorded.steps),
        dropped=dropped,
        unavailable_reason=unavailable_reason,
        span_ns=_span(recorded),
    )
    report.coverage = _coverage(recorded, sum(found.count for found in findings), len(own), unattributed)
    if live is not None:
        report.coverage.append(_compared(unexplained(report, live)))
    return report


def _span(trace: Trace) -> int | None:
    """How long the steps took, or without any, all that was recorded; None where nothing was."""
    if trace.steps:
        return int(trace.steps.duration_ns.sum())
    parts = [part for part in (trace.runtime, trace.operators, trace.gpu) if part]
    if not parts:
        return None
    return max(int(part.end_ns.max()) for part in parts) - min(int(part.start_ns.min()) for part in parts)


def unexplained(audit: SyncReport, live: SyncReport) -> list[Finding]:
    """Return what a trace shows and live detection of the same run did not report.

    Waits are compared by how many there are of an operation, in each step where both number their steps alike.
    Of a finding that is explained in part, the rest is returned, without times: there is no telling which.
    """
    steps = [
        {step for found in report.findings for step in found.steps if step is not None} for report in (audit, live)
    ]
    by_step = bool(steps[0] & steps[1])
    left: Counter[tuple[str, int | None]] = Counter()
    for found in live.findings:
        for step, count in found.steps.items() if found.covered else ():
            left[name_in_trace(found.op), step if by_step else None] += count
    result = []
    for found in audit.findings:
        remaining: Counter[int | None] = Counter()
        for step, count in found.steps.items():
            key = name_in_trace(found.op), step if by_step else None
            explained = min(count, left[key])
            left[key] -= explained
            if count > explained:
                remaining[step] = count - explained
        if total := remaining.total():
            rest = dataclasses.replace(found, count=total, steps=remaining)
            if total < found.count:
                rest = dataclasses.replace(rest, bytes=None, blocked_ns=None, idle_ns=None, timed=0)
            result.append(rest)
    return result


def _of_profiler(trace: Trace, waits: list[Wait], around: list[CallContext]) -> set[int]:
    """The synchronisations that the profiler made: its stack says so, or nothing of the program is around them.

    torch.profiler ends with one. What follows the last step is the profiler's too; where no steps are marked,
    another one before it may be the program's.
    """
    launches = trace.runtime.where(trace.gpu.launch[trace.gpu.launch >= 0])
    parts = [part for part in (trace.operators, trace.regions, trace.steps, launches) if part]
    if not parts:
        return set()
    first = min(int(part.start_ns.min()) for part in parts)
    last = max(
        [int(part.start_ns.max()) for part in parts]
        + [int(part.end_ns.max()) for part in (trace.operators, trace.steps) if part]
    )
    told = {row for row, wait in enumerate(waits) if wait.kind == EXPLICIT and around[row].profiler}
    silent = [
        row
        for row, (wait, here) in enumerate(zip(waits, around, strict=True))
        if wait.kind == EXPLICIT and wait.thread >= 0
        if here.op is None and here.profiler is None and not here.region
    ]
    before = {row for row in silent if waits[row].end_ns <= first}
    after = [row for row in silent if waits[row].start_ns >= last]
    if not trace.steps:
        after = after[-1:] if trace.format == "kineto" and not told else []
    return told | before | set(after)


def _together(
    waits: list[Wait], around: list[CallContext], program: TraceContext, without: set[int]
) -> Iterable[list[int]]:
    """The rows of each event: all of one operator, or of one copy outside of operators."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, (wait, here) in enumerate(zip(waits, around, strict=True)):
        if row in without:
            continue
        key: tuple[object, ...] = (row,)
        if here.operator is not None:
            key = wait.thread, here.operator
        elif _is_copy(wait, program):
            key = wait.thread, "copy", wait.copy
        groups.setdefault(key, []).append(row)
    return groups.values()


def _is_copy(wait: Wait, program: TraceContext) -> bool:
    """Whether a wait outside of operators is, or at once follows, a copy outside of operators."""
    follows = wait.kind == COPY or "Stream" in wait.call
    return wait.adjacent and wait.copy >= 0 and follows and not program.launched_by_operator(wait.copy)


def _event(trace: Trace, program: TraceContext, waits: list[Wait], here: CallContext) -> SyncEvent:
    if here.op is not None:
        copies = [wait.copy for wait in waits if wait.copy >= 0 and wait.copy_ns >= here.since_ns]
    else:
        copies = [wait.copy for wait in waits if _is_copy(wait, program)]
    copies = list(dict.fromkeys(copies))
    names = trace.gpu.where(np.array(copies, np.int64)).text("name")
    sizes = [size for size in trace.gpu.bytes[copies].tolist() if size >= 0] if copies else []
    kinds = {wait.kind for wait in waits}
    op = here.op or ("copy_" if copies or COPY in kinds else "synchronize" if EXPLICIT in kinds else "free")
    towards = next((way for name in names if (way := direction(name))), direction_of(op))
    longest = sorted(waits, key=lambda wait: -wait.blocked_ns)
    cause = ", ".join(dict.fromkeys(wait.call for wait in longest))
    cause += f": {names[0]}" if names else " while the GPU worked" if kinds == {FREE} else ""
    idle = [wait.idle_ns for wait in waits if wait.idle_ns is not None]
    return SyncEvent(
        op, cause, here.site, here.via, towards, sum(sizes) if sizes else None,
        sum(wait.blocked_ns for wait in waits), sum(idle) if idle else None, here.region, here.step,
        program.thread(waits[0].thread), here.backward, allowed_at(here.site),
    )  # fmt: skip


def _coverage(trace: Trace, count: int, own: int, unattributed: int) -> list[str]:
    said = []
    if not trace.runtime:
        said.append(
            "The trace has no calls of the CUDA or HIP runtime, by which waits are found: record with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or nsys profile --trace=cuda,nvtx."
        )
    if not trace.gpu:
        said.append("The trace has no work on a GPU: what was copied, and how long it was idle, is not known.")
    if not trace.frames:
        said.append(
            "No Python stacks were recorded: no wait has a line. torch.profiler records them with with_stack=True."
        )
    else:
        said.append(
            "Python stacks in a trace tell the function that waited; its line is known where the source is here "
            "and has only one such call."
        )
    if not trace.operators and count:
        said.append("No operators were recorded: the names of most waits are those of calls to the runtime.")
    if not trace.steps:
        said.append("No steps are marked in the trace: numbers per step are of all of it.")
    if trace.lost:
        said.append(f"Not all of the file could be read: {'; '.join(trace.lost.reasons)}.")
    if own:
        said.append(f"Left out: {own} synchronisation{'s' * (own > 1)} of the profiler itself.")
    if unattributed:
        said.append(
            f"Unattributed: {unattributed} of {count} waits are in no operator, region or Python function."
        )
    return said


def _compared(missed: list[Finding]) -> str:
    if not missed:
        return "Live detection explains every wait in the trace."
    counts: Counter[str] = Counter()
    for found in missed:
        counts[found.op] += found.count
    what = ", ".join(f"{op} ({count})" for op, count in counts.most_common())
    return f"Unattributed: in the trace, but not reported by live detection: {what}."
