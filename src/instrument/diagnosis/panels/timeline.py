"""The timeline of a diagnosis: that of its trace, idle time of the GPUs by cause, and the parts of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...page.names import shown_name
from ...traces.intervals import covered_ns
from ...traces.timeline import rows_of_steps, timeline_of
from ...traces.timeline_lanes import CLASSES, Lane, TimelineSource, lanes_of
from ..diagnosis_data import DiagnosisData
from ..idle_causes import CAUSES
from ..trace_facts import TraceFacts
from .overview import idle_class

_CAUSES = {cause.replace("_", " "): f"The GPU idles while {text}." for cause, text in CAUSES.items()}


def timeline_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the timeline of the window; None if nothing in it takes time.

    Times are in ns from the start of the window; the timeline begins with the first step, which may be earlier.
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
    return section | {"steps": _with_parts(facts, section["steps"]), "gaps": _gap_rows(diagnosis)}


def _idle(facts: TraceFacts, group: str) -> Lane:
    """Return the gaps during which no GPU works, each with the cause of most of it and the work that ends it."""
    idle, work = facts.idle, len(facts.gpu)
    cause = np.argmax(np.stack([idle.by_cause[cause] for cause in CAUSES]), axis=0)
    kinds = np.array([CLASSES.index(idle_class(cause)) for cause in CAUSES])
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


def _gap_rows(diagnosis: DiagnosisData) -> list[list[Any]]:
    """Return the cause, the length and the start of the longest gaps, and what ends them."""
    return [
        [gap.cause.replace("_", " "), gap.duration_ns, gap.start_ns, shown_name(str(gap.where))]
        for gap in diagnosis.idle_gaps
    ]
