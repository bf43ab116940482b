"""Builders of small traces with synchronizations, and the report of an audit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from instrument.base.findings import SyncFinding
from instrument.explain.waits.audit import audit_syncs
from instrument.explain.waits.report import SyncReport
from tests.diagnosis.small_traces import Row, memcpy, on_cpu, trace_of

HTOD, DTOH = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


PINNED = "Memcpy DtoH (Device -> Pinned)"


def audit(**tables: list[Row]) -> SyncReport:
    """Return the report of a trace with other work of the program before and after."""
    around = [on_cpu("aten::mm", -20, -10), on_cpu("aten::mm", 1_000_000, 1_000_010)]
    return audit_syncs(trace_of(**{**tables, "operators": [*tables.get("operators", []), *around]}))


def only_finding(report: SyncReport) -> SyncFinding:
    (found,) = report.findings
    return found


def launch(start: int, end: int, correlation: int, **columns: Any) -> Row:
    return on_cpu("cudaLaunchKernel", start, end, correlation=correlation, **columns)


def item(at: int, correlation: int = 1, **columns: Any) -> dict[str, list[Row]]:
    """Return the events of one `.item()`: 100 ns in `cudaStreamSynchronize`."""
    return {
        "operators": [
            on_cpu("aten::item", at, at + 200, **columns),
            on_cpu("aten::_local_scalar_dense", at + 1, at + 199, **columns),
        ],
        "runtime": [
            on_cpu("cudaMemcpyAsync", at + 10, at + 20, correlation=correlation, **columns),
            on_cpu("cudaStreamSynchronize", at + 30, at + 130, correlation=correlation + 1, **columns),
        ],
        "gpu": [memcpy(PINNED, at + 110, at + 120, bytes=4, correlation=correlation)],
    }


def merged(*parts: dict[str, list[Row]]) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = defaultdict(list)
    for part in parts:
        for name, rows in part.items():
            tables[name] += rows
    return tables
