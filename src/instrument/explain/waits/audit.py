"""`audit_syncs`: finds synchronizations in a trace of any profiler."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from ...base.findings import SyncFinding
from ...read.jobs.read import read_any
from ...read.measures.synchronizations import (
    COPY,
    EXPLICIT,
    FREE,
    Synchronization,
    columns_of,
    direction,
    find_synchronizations,
    unknown_calls,
)
from ...read.tables.notes import to_record
from ...read.tables.steps import span
from ...read.tables.trace import Trace
from .comments import allowed_at, mistaken_comments
from .events import Recorder, SyncEvent
from .operations import direction_of, name_in_trace
from .report import SyncReport
from .trace_context import CallContext, TraceContext

_MAX_NAMES = 3  # of calls, in a sentence
_UNKNOWN = "this library does not know which calls of the trace's runtime wait for the GPU: {}"


def audit_syncs(trace: Trace | str | os.PathLike[str], *, live: SyncReport | None = None) -> SyncReport:
    """Return every synchronization in a trace of torch.profiler, Nsight Systems or rocprof.

    Everything that one operator waits for is one synchronization, under the name of the outermost operator:
    ``blocked_ns`` is the time in the calls that blocked, ``idle_ns`` the time that they left the GPU idle. The
    synchronizations with which torch.profiler itself begins and ends a recording are left out.

    Args:
        trace: a `Trace` from `instrument.read_trace`, or the path of a file that it reads.
        live: the report of live detection in the same run; the coverage then lists what the report does not
            explain, and so does `unexplained`.

    Raises:
        TypeError: ``trace`` is neither of these, or holds several traces.
        TraceError, OSError: the file cannot be read.
    """
    recorded = read_any(trace) if isinstance(trace, (str, os.PathLike)) else trace
    if not isinstance(recorded, Trace):
        raise TypeError(f'"trace" must be one trace, or the path of its file: {trace!r:.200}')
    return audit(recorded, live)[0]


def audit(recorded: Trace, live: SyncReport | None = None) -> tuple[SyncReport, list[Synchronization]]:
    """Return the report of `audit_syncs`, and the synchronizations of the program one by one."""
    waits = find_synchronizations(recorded)
    program = TraceContext(recorded, *columns_of(waits, "thread", "start_ns"))
    contexts = [program.context(row) for row in range(len(waits))]
    own = _rows_of_profiler(recorded, waits, contexts)
    # A function says less than a line: its copies in each direction, and its regions, are separate findings.
    recorders: dict[object, Recorder] = defaultdict(Recorder)
    unattributed = 0
    for rows in _rows_of_events(recorded, waits, contexts, own):
        event = _event(recorded, program, [waits[row] for row in rows], contexts[rows[0]])
        somewhere = event.site is not None or event.via is not None
        recorders[event.direction, () if somewhere else event.region].add(event)
        unattributed += contexts[rows[0]].op is None and not somewhere and not event.region
    findings = [finding for recorder in recorders.values() for finding in recorder.findings]
    dropped = sum(recorder.dropped for recorder in recorders.values())
    report = SyncReport(
        "trace",
        findings,
        steps=len(recorded.steps),
        dropped=dropped,
        unavailable_reason=_reason_unavailable(recorded, bool(waits)),
        span_ns=_span(recorded),
    )
    report.coverage = _coverage(recorded, sum(finding.count for finding in findings), len(own), unattributed)
    report.unmatched = mistaken_comments(findings)
    report.coverage += report.unmatched
    if live is not None:
        report.coverage.append(_comparison(unexplained(report, live)))
    return report, [wait for row, wait in enumerate(waits) if row not in own]


def _reason_unavailable(trace: Trace, any_waits: bool) -> str:
    """Return why the trace does not show waits; empty if it does."""
    if not trace.runtime and not trace.syncs:
        return "the trace has no calls of a GPU's runtime"
    unknown = unknown_calls(trace)
    return _UNKNOWN.format(_some(unknown)) if unknown and not any_waits else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def _span(trace: Trace) -> int | None:
    """Return how long the steps took, or the whole recording if there are none; None if it is empty."""
    if trace.steps:
        return int(trace.steps.duration_ns.sum())
    parts = trace.runtime, trace.operators, trace.gpu
    start, end = span(*parts)
    return end - start if any(parts) else None


def unexplained(audit: SyncReport, live: SyncReport) -> list[SyncFinding]:
    """Return the findings in a trace that live detection of the same run did not report.

    Synchronizations are compared by their number for each operation, and for each step if both reports number
    their steps alike. If only a part of a finding is explained, the rest is returned without times, as it is
    unknown which part it is.
    """
    steps = [
        {step for finding in report.findings for step in finding.steps if step is not None}
        for report in (audit, live)
    ]
    by_step = bool(steps[0] & steps[1])
    unexplained_counts: Counter[tuple[str, int | None]] = Counter()
    for finding in live.findings:
        for step, count in finding.steps.items() if finding.covered else ():
            unexplained_counts[name_in_trace(finding.op), step if by_step else None] += count
    result = []
    for finding in audit.findings:
        remaining: Counter[int | None] = Counter()
        for step, count in finding.steps.items():
            key = name_in_trace(finding.op), step if by_step else None
            explained = min(count, unexplained_counts[key])
            unexplained_counts[key] -= explained
            if count > explained:
                remaining[step] = count - explained
        if total := remaining.total():
            rest = dataclasses.replace(finding, count=total, steps=remaining)
            if total < finding.count:
                rest = dataclasses.replace(rest, bytes=None, blocked_ns=None, idle_ns=None, timed=0)
            result.append(rest)
    return result


def _rows_of_profiler(trace: Trace, waits: list[Synchronization], contexts: list[CallContext]) -> set[int]:
    """Return the rows of the profiler's own synchronizations: by stack, or because nothing is open around them.

    torch.profiler ends with a synchronization. All those after the last step are the profiler's too; without steps
    only the last one is, as others may be the program's.
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
    by_stack = {row for row, wait in enumerate(waits) if wait.kind == EXPLICIT and contexts[row].profiler}
    alone = [
        row
        for row, (wait, context) in enumerate(zip(waits, contexts, strict=True))
        if wait.kind == EXPLICIT and wait.thread >= 0
        if context.op is None and context.profiler is None and not context.region
    ]
    before = {row for row in alone if waits[row].end_ns <= first}
    after = [row for row in alone if waits[row].start_ns >= last]
    if not trace.steps:
        after = after[-1:] if trace.format == "kineto" and not by_stack else []
    return by_stack | before | set(after)


