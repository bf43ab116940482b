"""The columns that an agent can ask for: those of a trace's tables, with the names behind numbers, and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from ...read.tables.steps import StepIndex
from ...read.tables.table import COLUMNS, TEXT, Array, Table
from ...read.tables.trace import MODULE, Trace

_TABLES = {"modules": "frames", "launches": "runtime"}
_HIDDEN = {"event", "correlation", "external", "sequence", "color", "address", "domain", "payload"}
_JSON = ("shapes", "types", "scalars")
_NAMED_BY = {"operator": "operators", "region": "regions", "module": "frames", "launch": "runtime"}

MEANINGS = {
    "name": "name, as the file has it",
    "start_ns": "start in ns, from the first step's start (without steps: the recording's) or, if that is later, "
    "from the end of the GPU work launched before the recording",
    "end_ns": "end in ns, on the clock of start_ns",
    "duration_ns": "duration in ns",
    "delay_ns": "time in ns from the start of the call that launched the work to the start of the work",
    "step": "number of the step that launched the work; of other events, of the step in which they start",
    "operator": "innermost operator that launched the work",
    "region": "innermost region around the launch, on its thread or else on the one that waits for it",
    "module": "innermost nn.Module that launched the work",
    "launch": "call of the runtime that launched the work",
    "parent": "name of the event around it; of autograd's outermost regions, of the region that waits for them",
    "thread": "thread of the program",
    "device": "number of the GPU",
    "stream": "stream of the GPU",
    "category": "category, as the file has it",
    "bytes": "bytes copied or set; of memory, allocated or (negative) freed",
    "blocks": "blocks of the kernel's grid",
    "block_threads": "threads of a block",
    "registers": "registers of a thread",
    "shared_bytes": "shared memory of a block in bytes",
    "blocks_per_sm": "blocks / multiprocessors",
    "occupancy_percent": "estimated achieved occupancy in %",
    "collective": "name of the collective",
    "group": "process group",
    "elements_in": "elements of the collective's input on this rank",
    "elements_out": "elements of its output",
    "dtype": "type of the elements",
    "short_name": "name of the kernel without what the compiler added",
    "family": "kind of kernel, such as a matmul",
    "shapes": "shapes of the inputs",
    "types": "types of the inputs",
    "scalars": "values of inputs that are no tensors",
    "peer": "rank at the other end",
    "allocated_bytes": "bytes that the allocator had allocated after it",
    "reserved_bytes": "bytes that the allocator had reserved after it",
    "device_type": "torch's number of the type of device: 0 CPU, 1 CUDA",
    "value": "value of the counter",
    "unit": "unit of the counter, as its name says it",
    "number": "number of the step",
}
_FUNCTIONS = {
    "count": "number of rows", "sum": "sum of the known values:", "mean": "mean of the known values:",
    "median": "median of the known values:", "min": "least", "max": "greatest",
    "p95": "95th percentile, by rank, of the known values:",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of an answer.

    Attributes:
        name: its name.
        values: its values or, of text, the numbers of the texts.
        known: a mask of the rows whose value is known.
        texts: the texts; None for numbers.
    """

    name: str
    values: Array
    known: Array
    texts: Sequence[str] | None = None

    def shown(self, rows: Array) -> list[Any]:
        """Return the values of some rows; None where they are unknown."""
        values, known = self.values[rows].tolist(), self.known[rows].tolist()
        found = values if self.texts is None else [self.texts[code] for code in values]
        if self.name in _JSON:  # some files have each number on a line of its own
            found = ["".join(text.split()) for text in found]
        return [each if there else None for each, there in zip(found, known, strict=True)]

    def about(self) -> dict[str, Any]:
        """Return the name, the unit, the definition, and the share of the rows whose value is known."""
        function, _, column = self.name.removesuffix(")").rpartition("(")
        function = function or (column if column == "count" else "")
        meaning = MEANINGS.get(column, "")
        return {
            "name": self.name,
            "unit": _unit(column, self.texts is not None),
            "definition": f"{_FUNCTIONS[function]} {meaning}".strip() if function else meaning,
            "known": float(self.known.mean()) if len(self.known) else None,
        }


