"""Describes a trace to an agent: its diagnosis, the plan, predictions, comparisons, and waits for the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ...base.errors import TraceError
from ...base.findings import Finding
from ...base.units import counted, duration
from ...explain.comparison.comparison import Comparison
from ...explain.comparison.comparison import as_dict as comparison_as_dict
from ...explain.diagnosis.chosen_trace import FORMAT, reject_snapshot
from ...explain.diagnosis.diagnosis import DEFINITIONS, Diagnosis
from ...explain.diagnosis.diagnosis import as_dict as diagnosis_as_dict
from ...explain.replay.what_if import WhatIf
from ...explain.replay.what_if import as_dict as what_if_as_dict
from ...explain.waits.audit import audit_syncs
from ...explain.waits.report import as_dict as syncs_as_dict
from ...read.tables.trace import Trace
from .answers import quoted
from .expressions import SEARCHED, compiled
from .recordings import OF_RUNS

Answer = dict[str, Any]
Show = Literal["findings", "time", "metrics", "regions", "idle_gaps", "operators", "job", "memory", "abstained"]

_STEPS = "Recorded steps of {}; 1 without steps, as the window then counts as one."
_LENGTH = "in ns, each from the end of the one before to its own end, GPU work included."
OF_DIAGNOSIS = {
    **DEFINITIONS,
    **{name.replace("roofline.", "operators."): text for name, text in DEFINITIONS.items()},
    "steps": _STEPS.format("the process that has most"),
    "waits.ns": "Time per step in ns that is on the critical path; the classes add up to the step (rounded).",
    "waits.win_ns": "How much shorter a step would be in ns without that class, in a replay.",
    "gpu.ns": "Time per step in ns, of several GPUs as if they were one; adds up to the step (rounded).",
    "cpu_work.ns": "Part of the class overhead of the critical path, per step in ns.",
    "idle_by_cause.ns": "Time per step in ns in which no GPU works.",
    "phases.blocks": OF_RUNS["folders.phases.blocks"],
    "phases.median_ns": OF_RUNS["folders.phases.median_ns"],
    "hidden.hidden_ns": DEFINITIONS["findings.hidden_ns"],
}
OF_PLAN = {
    **{name.removeprefix("plan."): text for name, text in DEFINITIONS.items() if name.startswith("plan.")},
    "self_error": DEFINITIONS["replay.self_error"],
    "whatif": "All changes as arguments of whatif: '--launch 0.1x --fix a' is launch='0.1x', fix=['a'].",
}
OF_WHAT_IF = {
    "before_ns": f"Mean length of the recorded steps {_LENGTH}",
    "step_ns": "Predicted length in ns, the mean over the steps.",
    "win_ns": "before_ns - step_ns.",
    "self_error": DEFINITIONS["replay.self_error"],
    "max_error": DEFINITIONS["replay.max_error"],
    "steps": _STEPS.format("all processes"),
    "critical_path.total_ns": "Length in ns of the critical path of all steps, in the replay with the change.",
    "critical_path.classes.ns": "Part of total_ns; the classes add up to it.",
    "critical_path.parts.ns": "Part of total_ns in this region and class.",
    "critical_path.off_path.ns": "Sum of the recorded durations of that name in the steps, never on the path.",
    "critical_path.off_path.slack_ns": "How much later any of it could end without a later end of the last step.",
}
OF_COMPARISON = {
    "before_ns": f"Lower median of the lengths of the steps before the change {_LENGTH}",
    "after_ns": "The same after the change.",
    "delta_ns": "after_ns - before_ns.",
    "relative": "delta_ns / before_ns.",
    "p_value": "Probability of such a difference if the true change is at most 0.5 %; null: too few or "
    "too dependent steps.",
    "detectable": "Smallest relative change that these samples show in 80 % of cases.",
    "steps": "Numbers of steps before and after; 1 without steps.",
    "kinds.ns": "Part of delta_ns; the kinds add up to it.",
    "parts.ns": "Part of delta_ns: after_ns - before_ns of the part; all parts add up to delta_ns.",
    "parts.before_ns": "Its time in the median step before, in ns; each moment counts for one part.",
    "parts.after_ns": "The same after.",
    "parts.before_calls": "Kernels and copies, or pieces of other time, that it has in that step before.",
    "parts.after_calls": "The same after.",
}
OF_SYNCS = {
    "steps": "Steps that were checked; 0: the whole recording counts as one step.",
    "syncs_per_step": "Most synchronizations that are not allowed in any one step.",
    "median_syncs": "Lower median over the steps of their number.",
    "dropped": "Synchronizations at places that are not listed.",
    "findings.count": "Synchronizations of this operation at this place in the whole recording, one per operator.",
    "findings.per_step": "Mean number in a step; those outside steps do not count. Without steps, all.",
    "findings.outside": "Number outside the steps. Without steps, all.",
    "findings.bytes": "Bytes of the copies, all together.",
    "findings.blocked_ns": "Time in ns that the CPU was blocked in all timed calls.",
    "findings.timed": "Number of timed calls.",
    "findings.idle_ns": "Gaps in the GPU's work in which these calls end, in ns, at most as long as they blocked.",
    "findings.step": "Number of the first step with such a call.",
}


def context_of(diagnosis: Diagnosis, window: str | None = None) -> Answer:
    """Return what every number of an answer about a trace shares: its source, window and coverage.

    Args:
        diagnosis: the diagnosis of the trace.
        window: the window of the numbers in words; None for the recorded steps.
    """
    trace = trace_of(diagnosis)
    devices = sorted({device.name for device in trace.devices if device.name})
    marks = "marked by the profiler" if not diagnosis.steps_from else f"calls of regions '{diagnosis.steps_from}'"
    steps = f"{counted(diagnosis.steps, 'step')}, {marks}"
    length = None if trace.format == FORMAT or diagnosis.facts is None else diagnosis.facts.window_ns
    return {
        "source": {
            "file": diagnosis.path,
            "format": trace.format,
            "rank": trace.rank,
            "world_size": trace.world_size,
            "devices": devices,
            "chosen": diagnosis.source,
            "left_out_files": len(diagnosis.left_out),
        },
        "window": {
            "of": window or (steps if diagnosis.has_steps else "the whole recording, which has no steps"),
            "steps": diagnosis.steps if diagnosis.has_steps else 0,
            "length_ns": length,
            "recording_stretched_steps": diagnosis.stretch,
        },
        "coverage": {
            "verdict": diagnosis.coverage_text,
            "gpu_time_linked": {
                name: part.linked_ns / part.of_ns for name, part in trace.coverage.items() if part.of_ns
            },
            "lost": {"events": trace.lost.events, "reasons": list(trace.lost.reasons)},
        },
    }


def trace_of(diagnosis: Diagnosis) -> Trace:
    """Return the trace of a diagnosis."""
    assert diagnosis.facts is not None  # `diagnose` made it
    return diagnosis.facts.trace


def diagnosis_answer(diagnosis: Diagnosis, show: Collection[Show], only: str | None) -> Answer:
    """Return what is slow in a trace.

    Args:
        diagnosis: the diagnosis.
        show: the parts of it to return.
        only: a regular expression: only rows in whose name it is found.

    Raises:
        ValueError: it is not a regular expression.
    """
    pattern = compiled("only", only)
    whole = diagnosis_as_dict(diagnosis)
    data: Answer = {name: whole[name] for name in ("bound", "step_ns", "steps")}
    for name in dict.fromkeys(show):
        for key, value in _PARTS[name](diagnosis, whole).items():
            data[key] = _matching(value, pattern) if isinstance(value, list) else value
    names = [*(region.name for region in diagnosis.regions), *trace_of(diagnosis).unread_devices]
    return {"summary": quoted(diagnosis.verdict, names), **context_of(diagnosis), "data": data}


def _matching(rows: list[Any], pattern: re.Pattern[str] | None) -> list[Any]:
    return rows if pattern is None else [row for row in rows if pattern.search(_name(row)[:SEARCHED])]


def _name(row: Any) -> str:
    return (
        row if isinstance(row, str) else next((row[key] for key in ("name", "rule", "operator") if key in row), "")
    )


def _findings(diagnosis: Diagnosis, whole: Mapping[str, Any]) -> Answer:
    hidden = [{name: each[name] for name in ("rule", "hidden_ns", "change")} for each in whole["hidden"]]
    rows = zip(diagnosis.findings, whole["findings"], strict=True)
    return {
        "findings": [row | {"title": _title(found), "meaning": None} for found, row in rows],
        "hidden": hidden,
    }


def _title(found: Finding) -> str:
    where = found.where
    site = [where.site.file, where.site.function] if where.site else []
    return quoted(found.title, [*where.region, where.module, where.operator, where.kernel, *site])


def _named(parts: Mapping[str, Mapping[str, Any]] | None) -> list[Answer]:
    """Return the rows of a mapping by name, the largest first; without those that are 0."""
    rows = [{"name": name, **about} for name, about in (parts or {}).items() if about["ns"]]
    return sorted(rows, key=lambda row: -abs(row["ns"]))


def _time(diagnosis: Diagnosis, whole: Mapping[str, Any]) -> Answer:
    return {
        "waits": _named(whole["waits"]),
        "gpu": _named(whole["parts"]),
        "cpu_work": _named(whole["cpu_work"]),
        "idle_by_cause": _named(whole["idle_by_cause"]),
        "goodput": whole["goodput"],
    }


def _metrics(diagnosis: Diagnosis, whole: Mapping[str, Any]) -> Answer:
    known = diagnosis.metrics
    return {
        "metrics": [
            {"name": name, **about, "window": known.about(name).window}
            for name, about in whole["metrics"].items()
            if about["value"] is not None
        ],
        "unknown_metrics": [name for name, about in whole["metrics"].items() if about["value"] is None],
    }


_PARTS: dict[Show, Callable[[Diagnosis, Mapping[str, Any]], Answer]] = {
    "findings": _findings,
    "time": _time,
    "metrics": _metrics,
    "regions": lambda diagnosis, whole: {"regions": whole["regions"], "phases": whole["phases"]},
    "idle_gaps": lambda diagnosis, whole: {"idle_gaps": whole["idle_gaps"]},
    "operators": lambda diagnosis, whole: {"operators": whole["roofline"]},
    "job": lambda diagnosis, whole: {"job": whole["job"]},
    "memory": lambda diagnosis, whole: {"memory": whole["memory"]},
    "abstained": lambda diagnosis, whole: {
        "abstained": [{"rule": rule, "lacks": lacks} for rule, lacks in whole["abstained"].items()]
    },
}


def plan_answer(diagnosis: Diagnosis) -> Answer:
    """Return what to change first."""
    reject_snapshot(trace_of(diagnosis))
    plan = diagnosis.plan()
    if plan.end is None:
        return {"summary": "No plan.", **context_of(diagnosis), "data": {"rows": [], "abstained": plan.abstained}}
    lengths = f"{duration(plan.recorded_ns)} -> {duration(plan.end.step_ns)}"
    said = f"{counted(len(plan.rows), 'change')}: {lengths} a step."
    return {"summary": said, **context_of(diagnosis), "data": plan.as_dict()}


def what_if_answer(diagnosis: Diagnosis, guess: WhatIf) -> Answer:
    """Return a prediction."""
    data = what_if_as_dict(guess)
    if path := data["critical_path"]:
        path["classes"] = _named(path["classes"])
    if guess.step_ns is None:
        said = "No prediction: see abstained."
    else:
        said = f"A step would take {duration(guess.step_ns)} instead of {duration(guess.before_ns)}."
    return {"summary": said, **context_of(diagnosis), "data": data}


def comparison_answer(change: Comparison) -> Answer:
    """Return what changed between two recordings."""
    data = comparison_as_dict(change) | {"steps": list(change.steps)}
    data["kinds"] = _named(data["kinds"])
    data["parts"] = [part for part in data["parts"] if part["ns"]]
    for name, findings in change.findings().items():
        data[name] = [{"rule": each.rule, "title": _title(each), "where": str(each.where)} for each in findings]
    said = f"{change.verdict}: {duration(change.before_ns)} before, {duration(change.after_ns)} after"
    before, after = context_of(change.before), context_of(change.after)
    return {
        "summary": f"{said}, medians of {change.steps[0]:,} and {change.steps[1]:,} steps.",
        **{name: {"before": before[name], "after": after[name]} for name in before},
        "data": data,
    }


_OF_SYNC = (
    "severity", "op", "cause", "region", "count", "pattern", "per_step", "outside", "step", "direction", "bytes",
    "blocked_ns", "timed", "untimed", "idle_ns", "allowed", "backward", "thread",
)  # fmt: skip


def syncs_answer(diagnosis: Diagnosis) -> Answer:
    """Return the places at which the CPU waits for the GPU."""
    trace = trace_of(diagnosis)
    reject_snapshot(trace)
    report = audit_syncs(trace)
    if report.unavailable_reason and not report.syncs:
        raise TraceError(trace.path, report.unavailable_reason)
    whole = syncs_as_dict(report)
    names = ("steps", "syncs_per_step", "median_syncs", "dropped", "exceeded")
    findings = [
        {name: row[name] for name in _OF_SYNC}
        | {name: site and _site(site) for name, site in (("site", row["site"]), ("via", row["via"]))}
        | {"fix": row["fix"]}
        for row in whole["findings"]
    ]
    answer = context_of(diagnosis, "the whole recording; numbers per step: the recorded steps")
    answer["coverage"]["synchronizations"] = whole["coverage"]
    total = sum(row["count"] for row in findings)
    return {
        "summary": f"{total:,} synchronizations at {counted(len(findings), 'place')}.",
        **answer,
        "data": {name: whole[name] for name in names} | {"findings": findings},
    }


def _site(site: Mapping[str, Any]) -> Answer:
    """Return a line without its code: a trace may name any file."""
    return {name: site[name] for name in ("file", "line", "function")}