def _rows_of_events(
    trace: Trace, waits: list[Synchronization], contexts: list[CallContext], without: set[int]
) -> Iterable[list[int]]:
    """Yield the rows of each event: those of one operator, or of one copy outside operators."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, (wait, context) in enumerate(zip(waits, contexts, strict=True)):
        if row in without:
            continue
        key: tuple[object, ...] = (row,)
        if context.operator is not None:
            key = wait.thread, context.operator
        elif _is_copy(wait, trace):
            key = wait.thread, "copy", wait.copy
        groups.setdefault(key, []).append(row)
    return groups.values()


def _is_copy(wait: Synchronization, trace: Trace) -> bool:
    """Return whether a wait outside operators is a copy outside operators, or directly follows one."""
    follows = wait.kind == COPY or "Stream" in wait.call
    return wait.adjacent and wait.copy >= 0 and follows and bool(trace.gpu.operator[wait.copy] < 0)


def _event(trace: Trace, program: TraceContext, waits: list[Synchronization], context: CallContext) -> SyncEvent:
    if context.op is not None:
        copies = [wait.copy for wait in waits if wait.copy >= 0 and wait.copy_ns >= context.since_ns]
    else:
        copies = [wait.copy for wait in waits if _is_copy(wait, trace)]
    copies = list(dict.fromkeys(copies))
    names = trace.gpu.where(np.array(copies, np.int64)).text("name")
    sizes = [size for size in trace.gpu.bytes[copies].tolist() if size >= 0] if copies else []
    kinds = {wait.kind for wait in waits}
    op = context.op or ("copy_" if copies or COPY in kinds else "synchronize" if EXPLICIT in kinds else "free")
    copy_direction = next((way for name in names if (way := direction(name))), direction_of(op))
    longest = sorted(waits, key=lambda wait: -wait.blocked_ns)
    cause = ", ".join(dict.fromkeys(wait.call for wait in longest))
    cause += f": {names[0]}" if names else " while the GPU worked" if kinds == {FREE} else ""
    idle = [wait.idle_ns for wait in waits if wait.idle_ns is not None]
    return SyncEvent(
        op, cause, context.site, context.via, copy_direction, sum(sizes) if sizes else None,
        sum(wait.blocked_ns for wait in waits), sum(idle) if idle else None, context.region, context.step,
        program.thread(waits[0].thread), context.backward, allowed_at(context.site),
    )  # fmt: skip


def _coverage(trace: Trace, count: int, own: int, unattributed: int) -> list[str]:
    sentences = []
    if not trace.runtime:
        sentences.append(
            "The trace has no calls of the CUDA or HIP runtime, which show synchronizations: record with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or nsys profile --trace=cuda,nvtx."
        )
    elif unknown := unknown_calls(trace):
        sentences.append(f"Not checked: calls of a runtime whose waits are not known, such as {_some(unknown)}.")
    if not trace.gpu:
        sentences.append("The trace has no work on a GPU: copies and idle times are unknown.")
    if not trace.frames:
        sentences.append(
            "No Python stacks were recorded: no synchronization has a line. torch.profiler records them with "
            f"{to_record(trace.metadata, with_stack=True)}."
        )
    else:
        sentences.append(
            "Python stacks in a trace show the function that synchronized; its line is known if the source is on "
            "this machine and has only one such call."
        )
    if not trace.operators and count:
        sentences.append("No operators were recorded: most synchronizations are named after runtime calls.")
    if not trace.steps:
        sentences.append("No steps are marked in the trace: numbers per step are for the whole trace.")
    if trace.lost:
        sentences.append(f"Not all of the file could be read: {'; '.join(trace.lost.reasons)}.")
    if own:
        sentences.append(f"Left out: {own} synchronization{'s' * (own > 1)} of the profiler itself.")
    if unattributed:
        sentences.append(
            f"Unattributed: {unattributed} of {count} synchronizations are outside operators, regions and "
            "Python functions."
        )
    return sentences


def _comparison(missed: list[SyncFinding]) -> str:
    if not missed:
        return "Live detection explains every synchronization in the trace."
    counts: Counter[str] = Counter()
    for finding in missed:
        counts[finding.op] += finding.count
    what = ", ".join(f"{op} ({count})" for op, count in counts.most_common())
    return f"Unattributed: in the trace, but not reported by live detection: {what}."
