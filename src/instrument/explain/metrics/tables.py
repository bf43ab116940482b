"""GPU time by kernel, operator, region and module."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...read.tables.table import KERNEL, Array, Table
from ...read.tables.trace import MODULE
from .groups import GroupedEvents, ancestor_pairs, sum_by_group, unique_codes
from .utilization import ratio

Rows = list[dict[str, Any]]


def kernel_table(gpu: Table) -> Rows:
    """Return the kernels by name, with their short name and family, number, durations and share, longest first."""
    kernels = gpu.category == KERNEL
    if not kernels.any():
        return []
    order = np.argsort(gpu.name[kernels], kind="stable")
    name, duration = gpu.name[kernels][order], gpu.duration_ns[kernels][order]
    first = np.flatnonzero(np.diff(name, prepend=-1))
    count = np.diff(np.append(first, len(duration)))
    total = np.add.reduceat(duration, first)
    columns = {
        "count": count,
        "sum_ns": total,
        "mean_ns": total / count,
        "min_ns": np.minimum.reduceat(duration, first),
        "max_ns": np.maximum.reduceat(duration, first),
    }
    whole = int(total.sum())
    rows = _rows(gpu, name[first], columns, "sum_ns")
    described = gpu.where(np.flatnonzero(kernels)[order][first])
    texts = zip(*(described.text(column) for column in ("name", "short_name", "family")), strict=True)
    about = {name: {"short_name": short, "family": family} for name, short, family in texts}
    return [row | {"share": ratio(row["sum_ns"], whole)} | about[row["name"]] for row in rows]


def operator_table(operators: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the operators by name: calls, CPU time without children, and work on the GPU.

    ``gpu_self_ns`` adds up the work that the calls launched themselves, ``gpu_ns`` includes the work of the
    operators that they called, and ``gpu_busy_ns`` is the time during which any of that runs. Work under an
    operator that calls an operator of the same name counts once.
    """
    if not operators:
        return []
    inside = np.flatnonzero(operators.parent >= 0)
    children = GroupedEvents(operators.start_ns[inside], operators.end_ns[inside]).totals(
        [(np.arange(len(inside)), operators.parent[inside])], len(operators)
    )
    names, of = unique_codes(operators.name)
    own = np.flatnonzero(gpu.operator >= 0)
    launched = work.totals([(own, of[gpu.operator[own]])], len(names))
    pairs = ancestor_pairs(gpu.operator, operators.parent)
    below = work.totals(((rows, of[above]) for rows, above in pairs), len(names))
    columns = {
        "calls": np.bincount(of, minlength=len(names)),
        "cpu_self_ns": sum_by_group(operators.duration_ns - children.busy, of, len(names)),
        "gpu_self_ns": launched.sum,
        "gpu_ns": below.sum,
        "gpu_busy_ns": below.busy,
    }
    return _rows(operators, names, columns, "gpu_self_ns", "cpu_self_ns")


def region_table(regions: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the named regions and the GPU work launched inside them.

    ``gpu_ns`` adds up the durations of that work, ``gpu_busy_ns`` is the time during which any of it runs, and
    ``gpu_projection_ns`` adds up, over the calls, the time from the first start to the last end.
    """
    return _nested(regions, work, gpu.region, regions.parent, np.ones(len(regions), bool))


def module_table(frames: Table, gpu: Table, work: GroupedEvents) -> Rows:
    """Return the modules, with the columns of `region_table`; they need a trace recorded with stacks."""
    if not frames:
        return []
    is_module = frames.matching("name", MODULE)
    return _nested(frames, work, gpu.module, _module_above(frames.parent, is_module), is_module)


def _module_above(parents: Array, is_module: Array) -> Array:
    """Return the module around each module, or -1."""
    result = np.full(len(parents), -1)
    modules = np.flatnonzero(is_module)
    rows = parents[modules]
    while len(modules):
        found = (rows < 0) | is_module[rows]
        result[modules[found]] = rows[found]
        modules, rows = modules[~found], parents[rows[~found]]
    return result


def _nested(ranges: Table, work: GroupedEvents, inner: Array, parents: Array, chosen: Array) -> Rows:
    if not chosen.any():
        return []
    names, of = unique_codes(ranges.name[chosen])
    number = np.zeros(len(ranges), np.int64)
    number[chosen] = of
    by_name = work.totals(((rows, number[above]) for rows, above in ancestor_pairs(inner, parents)), len(names))
    by_call = work.totals(ancestor_pairs(inner, parents), len(ranges))
    columns = {
        "calls": np.bincount(of, minlength=len(names)),
        "cpu_ns": sum_by_group(ranges.duration_ns[chosen], of, len(names)),
        "gpu_count": by_name.count,
        "gpu_ns": by_name.sum,
        "gpu_busy_ns": by_name.busy,
        "gpu_projection_ns": sum_by_group(by_call.extent[chosen], of, len(names)),
    }
    return _rows(ranges, names, columns, "gpu_ns", "cpu_ns")


def _rows(table: Table, names: Array, columns: dict[str, Array], *by: str) -> Rows:
    """Return one dict per name, the largest in these columns first and, of equal ones, in order of the names."""
    texts = [table.strings[name] for name in names.tolist()]
    order = np.lexsort((_ranks(texts), *(-columns[name] for name in reversed(by))))
    values = zip(*(column[order].tolist() for column in columns.values()), strict=True)
    return [
        {"name": texts[place], **dict(zip(columns, row, strict=True))}
        for place, row in zip(order.tolist(), values, strict=True)
    ]


def _ranks(texts: list[str]) -> Array:
    """Return the place of each text in their order."""
    ranks = np.empty(len(texts), np.int64)
    ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
    return ranks
