"""The roofline: each operator with known operations as a dot below what the GPU can do."""

from __future__ import annotations

from typing import Any

from ...page.names import shown_name
from ..diagnosis_data import DiagnosisData
from ..roofline import RooflineRow

_MAX_DOTS = 300


def roofline_section(diagnosis: DiagnosisData) -> dict[str, Any] | None:
    """Return the operators, the longest on the GPU first, and the roofs of the types that they compute in."""
    line = diagnosis.roofline
    rows = [row for row in line.rows if row.work.bytes and row.work.flops and row.gpu_ns]
    if not rows:
        return None
    dots = [_dot(row) for row in rows[:_MAX_DOTS]]
    peak, used = line.peak, {dot["dtype"] for dot in dots}
    covered = (
        "" if line.coverage is None else f"They cover {100 * line.coverage:.0f} % of the time of all kernels."
    )
    left_out = f" The longest {_MAX_DOTS} of {len(rows):,} are shown." if len(rows) > _MAX_DOTS else ""
    unknown = " The peaks of this GPU are not known, so there is no roof." if peak is None else ""
    return {
        "id": "roofline",
        "type": "roofline",
        "title": "Roofline",
        "note": f"Operators with known operations. {covered}{left_out}{unknown}",
        "gpu": "" if peak is None else f"{peak.name} ({peak.source})",
        "memory_bytes_per_s": None if peak is None else peak.memory_bytes_per_s,
        "roofs": {} if peak is None else {kind: rate for kind, rate in peak.flops_per_s.items() if kind in used},
        "dots": dots,
    }


def _dot(row: RooflineRow) -> dict[str, Any]:
    seconds = row.gpu_ns / 1e9 / row.calls
    return {
        "name": shown_name(row.name),
        "sizes": " x ".join(map(str, row.work.sizes)),
        "kind": row.work.kind,
        "dtype": row.kind,
        "calls": row.calls,
        "gpu_ns": row.gpu_ns,
        "flops": row.work.flops,
        "bytes": row.work.bytes,
        "flops_per_s": row.work.flops / seconds,
        "share": row.share,
        "bound": row.bound,
        "implausible": row.implausible,
    }
