"""Collectives: their sizes, durations and exposed time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..traces.intervals import Intervals, covered_ns
from ..traces.table import Array, Table
from ..traces.trace import Trace
from .activity import ratio
from .groups import sum_by_group

BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("double", "long", "int64", "complexfloat"), 8),
    "complexdouble": 16,
}
"""Bytes per element by type, as torch.profiler names the types of collectives, in lower case."""


_BUS: dict[str, Callable[[int], float]] = {
    "reduce_?scatter": lambda ranks: (ranks - 1) / ranks,
    "all_?reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_?gather": lambda ranks: (ranks - 1) / ranks,
    "all_?to_?all": lambda ranks: (ranks - 1) / ranks,
    "broadcast|reduce|send|recv": lambda ranks: 1.0,
}
"""By collective, the bytes that each link moves per byte of the collective: the factors of nccl-tests."""


def collective_table(
    gpu: Table, mask: Array, compute: Intervals, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the kernels that communicate, by collective or kernel name, process group and type.

    ``exposed_ns`` adds up the time of each kernel during which nothing computes; kernels that run at the same
    time all count. ``bytes`` is the size of the larger of input and output, as in nccl-tests, and
    ``bus_bytes_per_s`` what each link carries: ``bytes_per_s`` times the factor of nccl-tests for the number of
    ranks.

    Args:
        gpu: the GPU work.
        mask: which rows communicate.
        compute: when anything computes.
        sizes: the number of ranks of each process group.
    """
    part, strings = gpu.where(mask), gpu.strings
    label = np.where(part.collective != 0, part.collective, part.name)
    keys, which = np.unique(np.stack((label, part.group, part.dtype), axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    exposed = part.duration_ns - covered_ns(compute, part.start_ns, part.end_ns)
    elements = np.maximum(part.elements_in, part.elements_out)
    rows = []
    columns = (np.ones_like(which), elements, elements < 0, part.duration_ns, exposed)
    totals = zip(*(sum_by_group(column, which, len(keys)).tolist() for column in columns), strict=True)
    for (name, group, dtype), (count, size, unknown, duration, alone) in zip(keys.tolist(), totals, strict=True):
        each = BYTES.get(strings[dtype].lower())
        total = None if each is None or unknown else size * each
        rate = None if total is None else ratio(total * 1e9, duration)
        factor = _bus_factor(strings[name], sizes.get(strings[group]))
        rows.append(
            {
                "name": strings[name],
                "group": strings[group],
                "dtype": strings[dtype],
                "count": count,
                "bytes": total,
                "sum_ns": duration,
                "exposed_ns": alone,
                "bytes_per_s": rate,
                "bus_bytes_per_s": None if rate is None or factor is None else rate * factor,
            }
        )
    return sorted(rows, key=lambda row: (-row["sum_ns"], row["name"], row["group"], row["dtype"]))


def group_sizes(trace: Trace) -> dict[str, int]:
    """Return the number of ranks of each process group, as the trace says; groups that disagree are left out."""
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    found: dict[str, set[int]] = {}
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping) and isinstance(size := group.get("pg_size"), int) and size > 0:
            found.setdefault(str(group.get("pg_name")), set()).add(size)
    return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}


def _bus_factor(name: str, ranks: int | None) -> float | None:
    if not ranks:
        return None
    return next((factor(ranks) for pattern, factor in _BUS.items() if re.search(pattern, name.lower())), None)
