"""Exports a diagnosis as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...base.findings import Finding, Where
from ...read.memory.snapshot import MemorySnapshot
from ...read.memory.snapshot import as_dict as memory_as_dict
from ..metrics.idle import CAUSES
from ..metrics.job import Job
from ..metrics.memory_use import CATEGORIES, MemoryUse
from ..metrics.metrics import Metrics
from ..metrics.roofline import Roofline, RooflineRow
from ..replay.replayer import Replayer
from ..rules.rule import RULES
from .diagnosis_data import DiagnosisData
from .verdict import definition_of_part

VERSION = 1

DEFINITIONS = {
    "step_ns": "Mean time of a step in ns, from the start of the first to the end of the last one's GPU work.",
    "stretch": "Median step in the window / median step outside; null if the run has no manifest.",
    "stretch_range": "Lower and upper bound of stretch, given how much the steps vary; null like stretch.",
    "goodput.flops": "Floating-point operations of matmuls, attention and convolutions per step.",
    "goodput.recomputed_flops": "Those of them that the backward pass computes again, per step.",
    "goodput.mfu": "Time of flops without the recomputed ones at the peak of the GPUs / time of the step.",
    "goodput.hfu": "Time of flops at the peak of the GPUs / time of the step.",
    "goodput.coverage": "Share of the time of kernels whose operations are known.",
    "goodput.unknown": "Why mfu is null, or implausible.",
    "job.world_size": "Number of ranks of the job, as the files say, else the highest rank plus one.",
    "job.ranks": "Ranks whose trace was read; missing: those without a trace; guessed: numbered by name.",
    "memory.peak_bytes": "Bytes that torch's allocator had allocated at the peak.",
    "memory.reserved_bytes": "Bytes that it had reserved then.",
    "memory.parts.bytes": "Allocated bytes of this category at the peak.",
    "memory.parts.growth_bytes": "Growth per step, from the end of the first step to that of the last.",
    "idle_gaps.start_ns": "Start of the gap in ns, from the start of the window.",
    "idle_gaps.duration_ns": "Length of the gap in ns.",
    "idle_gaps.cause": "The cause of idle_by_cause that holds for most of the gap.",
    "regions.cpu_ns": "Time on the CPU, during the steps, of the calls inside no other region, in ns per step.",
    "regions.gpu_ns": "Sum of the durations of the GPU work that they launched, in ns per step.",
    "findings.win_ns": "The most time in ns per step that removing the cause can win.",
    "findings.replayed_ns": "The time in ns per step that a replay without the cause wins, at most win_ns.",
    "findings.win_share": "win_ns / step_ns.",
    "findings.win_bytes": "The most bytes of GPU memory that removing the cause can free at the peak.",
    "findings.start_ns": "When it shows, in ns from the start of the window; null if it has no single time.",
    "replay.self_error": "Median over the steps of |replayed - recorded| / recorded.",
    "replay.max_error": "Maximum over the steps of |replayed - recorded| / recorded.",
    "findings.coverage": "Share of the GPU time or calls for which the trace has what the rule needs.",
    "roofline.calls": "Calls of the operator with these sizes in the window that launched kernels.",
    "roofline.gpu_ns": "Sum of the durations of these kernels in ns.",
    "roofline.flops": "Floating-point operations of one call; a multiplication and an addition are two.",
    "roofline.bytes": "Bytes of each input and of the result of one call, once.",
    "roofline.flops_per_byte": "flops / bytes.",
    "roofline.ridge_flops_per_byte": "Peak operations / peak bytes per second of the GPU for this type.",
    "roofline.share_of_peak": "Operations or bytes per second, whichever side limits, / the peak of that side.",
    "roofline.implausible": "Whether the share is above 1.05, so that shapes or peak cannot be right.",
}
"""The definitions of the numbers that do not carry their own, by key."""

_OPERATORS = 50
_HEAD = (
    "path", "verdict", "bound", "coverage", "rank", "has_steps", "steps", "step_ns", "stretch", "stretch_range",
)  # fmt: skip


def to_json(diagnosis: DiagnosisData) -> str:
    """Return the diagnosis as JSON text."""
    return as_text(as_dict(diagnosis))


def as_text(value: Any) -> str:
    """Return JSON text of what `as_dict` returns."""
    return json.dumps(value, indent=2, default=plain, allow_nan=False)


def as_dict(diagnosis: DiagnosisData) -> dict[str, Any]:
    """Return the diagnosis as a dict of JSON values; while ``version`` is 1, keys are only added.

    ``path``, ``verdict``, ``bound`` (or null), ``coverage`` (what the verdict rests on, or why it abstains),
    ``rank`` (or null), ``has_steps``, ``steps`` (1 without steps: the window counts as one), ``step_ns``,
    ``stretch`` and ``stretch_range`` (or null), ``parts`` and ``idle_by_cause`` (each name with ``ns`` per step
    and ``definition``),
    ``goodput`` (see `goodput_of`), ``memory`` (null, or ``device``, ``peak_bytes``, ``reserved_bytes`` at the peak
    or null, and ``parts``: each category with its ``bytes`` at the peak, ``growth_bytes`` per step or null, and
    ``definition``), ``memory_snapshot`` (null, or what `instrument.read.memory.snapshot.as_dict` returns of the
    GPU with the highest peak), ``abstained`` and ``failed`` (rule and reason), ``ignored`` and ``replaced``
    (rules), ``thresholds`` (those that were changed, by rule), ``left_out`` (file and what it holds), ``source``
    (the file and rank, if they were chosen from several), ``steps_from`` (the regions that are the steps; empty
    for marked steps), ``merged_ranks`` (of a merged trace; else empty), ``opened_by`` (why the window was opened;
    empty if unknown),
    ``job`` (null for one trace, or ``world_size``, ``ranks`` that were read, ``missing`` ones, ``guessed``
    ones that no file names, ``damaged`` files by rank with what is wrong, ``unreadable`` files with the reason),
    ``metrics`` (each metric that is one number, with ``value``, ``unit``, ``definition`` and ``coverage``);
    ``roofline``, the operators with known operations, the longest on the GPU first, each with

    - ``operator``, ``kind`` (of `Work.kind`), ``dtype`` (that the units computed in), ``sizes`` (of `Work.sizes`);
    - ``calls`` in the window, ``gpu_ns`` (the sum of their kernels' durations);
    - ``flops`` and ``bytes`` of one call (or null), ``flops_per_byte``, ``ridge_flops_per_byte`` (from which
      compute limits it), ``bound`` ("compute", "memory" or null);
    - ``share_of_peak`` (operations or bytes per second / the peak of that side, or null), ``implausible`` (whether
      that is more than the GPU can do);

    ``idle_gaps``, the longest, each with ``start_ns``, ``duration_ns``, ``cause`` and ``where``; ``regions``, the
    outermost, each with ``name``, ``cpu_ns`` and ``gpu_ns``; ``replay`` (null, or ``self_error`` and ``max_error``
    of the replay without a change as shares of a step, and ``abstained``: null, or why nothing is replayed);
    ``definitions`` (by key, of the numbers that do not carry their own); and ``findings``, those with the most
    time to win first, each with

    - ``rule``, ``severity``, ``confidence`` ("high", "medium", "low"), ``title``, ``meaning`` (of the rule);
    - ``where``: ``region`` (names, outermost first), ``module``, ``operator``, ``kernel``, ``step``, ``rank``,
      ``site`` (null, or ``file``, ``line``, ``function``); ``start_ns`` (in the window, or null);
    - ``win_ns`` (the most time per step that removing it can win, or null), ``replayed_ns`` (what a replay without
      it wins, or null), ``win_share`` (win_ns / step), ``win_bytes`` (the most memory that it can free, or null);
    - ``evidence``: ``name``, ``value``, ``unit``, ``definition`` of each number;
    - ``coverage`` (a share, or null), ``fix`` (null, or ``text``, ``before``, ``after``).
    """
    return {
        "version": VERSION,
        **{name: getattr(diagnosis, name) for name in _HEAD},
        "parts": {
            name: {"ns": ns, "definition": definition_of_part(name, diagnosis.has_gpu)}
            for name, ns in diagnosis.parts.items()
        },
        "idle_by_cause": {
            name: {"ns": ns, "definition": CAUSES[name]} for name, ns in diagnosis.idle_by_cause.items()
        },
        "goodput": diagnosis.goodput,
        "findings": [_finding(found, diagnosis.step_ns) for found in diagnosis.findings],
        "idle_gaps": [gap._asdict() | {"where": _where(gap.where)} for gap in diagnosis.idle_gaps],
        "regions": [each._asdict() for each in diagnosis.regions],
        "abstained": diagnosis.abstained,
        "memory": diagnosis.memory and _memory(diagnosis.memory),
        "memory_snapshot": diagnosis.snapshot and _snapshot(diagnosis.snapshot),
        **{name: getattr(diagnosis, name) for name in ("failed", "ignored", "replaced")},
        "thresholds": diagnosis.tuned,
        **{name: getattr(diagnosis, name) for name in ("left_out", "source")},
        "job": diagnosis.job and _job(diagnosis.job),
        **{name: getattr(diagnosis, name) for name in ("steps_from", "merged_ranks", "opened_by")},
        "roofline": [_operator(row, diagnosis.roofline) for row in diagnosis.roofline.rows[:_OPERATORS]],
        "metrics": dict(_metrics(diagnosis.metrics)),
        "replay": diagnosis.replayer and _replay(diagnosis.replayer),
        "definitions": DEFINITIONS,
    }


def _job(job: Job) -> dict[str, Any]:
    return {
        "world_size": job.world_size,
        "ranks": list(job.ranks),
        "missing": job.missing,
        "guessed": job.guessed,
        "damaged": {rank: list(lost.reasons) for rank, lost in job.damaged.items()},
        "unreadable": {str(path): reason for path, reason in job.failed.items()},
    }


def _replay(replayer: Replayer) -> dict[str, Any]:
    errors = replayer.errors if replayer.has_cpu else None
    return {
        "self_error": None if errors is None else float(np.median(errors)),
        "max_error": None if errors is None else float(errors.max()),
        "abstained": replayer.abstained,
    }


def _memory(use: MemoryUse) -> dict[str, Any]:
    growth = use.growth_bytes
    return {
        **{name: getattr(use, name) for name in ("device", "peak_bytes", "reserved_bytes")},
        "parts": {
            name: {"bytes": size, "growth_bytes": growth and growth[name], "definition": CATEGORIES[name]}
            for name, size in use.by_category.items()
        },
    }


def _snapshot(snapshot: MemorySnapshot) -> dict[str, Any] | None:
    device = snapshot.fullest_device
    return None if device is None else memory_as_dict(snapshot, device)


def _finding(found: Finding, step_ns: float) -> dict[str, Any]:
    rule = RULES.get(found.rule)
    return {
        **{name: getattr(found, name) for name in ("rule", "severity", "confidence", "title")},
        "meaning": (rule.function.__doc__ or "").partition("\n")[0] if rule else "",
        "where": _where(found.where),
        **{name: getattr(found, name) for name in ("start_ns", "win_ns", "replayed_ns", "win_bytes")},
        "win_share": None if found.win_ns is None or not step_ns else found.win_ns / step_ns,
        "evidence": [each._asdict() for each in found.evidence],
        "coverage": found.coverage,
        "fix": found.fix and vars(found.fix),
    }


def _where(where: Where) -> dict[str, Any]:
    return where._asdict() | {"site": where.site and vars(where.site)}


def _operator(row: RooflineRow, line: Roofline) -> dict[str, Any]:
    """Return one operator: work of one call, GPU time of all calls, and what the GPU allows (null if unknown)."""
    ridge = line.peak.ridge(row.kind) if line.peak else None
    return {
        "operator": row.name,
        "kind": row.work.kind,
        "dtype": row.kind,
        "sizes": row.work.sizes,
        "calls": row.calls,
        "gpu_ns": row.gpu_ns,
        "flops": row.work.flops,
        "bytes": row.work.bytes,
        "flops_per_byte": row.work.flops / row.work.bytes if row.work.bytes else None,
        "ridge_flops_per_byte": ridge,
        "bound": row.bound,
        "share_of_peak": row.share,
        "implausible": row.implausible,
    }


def _metrics(metrics: Metrics) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in metrics.items():
        if value is None or isinstance(value, (int, float)):
            about = metrics.about(key)
            known = {name: getattr(about, name) for name in ("unit", "definition", "coverage")}
            yield key, {"value": value if value is None or math.isfinite(value) else None} | known


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)
