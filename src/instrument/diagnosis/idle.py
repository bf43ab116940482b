"""Causes of idle time on the GPU: waiting for the host, launch latency, or something else."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..traces.table import Array, Table
from .groups import sum_by_group

SHORT_NS = 30_000
"""Shorter gaps are launch latency; HTA's default."""

UNKNOWN = np.iinfo(np.int64).min
"""The launch time of work whose launch is not in the trace."""


def launched_at(gpu: Table, runtime: Table) -> Array:
    """Return when the host began to launch each kernel, memcpy and memset, in ns, or `UNKNOWN`."""
    times = np.full(len(gpu), UNKNOWN)
    known = gpu.launch >= 0
    times[known] = runtime.start_ns[gpu.launch[known]]
    return times


def in_order(gpu: Table) -> Array:
    """Return the rows in order of start; equal starts stay in the order of the file."""
    return np.lexsort((gpu.event, gpu.start_ns))


def idle_streams(gpu: Table, launched_ns: Array, order: Array) -> dict[str, dict[str, int]]:
    """Return for each stream the gaps between successive work, by cause.

    The rules of HTA's ``get_idle_time_breakdown``, in ns instead of whole us: ``host_wait`` if the work was
    launched after the work before it ended, else ``kernel_wait`` if the gap is shorter than `SHORT_NS`, else
    ``other``. Work that overlaps within a stream has a negative gap, which is added as such.
    """
    order = order[np.lexsort((gpu.stream[order], gpu.device[order]))]
    device, stream, end_ns = gpu.device[order], gpu.stream[order], gpu.end_ns[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(device) != 0) | (np.diff(stream) != 0)
    first, of = np.flatnonzero(new), np.cumsum(new) - 1
    after = np.flatnonzero(~new)
    before = end_ns[after - 1]
    gap, host = gpu.start_ns[order[after]] - before, launched_ns[order[after]] > before
    short = gap < SHORT_NS
    classes = {"host_wait": host, "kernel_wait": ~host & short, "other": ~host & ~short}
    columns = {
        name: sum_by_group(gap[rows], of[after[rows]], len(first)).tolist() for name, rows in classes.items()
    }
    columns["n"] = np.bincount(of, minlength=len(first)).tolist()
    rows = zip(device[first].tolist(), stream[first].tolist(), *columns.values(), strict=True)
    return {
        f"dev{_known(on)}/stream{_known(number)}": dict(zip(columns, values, strict=True))
        for on, number, *values in rows
    }


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def gaps(gpu: Table, launched_ns: Array, order: Array) -> dict[str, Any]:
    """Return the gaps during which no stream of any device was busy, by the cause of the delay of the next work.

    ``host_wait`` if that work was launched when the gap began or later, else ``launch_latency`` if the gap is
    shorter than `SHORT_NS`, else ``other``; ``unknown`` if its launch is not in the trace. Work of zero duration
    ends a gap.
    """
    start, reach = gpu.start_ns[order], np.maximum.accumulate(gpu.end_ns[order])
    after = np.flatnonzero(start[1:] > reach[:-1]) + 1
    begins, gap, launched = reach[after - 1], start[after] - reach[after - 1], launched_ns[order[after]]
    unknown, host = launched == UNKNOWN, launched >= begins
    short = gap < SHORT_NS
    classes = {
        "host_wait": host,
        "launch_latency": ~unknown & ~host & short,
        "other": ~unknown & ~host & ~short,
        "unknown": unknown,
    }
    found = {name: rows for name, rows in classes.items() if rows.any()}
    return {
        "gaps_device_ns": {name: int(gap[rows].sum()) for name, rows in found.items()},
        "gaps_device_n": {name: int(rows.sum()) for name, rows in found.items()},
        "max_gap_ns": int(gap.max(initial=0)),
        "n_gaps": len(gap),
    }