def _unit(name: str, text: bool) -> str:
    if text:
        return "text"
    if name == "value":
        return "that of the column unit"
    for unit in ("ns", "bytes", "percent"):
        if name == unit or name.endswith(f"_{unit}"):
            return "%" if unit == "percent" else unit
    return "events" if name == "count" else "1"


def rows_of(trace: Trace, table: str) -> Table:
    """Return a table by the name that agents have for it."""
    rows: Table = getattr(trace, _TABLES.get(table, table))
    return rows.where(rows.matching("name", MODULE)) if table == "modules" else rows


def names_of(rows: Table) -> list[str]:
    """Return the columns that a table has for agents."""
    own = [name for name in rows if name not in _HIDDEN]
    return [*own, "end_ns", *(["delay_ns"] if "launch" in rows else []), *([] if "step" in rows else ["step"])]


def column_of(trace: Trace, rows: Table, name: str, origin: int) -> Column:
    """Return a column of some rows.

    Args:
        trace: the trace.
        rows: the rows.
        name: one of `names_of`.
        origin: what times are counted from, on the clock of the trace.

    Raises:
        ValueError: the table has no column with this name.
    """
    if name not in names_of(rows):
        similar = "".join(f"; similar: {near}" for near in get_close_matches(name, names_of(rows), 1))
        raise ValueError(f"no column {name!r:.60}{similar}; the columns are {', '.join(names_of(rows))}")
    if name in ("start_ns", "end_ns"):
        return _numbers(name, getattr(rows, name) - origin, np.ones(len(rows), bool))
    if name == "delay_ns":
        starts = np.append(trace.runtime.start_ns, 0)[rows.launch]
        return _numbers(name, rows.start_ns - starts, rows.launch >= 0)
    if name == "step":
        step = _step_of(trace, rows)
        return _numbers(name, np.append(trace.steps.number, -1)[step], step >= 0)
    if name == "thread":
        texts = [each.name or f"thread {each.thread}" for each in trace.threads]
        return Column(name, rows.thread, rows.thread >= 0, [*texts, ""])
    if name == "parent":  # a row of the table that the rows were selected from
        tables = (trace.operators, trace.regions, trace.frames)
        return _linked(name, rows.parent, next(each for each in tables if set(each) == set(rows)))
    if name in _NAMED_BY:
        return _linked(name, rows[name], getattr(trace, _NAMED_BY[name]))
    if name in TEXT:
        return Column(name, rows[name], rows[name] > 0, rows.strings)
    return _with_unknown(name, rows)


def _linked(name: str, links: Array, named: Table) -> Column:
    codes = np.append(named.name, 0)[links]
    return Column(name, codes, links >= 0, named.strings)


def _numbers(name: str, values: Array, known: Array) -> Column:
    return Column(name, values.astype(np.int64), known)


def _with_unknown(name: str, rows: Table) -> Column:
    """Return numbers; what stands for unknown is that of the table which the rows are of."""
    kinds = (columns for columns in COLUMNS.values() if name in columns and columns.keys() <= set(rows))
    values, missing = rows[name], next(columns[name][1] for columns in kinds)
    if np.isnan(missing):
        return Column(name, np.nan_to_num(values), ~np.isnan(values))
    known = values != missing if missing else np.ones(len(values), bool)
    return Column(name, values.astype(np.int64) if values.dtype.kind == "i" else values, known)


def _step_of(trace: Trace, rows: Table) -> Array:
    """Return the step of each row, a row of the steps; -1 for none."""
    if "step" in rows:
        return rows.step
    if not trace.steps:
        return np.full(len(rows), -1)
    return StepIndex(trace).rows_at(rows.start_ns, rows.thread if "thread" in rows else np.full(len(rows), -1))
