"""The page of a diagnosis: its step as a bar, timeline, flame graph, memory, roofline, ranks and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base.findings import Finding, Where
from ...base.printable import shown_lines, shown_name
from ...base.units import count, counted, duration, listed, percentage
from ...explain.diagnosis.diagnosis import Diagnosis
from ...explain.diagnosis.verdict import PARTS, definition_of_part
from ...explain.metrics.collectives import RankArrivals
from ...explain.metrics.idle import CAUSES
from ...explain.metrics.job import Job
from ...explain.metrics.operator_work import HEAVY
from ...explain.metrics.roofline import RooflineRow
from ...explain.replay.critical_path import CLASSES as PATH_CLASSES
from ...explain.replay.step_waits import StepWaits
from ...explain.rules.rule import RULES
from ...explain.rules.trace_facts import TraceFacts
from ...read.charts.flame import flame_of
from ...read.charts.timeline import CLASSES, Lane, TimelineSource, lanes_of, rows_of_steps, timeline_of
from ...read.jobs.read import RankContent
from ...read.tables.intervals import covered_ns
from ...read.tables.table import MEMCPY, Array, Table
from ..page.document import document, table_section
from ..text.diagnosis import (
    bars,
    evidence_texts,
    figures,
    hidden_texts,
    hidden_title,
    plan_command,
    plan_note,
    value_of,
)
from .memory import sections_of

_CLASSES = {
    "input": "input",
    "synchronization": "synchronization",
    "launch_latency": "latency",
    **dict.fromkeys(
        ("compilation", "garbage_collection", "allocation", "module_loading", "launch_overhead"), "overhead"
    ),
}
"""The class, and so the color, of a cause of idle time; of all others, "other"."""

BUSY_WORDS = {"compute": "compute", "communication": "exposed communication", "copies": "exposed memcpys"}
"""The words for the parts of a step during which a GPU works."""


def overview_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return what a step waits for, what the GPU does (busy time by class, idle time by cause), and the figures.

    None for a memory snapshot, which has no times, if there is nothing else to say of it.
    """
    texts = (diagnosis.opened_text, *evidence_texts(diagnosis), *figures(diagnosis))
    notes = [shown_name(text) for text in (*texts, *diagnosis.rules_texts) if text]
    if not diagnosis.step_ns and not notes:
        return None
    return {
        "id": "overview",
        "type": "overview",
        "title": "Where the step goes" if diagnosis.has_steps else "Where the time goes",
        "step_ns": diagnosis.step_ns,
        "each": diagnosis.each_step,
        "bars": list(_bars(diagnosis)),
        "figures": list(_figures(diagnosis)),
        "notes": notes,
    }


