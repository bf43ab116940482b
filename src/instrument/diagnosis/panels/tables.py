"""The tables of kernels, operators, regions, modules and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...page.names import shown_name
from ..diagnosis_data import DiagnosisData

_MAX_ROWS = 1000
_TABLES = {
    "kernel_table": (
        "Kernels",
        {
            "short_name": ("Kernel", "text"), "family": ("Family", "text"), "count": ("Calls", "count"),
            "sum_ns": ("Time", "ns"), "share": ("Share", "percent"), "mean_ns": ("Mean", "ns"),
            "min_ns": ("Shortest", "ns"), "max_ns": ("Longest", "ns"), "name": ("Full name", "text"),
        },
    ),
    "operator_table": (
        "Operators",
        {
            "name": ("Operator", "text"), "calls": ("Calls", "count"),
            "gpu_self_ns": ("Self GPU time", "ns"), "gpu_ns": ("GPU time", "ns"),
            "gpu_busy_ns": ("GPU busy", "ns"), "cpu_self_ns": ("Self CPU time", "ns"),
        },
    ),
    "region_table": (
        "Regions",
        {
            "name": ("Region", "text"), "calls": ("Calls", "count"), "cpu_ns": ("CPU time", "ns"),
            "gpu_ns": ("GPU time", "ns"), "gpu_busy_ns": ("GPU busy", "ns"),
            "gpu_count": ("GPU operations", "count"),
        },
    ),
    "module_table": (
        "Modules",
        {
            "name": ("Module", "text"), "calls": ("Calls", "count"), "cpu_ns": ("CPU time", "ns"),
            "gpu_ns": ("GPU time", "ns"), "gpu_busy_ns": ("GPU busy", "ns"),
            "gpu_count": ("GPU operations", "count"),
        },
    ),
    "collective_table": (
        "Collectives",
        {
            "name": ("Collective", "text"), "group": ("Process group", "text"), "dtype": ("Type", "text"),
            "count": ("Calls", "count"), "sum_ns": ("Time", "ns"), "exposed_ns": ("Exposed", "ns"),
            "bytes": ("Bytes", "bytes"), "bus_bytes_per_s": ("Bus bandwidth (bytes/s)", "bytes"),
        },
    ),
}  # fmt: skip
"""By metric: the title, and the columns with their title and kind."""


def table_sections(diagnosis: DiagnosisData) -> Iterator[dict[str, Any]]:
    """Yield a section for each table of the metrics that has rows; the sums are those of the recorded window."""
    for metric, (title, columns) in _TABLES.items():
        rows = diagnosis.metrics.get(metric) or []
        if not rows:
            continue
        about = diagnosis.metrics.about(metric)
        left_out = f" The longest {_MAX_ROWS:,} of {len(rows):,}." if len(rows) > _MAX_ROWS else ""
        covered = "" if about.coverage is None else f" Coverage: {100 * about.coverage:.0f} % of the GPU time."
        yield {
            "id": title.lower(),
            "type": "table",
            "title": title,
            "note": f"{about.definition} Window: {about.window}.{covered}{left_out}",
            "caption": f"{title} of the window",
            "columns": [{"title": head, "kind": kind} for head, kind in columns.values()],
            "rows": [
                [_value(row.get(key), kind) for key, (_, kind) in columns.items()] for row in rows[:_MAX_ROWS]
            ],
        }


def _value(value: Any, kind: str) -> Any:
    return shown_name(str(value or "")) if kind == "text" else value
