"""Builds small traces by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from instrument.read.tables.links import assemble
from instrument.read.tables.table import COLUMNS, TEXT, Strings
from instrument.read.tables.trace import Device, ReadLosses, Thread, Trace

Row = dict[str, Any]


def row(name: str, start: int, end: int, **columns: Any) -> Row:
    return {"name": name, "start_ns": start, "duration_ns": end - start, **columns}


def kernel(name: str, start: int, end: int, **columns: Any) -> Row:
    return row(name, start, end, category="kernel", **{"device": 0, "stream": 7, **columns})


def memcpy(name: str, start: int, end: int, **columns: Any) -> Row:
    return kernel(name, start, end) | {"category": "memcpy"} | columns


def memset(start: int, end: int, **columns: Any) -> Row:
    return kernel("Memset (Device)", start, end) | {"category": "memset"} | columns


def on_cpu(name: str, start: int, end: int, **columns: Any) -> Row:
    return row(name, start, end, **{"thread": 0, **columns})


def trace_of(devices: list[Device] | None = None, **tables: list[Row]) -> Trace:
    """Return a trace with these rows; steps are regions named ProfilerStep#N."""
    strings, columns = Strings(), {}
    for kind, rows in tables.items():
        names = {name for each in rows for name in each}
        numbered = [{"event": place, **each} for place, each in enumerate(rows)]
        columns[kind] = {
            name: np.array([_number(strings, name, each.get(name, COLUMNS[kind][name][1])) for each in numbered])
            for name in names | {"event"}
        }
    columns = {kind: part for kind, part in columns.items() if len(part["event"])}
    return assemble(
        Path("made"),
        "kineto",
        columns,
        strings,
        [Thread(1, 1), Thread(1, 2)],
        devices=devices or [],
        metadata={},
        lost=ReadLosses(),
    )


def _number(strings: Strings, name: str, value: Any) -> Any:
    return strings[value] if name in TEXT and isinstance(value, str) else value
