"""The roofline: each operator with known operations as a dot below what the GPU can do."""

from __future__ import annotations

from typing import Any

from ...page.names import shown_name
from ..diagnosis_data import DiagnosisData
from ..roofline import HEAVY, RooflineRow

_MOST = 1000  # operators
_ORDINARY = "fp32"  # the units that compute what is neither a matmul nor alike, whatever its type


def roofline_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
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
        "note": shown_name(" ".join(_notes(diagnosis, len(rows), used))),
        "each": diagnosis.each_step,
        "memory_bytes_per_s": None if peak is None else peak.memory_bytes_per_s,
        "roofs": {} if peak is None else {kind: rate for kind, rate in peak.flops_per_s.items() if kind in used},
        "operators": [_operator(row, diagnosis) for row in rows],
    }


def _notes(diagnosis: DiagnosisData, shown: int, used: set[str]) -> list[str]:
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


def _operator(row: RooflineRow, diagnosis: DiagnosisData) -> dict[str, Any]:
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