def _bars(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    waits = (
        [*_waits(diagnosis.waits, "a step" if diagnosis.has_steps else "the window")] if diagnosis.waits else []
    )
    for name, title, _ in bars(diagnosis):
        rows = waits if name == "waits" else _parts(diagnosis)
        keys = ("name", "class", "ns", "definition")
        yield {"id": name, "title": title, "parts": [dict(zip(keys, row, strict=True)) for row in rows if row[2]]}


def _waits(waits: StepWaits, what: str) -> Iterator[tuple[str, str, int, str]]:
    for name, ns in waits.parts.items():
        won = f" Without it, {what} is {duration(waits.wins[name])} shorter." if name in waits.wins else ""
        yield name, name, ns, f"{PATH_CLASSES[name][0].upper()}{PATH_CLASSES[name][1:]}.{won}"


def _parts(diagnosis: Diagnosis) -> list[tuple[str, str, int, str]]:
    if not diagnosis.has_gpu:
        return [(name, name, ns, definition_of_part(name, gpu=False)) for name, ns in diagnosis.parts.items()]
    parts = [(words, name, diagnosis.parts.get(name, 0), PARTS[name]) for name, words in BUSY_WORDS.items()]
    return parts + [
        (f"idle: {name}", _CLASSES.get(cause, "other"), ns, _CAUSES[name])
        for cause, ns in diagnosis.idle_by_cause.items()
        for name in [cause.replace("_", " ")]
    ]


def _figures(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    figures = []
    if diagnosis.step_ns:
        figures.append(("mean step" if diagnosis.has_steps else "window", duration(diagnosis.step_ns)))
    if diagnosis.has_steps:
        figures.append(("steps recorded", count(diagnosis.steps)))
    if diagnosis.stretch is not None:
        low, high = diagnosis.stretch_range or (diagnosis.stretch, diagnosis.stretch)
        span = f"{diagnosis.stretch:.2f} x" + f" ({low:.2f} to {high:.2f})" * (low < high)
        figures.append(("recorded step / step outside the window", span))
    if diagnosis.rank is not None:
        figures.append(("rank", str(diagnosis.rank)))
    if diagnosis.goodput["mfu"] is not None:
        figures.append(("model FLOPs utilization", percentage(diagnosis.goodput["mfu"])))
    if diagnosis.memory is not None:
        figures.append(("memory allocated at the peak", f"{diagnosis.memory.peak_bytes / 1e6:,.0f} MB"))
    return figures


_CAUSES = {cause.replace("_", " "): f"The GPU idles while {text}." for cause, text in CAUSES.items()}


def plan_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return what to change first, and what that hides; None if there is neither."""
    plan = diagnosis.plan() if diagnosis.facts else None
    if plan is None or not (plan.rows or diagnosis.hidden):
        return None
    notes = [str(plan.end), f"{plan_note(diagnosis)} {plan_command(diagnosis)}"] if plan.rows else [str(plan)]
    if diagnosis.hidden:
        notes.append(f"{hidden_title(diagnosis)}: {'; '.join(hidden_texts(diagnosis))}.")
    return {
        "id": "plan",
        "type": "plan",
        "title": "Plan",
        "recorded_ns": plan.recorded_ns,
        "rows": [row._asdict() for row in plan.rows],
        "notes": [shown_lines(text) for text in notes],
    }


def timeline_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return the timeline of the window; None if nothing in it takes time.

    Times are in ns from the start of the window; the timeline begins with the first step, which may be earlier.
    The longest gaps come with their cause, length and start, and what ends them.
    """
    facts = diagnosis.facts
    if facts is None:
        return None
    shown = (facts.recorded[0], facts.window[1])
    source = TimelineSource(facts.trace, facts.gpu, facts.communication, shown, facts.window[0], _CAUSES)
    streams, threads, notes = lanes_of(source)
    groups = {lane.group for lane in streams}
    idle = _idle(facts, groups.pop() if len(groups) == 1 else "All GPUs")
    section = timeline_of(source, [idle] * bool(len(idle.start_ns)) + streams + threads, notes)
    if section is None:
        return None
    gaps = [
        [gap.cause.replace("_", " "), gap.duration_ns, gap.start_ns, shown_name(str(gap.where))]
        for gap in diagnosis.idle_gaps
    ]
    return section | {"steps": _with_parts(facts, section["steps"]), "gaps": gaps}


def _idle(facts: TraceFacts, group: str) -> Lane:
    """Return the gaps during which no GPU works, each with the cause of most of it and the work that ends it."""
    idle, work = facts.idle, len(facts.gpu)
    cause = np.argmax(np.stack([idle.by_cause[cause] for cause in CAUSES]), axis=0)
    kinds = np.array([CLASSES.index(_CLASSES.get(cause, "other")) for cause in CAUSES])
    following = np.searchsorted(facts.gpu.start_ns, idle.end_ns)
    ended_by = np.where(following < work, following, -1)
    name, depth = cause + len(facts.trace.strings), np.zeros(len(cause), np.int64)
    return Lane(group, "idle: no GPU works", idle.start_ns, idle.end_ns, name, kinds[cause], ended_by, depth)


def _with_parts(facts: TraceFacts, rows: list[list[int | None]]) -> list[list[int | None]]:
    """Return the rows of the steps with the parts of their time by what the GPUs do, if that is known."""
    if not facts.gpu or facts.unknown_gpu:
        return rows
    steps = facts.trace.steps.where(rows_of_steps(facts.trace))
    start, end, done = steps.start_ns, steps.end_ns, facts.activity
    compute, working, busy = (covered_ns(times, start, end) for times in (done.compute, done.working, done.busy))
    parts = np.stack((compute, working - compute, busy - working, end - start - busy), axis=1).tolist()
    return [[*row[:3], *of_step] for row, of_step in zip(rows, parts, strict=True)]


def flame_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return the flame graph by CPU time and by GPU time; None for a trace without ranges."""
    facts = diagnosis.facts
    if facts is None:
        return None
    return flame_of(facts.trace, facts.gpu, facts.communication, facts.steps, diagnosis.each_step)


def memory_sections(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the memory over time, the peak, and what went wrong; nothing without a snapshot of a GPU."""
    snapshot = diagnosis.snapshot
    device = None if snapshot is None else snapshot.fullest_device
    return [] if snapshot is None or device is None else sections_of(snapshot, device)


_MOST = 1000  # operators
_ORDINARY = "fp32"  # the units that compute what is neither a matmul nor alike, whatever its type


def roofline_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return the operators, the longest on the GPU first, and the roofs of the types that they compute in.

    None for a trace without operators whose operations are known. Times are per step.
    """
    line = diagnosis.roofline
    rows = [row for row in line.rows if row.gpu_ns][:_MOST]
    if not rows:
        return None
    used = {row.kind if row.work.kind in HEAVY else _ORDINARY for row in rows if row.work.flops and row.work.bytes}
    peak = line.peak
    return {
        "id": "roofline",
        "type": "roofline",
        "title": "Roofline",
        "note": shown_name(" ".join(_roofline_notes(diagnosis, len(rows), used))),
        "each": diagnosis.each_step,
        "memory_bytes_per_s": None if peak is None else peak.memory_bytes_per_s,
        "roofs": {} if peak is None else {kind: rate for kind, rate in peak.flops_per_s.items() if kind in used},
        "operators": [_operator(row, diagnosis) for row in rows],
    }


def _roofline_notes(diagnosis: Diagnosis, shown: int, used: set[str]) -> list[str]:
    line, peak = diagnosis.roofline, diagnosis.roofline.peak
    notes = ["A dot is an operator with known operations, its area is its GPU time."]
    if line.coverage is not None:
        notes.append(f"They cover {100 * line.coverage:.0f} % of the time of all kernels.")
    if shown < len(line.rows):
        notes.append(f"The longest {shown:,} of {len(line.rows):,}.")
    if peak is not None:
        unknown = ", ".join(sorted(used - peak.flops_per_s.keys()))
        notes.append(f"Roofs: {peak.name} ({peak.source}).")
        return [*notes, f"No peak is known of {unknown}."] if unknown else notes
    trace = diagnosis.facts.trace if diagnosis.facts else None
    names = sorted({device.name or "an unnamed GPU" for device in trace.devices}) if trace else []
    why = f"the peaks of {names[0]} are not known" if len(names) == 1 else "the trace names no single kind of GPU"
    return [*notes, f"There are no roofs: {why}."]


def _operator(row: RooflineRow, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "name": shown_name(row.name),
        "sizes": " x ".join(map(str, row.work.sizes)),
        "kind": row.work.kind,
        "dtype": shown_name(row.kind),
        "calls": row.calls,
        "gpu_ns": row.gpu_ns / diagnosis.steps,
        "each": diagnosis.each_step,
        "flops": row.work.flops,
        "bytes": row.work.bytes,
        "flops_per_s": row.work.flops * row.calls * 1e9 / row.gpu_ns,
        "share": row.share,
        "bound": row.bound,
        "implausible": row.implausible,
    }


def ranks_section(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Return the ranks of the job; None for a single one. Times are means over the steps of the rank."""
    job = diagnosis.job
    if job is None or job.world_size < 2:
        return None
    met = job.arrivals
    return {
        "id": "ranks",
        "type": "ranks",
        "title": "Ranks",
        "notes": [shown_name(text) for text in _rank_notes(job)],
        "each": diagnosis.each_step,
        "shown": diagnosis.rank,
        "compared": met.collectives,
        "ranks": [_rank(rank, trace, met.ranks[rank]) for rank, trace in sorted(job.ranks.items())],
    }


def _rank(rank: int, trace: RankContent, met: RankArrivals) -> dict[str, Any]:
    steps = max(len(trace.steps), 1)
    return {
        "rank": rank,
        "last": met.last,
        "step": trace.window_ns / steps,
        "compute": trace.compute_ns / steps,
        "waited": met.waited_ns / steps,
        "caused": met.caused_ns / steps,
    }


def _rank_notes(job: Job) -> list[str]:
    arrivals = job.arrivals
    notes = [f"{len(job.ranks)} of {counted(job.world_size, 'rank')} are recorded."]
    if job.missing:
        notes.append(f"Without a trace: {_listed(job.missing)}.")
    if job.damaged:
        reasons = "; ".join(sorted({reason for lost in job.damaged.values() for reason in lost.reasons}))
        notes.append(f"Damaged traces: {_listed(list(job.damaged))} ({reasons}).")
    notes += [pipeline.text for pipeline in job.pipelines.pipelines[:1]]
    if arrivals.unknown:
        return [*notes, f"Who arrives last is unknown: {arrivals.unknown}."]
    latest = arrivals.latest
    if latest is None:
        return [*notes, f"No rank waits at {counted(arrivals.collectives, 'collective')} that the ranks share."]
    times = f"{arrivals.ranks[latest].last:,} of {counted(arrivals.collectives, 'shared collective')}"
    notes.append(f"The others wait longest for rank {latest}, which arrives last at {times}.")
    return [*notes, *([job.even.text] if job.even else [])]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


_MAX_ROWS = 1000
_INSIDE_NOTE = "GPU time adds up the durations of the work launched inside; busy is when any of it runs."
_INSIDE = {
    "calls": ("Calls", "count"), "cpu_ns": ("CPU time", "ns"), "gpu_ns": ("GPU time", "ns"),
    "gpu_busy_ns": ("GPU busy", "ns"), "gpu_count": ("GPU operations", "count"),
}  # fmt: skip
_TABLES = {
    "kernel_table": (
        "Kernels",
        "Kernels by name; the share is that of the time of all kernels.",
        {
            "short_name": ("Kernel", "text"), "family": ("Family", "text"), "count": ("Calls", "count"),
            "sum_ns": ("GPU time", "ns"), "share": ("Share", "percent"), "mean_ns": ("Mean", "ns"),
            "min_ns": ("Shortest", "ns"), "max_ns": ("Longest", "ns"), "name": ("Full name", "long"),
        },
    ),
    "operator_table": (
        "Operators",
        "GPU time is that of the work launched inside; busy is the time during which any of it runs.",
        {
            "name": ("Operator", "text"), "calls": ("Calls", "count"),
            "gpu_self_ns": ("Self GPU time", "ns"), "gpu_ns": ("GPU time", "ns"),
            "gpu_busy_ns": ("GPU busy", "ns"), "cpu_self_ns": ("Self CPU time", "ns"),
        },
    ),
    "region_table": ("Regions", _INSIDE_NOTE, {"name": ("Region", "text"), **_INSIDE}),
    "module_table": ("Modules", _INSIDE_NOTE, {"name": ("Module", "text"), **_INSIDE}),
    "collective_table": (
        "Collectives",
        "Exposed is the time during which nothing computes; bytes are those of the larger of input and output.",
        {
            "name": ("Collective", "text"), "group": ("Process group", "text"), "dtype": ("Type", "text"),
            "count": ("Calls", "count"), "sum_ns": ("GPU time", "ns"), "exposed_ns": ("Exposed", "ns"),
            "bytes": ("Bytes", "bytes"), "bus_bytes_per_s": ("Bus bandwidth (bytes/s)", "bytes"),
        },
    ),
}  # fmt: skip
"""By metric: the title, what the numbers are, and the columns with their title and kind."""


def table_sections(diagnosis: Diagnosis) -> Iterator[dict[str, Any] | None]:
    """Yield a section for each table of the metrics that has rows; the sums are those of the recorded window."""
    for metric, (title, note, columns) in _TABLES.items():
        rows = diagnosis.metrics.get(metric) or []
        if not rows:
            continue
        if not diagnosis.has_gpu:  # what else is of the CPU
            columns = {key: column for key, column in columns.items() if not key.startswith("gpu_")}
            note = ""
        about = diagnosis.metrics.about(metric)
        left_out = f" The longest {_MAX_ROWS:,} of {len(rows):,}." if len(rows) > _MAX_ROWS else ""
        covered = "" if about.coverage is None else f" Coverage: {100 * about.coverage:.0f} % of the GPU time."
        yield table_section(
            title.lower(),
            title,
            f"{title} of the window",
            dict(columns.values()),
            [[_value(row.get(key), kind) for key, (_, kind) in columns.items()] for row in rows[:_MAX_ROWS]],
            f"{note} Window: {about.window}.{covered}{left_out}".lstrip(),
        )


def _value(value: Any, kind: str) -> Any:
    return shown_name(str(value or "")) if kind in ("text", "long") else value


def page_of(diagnosis: Diagnosis, *, serve: Mapping[str, str | int] | None = None) -> str:
    """Return the text of the page.

    Args:
        diagnosis: the diagnosis.
        serve: see `document`.
    """
    sections = (
        overview_section(diagnosis),
        findings_section(diagnosis),
        plan_section(diagnosis),
        timeline_section(diagnosis),
        flame_section(diagnosis),
        *memory_sections(diagnosis),
        roofline_section(diagnosis),
        ranks_section(diagnosis),
        *table_sections(diagnosis),
    )
    name = Path(diagnosis.path).name
    return document(shown_name(name), shown_name(diagnosis.verdict), sections, serve=serve)


_AROUND = 0.02  # of a step: what is shown around a place whose length is unknown
_CAUSES_OF_RULE: dict[str, tuple[str, ...]] = {
    "driver-allocation": ("allocation",),
    "garbage-collection": ("garbage_collection",),
    "initialization": ("initialization",),
    "input-wait": ("input",),
    "launch-latency": ("launch_latency",),
    "launch-overhead": ("launch_overhead",),
    "long-synchronization": ("synchronization",),
    "low-utilization": tuple(CAUSES),
    "unexplained-idle": ("other", "unknown"),
}
"""The causes of idle time that a rule is about."""


def span_of(facts: TraceFacts, finding: Finding) -> tuple[int, int] | None:
    """Return where a finding shows in the timeline: start and end in ns from the start of the window.

    It is the longest idle gap of the cause, or the longest work of the class, that the rule is about; else the
    longest kernel that it names, the call of the operator or region at the time that the rule gave, the longest
    call of the region, or the step. None if it has no place in time.
    """
    where, trace, gpu = finding.where, facts.trace, facts.gpu
    if finding.rule in _CAUSES_OF_RULE:
        return _longest_gap(facts, _CAUSES_OF_RULE[finding.rule])
    if finding.rule == "exposed-communication":
        return _longest(facts, gpu.where(facts.communication))
    if finding.rule == "exposed-copies":
        return _longest(facts, gpu.where(gpu.category == MEMCPY))
    if where.kernel:
        named = np.array([text == where.kernel for text in gpu.strings])
        return _longest(facts, gpu.where(named[gpu.short_name] | named[gpu.name]))
    if finding.start_ns is not None:
        return _call_at(facts, where, finding.start_ns)
    if where.region:
        return _longest(facts, trace.regions.where(facts.rows(trace.regions, where.region[-1])))
    if where.step is not None:
        return _longest(facts, trace.steps.where(trace.steps.number == where.step))
    return None


def _longest_gap(facts: TraceFacts, causes: Collection[str]) -> tuple[int, int] | None:
    """Return the idle gap with the most time of these causes; None if there is none."""
    if not facts.gpu:
        return None
    times = np.sum([facts.idle.by_cause[cause] for cause in causes], axis=0)
    if not times.any():
        return None
    return _span(facts, facts.idle.start_ns, facts.idle.end_ns, np.argmax(times))


def _span(facts: TraceFacts, start_ns: Array, end_ns: Array, row: np.intp) -> tuple[int, int]:
    """Return the start and the end of a row, from the start of the window."""
    return int(start_ns[row]) - facts.window[0], int(end_ns[row]) - facts.window[0]


def _call_at(facts: TraceFacts, where: Where, start_ns: int) -> tuple[int, int]:
    """Return the shortest call of the operator or region of a place at a time; without one, a part of the step."""
    begin, trace = facts.window[0], facts.trace
    for table, names in ((trace.operators, (where.operator,)), (trace.regions, where.region[-1:])):
        events = table.where(facts.rows(table, *names))
        at = events.where((events.start_ns - begin <= start_ns) & (events.end_ns - begin > start_ns))
        if at:
            return _span(facts, at.start_ns, at.end_ns, np.argmin(at.duration_ns))
    around = int(_AROUND * facts.step_ns)
    return start_ns - around, start_ns + around


def _longest(facts: TraceFacts, events: Table) -> tuple[int, int] | None:
    """Return the longest of these events that begins in the window."""
    begin, end = facts.window
    events = events.where((events.start_ns >= begin) & (events.start_ns < end))
    if not events:
        return None
    return _span(facts, events.start_ns, events.end_ns, np.argmax(events.duration_ns))


def findings_section(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the findings in order, each with its texts and figures, and the rules that abstained."""
    worth = {id(finding) for finding in diagnosis.worth()}
    return {
        "id": "findings",
        "type": "findings",
        "title": "Findings",
        "nothing": diagnosis.nothing_found,
        "findings": [_finding(diagnosis, each) | {"worth": id(each) in worth} for each in diagnosis.findings],
        "abstained": [[rule, shown_name(reason)] for rule, reason in diagnosis.abstained.items()],
    }


def _finding(diagnosis: Diagnosis, finding: Finding) -> dict[str, Any]:
    rule = RULES.get(finding.rule)
    return {
        "title": shown_name(finding.title),
        "rule": finding.rule,
        "meaning": (rule.function.__doc__ or "").partition("\n")[0] if rule else "",
        "severity": finding.severity,
        "confidence": finding.confidence,
        "win_ns": finding.win_ns,
        "replayed_ns": finding.replayed_ns,
        "win_text": diagnosis.win_text(finding),
        "place": shown_name(str(finding.where)),
        "span": span_of(diagnosis.facts, finding) if diagnosis.facts else None,
        "evidence": [
            [shown_name(diagnosis.definition(each)), shown_name(value_of(each))] for each in finding.evidence
        ],
        "fix": finding.fix and {key: shown_lines(text) for key, text in vars(finding.fix).items()},
    }
