"""Collectives: their sizes, durations and exposed time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..traces.intervals import Intervals, covered_ns
from ..traces.table import Array, Table
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


def collective_table(gpu: Table, mask: Array, compute: Intervals) -> list[dict[str, Any]]:
    """Return the kernels that communicate, by collective or kernel name, process group and type.

    ``exposed_ns`` adds up the time of each kernel during which nothing computes; kernels that run at the same
    time all count. ``bytes`` is the size of the larger of input and output, as in nccl-tests.
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
        rows.append(
            {
                "name": strings[name],
                "group": strings[group],
                "dtype": strings[dtype],
                "count": count,
                "bytes": total,
                "sum_ns": duration,
                "exposed_ns": alone,
                "bytes_per_s": None if total is None else ratio(total * 1e9, duration),
            }
        )
    return sorted(rows, key=lambda row: -row["sum_ns"])
