"""Answers a question about the rows of a trace: filter, group, aggregate, sort and limit; nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...explain.diagnosis.chosen_trace import reject_snapshot
from ...explain.diagnosis.diagnosis import Diagnosis
from ...read.tables.lanes import distinct
from ...read.tables.table import Array, Table
from ...read.tables.trace import Trace
from .answers import shown
from .columns import Column, column_of, names_of, rows_of
from .expressions import SEARCHED, compiled
from .reports import Answer, context_of, trace_of

TableName = Literal[
    "kernels", "memcpys", "memsets", "operators", "regions", "modules", "launches", "syncs", "memory", "counters",
    "steps", "others",
]  # fmt: skip
Operation = Literal["==", "!=", "<", "<=", ">", ">=", "matches"]
Function = Literal["count", "sum", "mean", "median", "min", "max", "p95"]
_COMPARE: dict[str, Callable[[Array, Any], Array]] = {
    "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip
MOST_ROWS = 500


@dataclass(frozen=True)
class Filter:
    """A condition for rows.

    Attributes:
        column: the column.
        operation: how it is compared; "matches" searches a regular expression in text.
        value: what it is compared with.
    """

    column: str
    operation: Operation
    value: str | int | float


@dataclass(frozen=True)
class Aggregate:
    """A number of each group of rows.

    Attributes:
        function: what is computed; "p95" is the value that 95 % of the rows do not exceed.
        column: of which column; "" for "count".
    """

    function: Function
    column: str = ""

    def __str__(self) -> str:
        return f"{self.function}({self.column})" if self.column else self.function


@dataclass(frozen=True)
class Query:
    """A question about one table.

    Attributes:
        table: the table.
        columns: the columns of the rows to return; without any, name, start and duration.
        where: conditions that all hold.
        group_by: the columns whose values make the groups.
        aggregates: the numbers of each group, or of all rows.
        sort_by: a column of the answer, such as "sum(duration_ns)"; "" for the first aggregate, else the start.
        descending: whether the largest come first.
        limit: how many rows to return.
    """

    table: TableName
    columns: Sequence[str] = ()
    where: Sequence[Filter] = ()
    group_by: Sequence[str] = ()
    aggregates: Sequence[Aggregate] = ()
    sort_by: str = ""
    descending: bool = True
    limit: int = 20


def query_answer(diagnosis: Diagnosis, query: Query) -> Answer:
    """Return the rows or the groups that a query asks for.

    Raises:
        ValueError: a column does not exist, or does not fit what is asked of it.
        TraceError: the file is a memory snapshot.
    """
    trace = trace_of(diagnosis)
    reject_snapshot(trace)
    assert diagnosis.facts is not None
    rows = rows_of(trace, query.table)
    origin = diagnosis.facts.window[0]
    total = len(rows)
    for condition in query.where:
        rows = rows.where(_holds(column_of(trace, rows, condition.column, origin), condition))
    if query.group_by or query.aggregates:
        made = _groups(trace, rows, query, origin)
    else:
        made = _rows(trace, rows, query, origin)
    order = _order(made, query)
    answered = order[: query.limit]
    values = [column.shown(answered) for column in made]
    return {
        "summary": f"{len(rows):,} of {total:,} rows match; {len(answered):,} of {len(order):,} rows follow.",
        **context_of(diagnosis, "the whole recording; the definition of start_ns says where its clock begins"),
        "data": {
            "table": query.table,
            "matched_rows": len(rows),
            "all_rows": total,
            "rows_of_answer": len(order),
            "columns": [column.about() for column in made],
            "rows": [list(row) for row in zip(*values, strict=True)],
            "other_columns": [name for name in names_of(rows) if name not in {column.name for column in made}],
        },
    }


OF_QUERY = {
    "matched_rows": "Rows for which all filters hold.",
    "all_rows": "Rows of the table.",
    "rows_of_answer": "Rows or groups before the limit.",
    "columns.known": "Share of the rows, or of the groups, in which the value is known.",
}


def _holds(column: Column, condition: Filter) -> Array:
    """Return a mask of the rows for which a condition holds; an unknown value fulfils none."""
    operation, value = condition.operation, condition.value
    if column.texts is None:
        if operation == "matches" or isinstance(value, str):
            raise ValueError(f'"where": {column.name} holds numbers: compare it with a number, not by {operation}')
        return column.known & _COMPARE[operation](column.values, value)
    if operation not in ("==", "!=", "matches"):
        raise ValueError(f'"where": {column.name} holds text: it is compared by ==, != or matches')
    pattern = compiled("where", str(value)) if operation == "matches" else None
    codes, places = np.unique(column.values, return_inverse=True)
    hits = [_text_holds(column.texts[code], operation, str(value), pattern) for code in codes.tolist()]
    return np.array(hits, bool)[places]


def _text_holds(text: str, operation: str, value: str, pattern: re.Pattern[str] | None) -> bool:
    if pattern is not None:
        return pattern.search(text[:SEARCHED]) is not None
    return (value in (text, shown(text))) == (operation == "==")


def _rows(trace: Trace, rows: Table, query: Query, origin: int) -> list[Column]:
    if query.columns:
        names = list(dict.fromkeys(query.columns))
    else:
        names = [name for name in ("name", "start_ns", "duration_ns", "value") if name in names_of(rows)]
    return [column_of(trace, rows, name, origin) for name in names]


def _groups(trace: Trace, rows: Table, query: Query, origin: int) -> list[Column]:
    """Return the columns of the groups and their numbers; without ``group_by``, all rows are one group."""
    keys = [column_of(trace, rows, name, origin) for name in dict.fromkeys(query.group_by)]
    aggregates = query.aggregates or (Aggregate("count"),)
    alike = [key.values for key in keys] or [np.zeros(len(rows), int)]
    first, place = distinct(*alike)
    made = [Column(key.name, key.values[first], key.known[first], key.texts) for key in keys]
    for aggregate in dict.fromkeys(aggregates):
        if aggregate.function == "count":
            if aggregate.column:
                raise ValueError(f'"aggregates": count has no column, it counts rows: {aggregate.column!r:.100}')
            counts = np.bincount(place, minlength=len(first))
            made.append(Column(str(aggregate), counts, np.ones(len(counts), bool)))
            continue
        column = column_of(trace, rows, aggregate.column, origin)
        if column.texts is not None:
            raise ValueError(
                f'"aggregates": {aggregate.column!r} holds text, of which there is no {aggregate.function}'
            )
        made.append(_aggregated(aggregate, column, place, len(first)))
    return made


def _aggregated(aggregate: Aggregate, column: Column, place: Array, groups: int) -> Column:
    """Return a number of each group; it is unknown if that of each row is."""
    place, values = place[column.known], column.values[column.known]
    order = np.lexsort((values, place))
    place, values = place[order], values[order]
    counts = np.bincount(place, minlength=groups)
    known = counts > 0
    starts, sizes = (np.cumsum(counts) - counts)[known], counts[known]
    ends = starts + sizes - 1
    if not len(values):
        found: Array = np.zeros(0)
    elif aggregate.function in ("sum", "mean"):
        sums = np.add.reduceat(values, starts)
        found = sums if aggregate.function == "sum" else sums / sizes
    elif aggregate.function == "median":
        found = (values[starts + (sizes - 1) // 2] + values[starts + sizes // 2]) / 2
    else:
        at = {"min": starts, "max": ends, "p95": starts + np.ceil(0.95 * sizes).astype(int) - 1}
        found = values[at[aggregate.function]]
    result = np.zeros(groups, found.dtype)
    result[known] = found
    return Column(str(aggregate), result, known)


def _order(made: list[Column], query: Query) -> Array:
    """Return the rows of the answer in order; unknown values come last."""
    names = {column.name: column for column in made}
    default = next((str(each) for each in query.aggregates), "count" if query.group_by else "")
    wanted = query.sort_by or default
    if not wanted:
        return np.arange(len(made[0].values) if made else 0)
    if wanted not in names:
        raise ValueError(f'"sort_by" must be a column of the answer, {", ".join(names)}: {wanted!r:.100}')
    column = names[wanted]
    values = (
        column.values
        if column.texts is None
        else np.array([column.texts[code] for code in column.values.tolist()], object)
    )
    order = np.argsort(values, kind="stable")
    order = order[::-1] if query.descending else order
    return np.concatenate([order[column.known[order]], order[~column.known[order]]]).astype(int)
