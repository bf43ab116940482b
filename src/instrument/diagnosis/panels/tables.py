"""The tables of kernels, operators, regions, modules and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...page.names import shown_name
from ...page.table import table_section
from ..diagnosis_data import DiagnosisData

_MAX_ROWS = 1000
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
    "region_table": (
        "Regions",
        "GPU time adds up the durations of the work launched inside; busy is when any of it runs.",
        {
            "name": ("Region", "text"), "calls": ("Calls", "count"), "cpu_ns": ("CPU time", "ns"),
            "gpu_ns": ("GPU time", "ns"), "gpu_busy_ns": ("GPU busy", "ns"),
            "gpu_count": ("GPU operations", "count"),
        },
    ),
    "module_table": (
        "Modules",
        "GPU time adds up the durations of the work launched inside; busy is when any of it runs.",
        {
            "name": ("Module", "text"), "calls": ("Calls", "count"), "cpu_ns": ("CPU time", "ns"),
            "gpu_ns": ("GPU time", "ns"), "gpu_busy_ns": ("GPU busy", "ns"),
            "gpu_count": ("GPU operations", "count"),
        },
    ),
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


def table_sections(diagnosis: DiagnosisData) -> Iterator[dict[str, Any]]:
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
